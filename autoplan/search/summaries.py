"""What a plan says of its question: the model, and what was assumed."""

from __future__ import annotations

from autoplan.cost_models.software import COMPILED
from autoplan.layers import LayerGraph
from autoplan.plan import ModelSummary, Strategy
from autoplan.search.dag import down_sets, is_branching
from autoplan.search.listed import is_listed
from autoplan.search.problem import Problem

_OVERLAP = (
    "gradients are synchronised beside the backward of operators, all but the last layer's; "
    "other communication waits for nothing and hides behind nothing"
)
_EVEN = (
    "stages of interleaved and zero-bubble schedules are the most even ones, with one recompute policy a GPU; "
    "other cuts were not tried"
)

_COMPILED = (
    f"stages run under torch.compile: element-wise operators and norms move {COMPILED.element_wise_traffic:g} of their "
    f"bytes, the host launches in {COMPILED.dispatch:g} of the time, and activations are taken as those that eager "
    "mode saves, of which 0.6 to 0.7 were kept where it was measured; compiling itself, once, is not counted"
)
_BRANCHES = (
    "the model has branches: its layers are listed in the order of the stages, and a stage is priced as if it waited "
    "for the one before it even where it reads nothing from it"
)
_RUNS = (
    "cuts within runs of layers that follow each other were tried in the model's own order alone: there are too many"
)


def model_summary(problem: Problem) -> ModelSummary:
    """The model of ``problem``."""
    layers = problem.layers
    return ModelSummary(
        name=layers.name,
        parameters=layers.parameters,
        trainable_parameters=layers.trainable_parameters,
        tokens_per_sample=layers.tokens_per_sample,
        dtype=layers.dtype,
        layers=tuple(layer.name for layer in layers.layers),
        fingerprint=layers.fingerprint,
        layer_kinds=_kinds(layers),
        edges=_edges(layers),
    )


def _kinds(layers: LayerGraph) -> dict[str, str]:
    """The layers of each digest as spans, such as "0, 2-5"."""
    found: dict[str, list[list[int]]] = {}
    for index, digest in enumerate(layers.layer_digests):
        spans = found.setdefault(digest, [])
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return {
        digest: ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
        for digest, spans in found.items()
    }


def _edges(layers: LayerGraph) -> tuple[tuple[int, int], ...]:
    """The pairs of layers that hand a value on; () for a chain."""
    found = sorted({(edge.source, target) for edge in layers.edges for target in edge.targets})
    return () if found == [(layer, layer + 1) for layer in range(len(layers.layers) - 1)] else tuple(found)


def assumptions(problem: Problem, strategy: Strategy) -> tuple[str, ...]:
    """The problem's, and how the costs of ``strategy`` were taken."""
    found = problem.assumptions
    if problem.compiled:
        found = (*found, _COMPILED)
    if strategy.tensor > 1 and problem.without_rule is not None:
        found = (*found, *problem.without_rule(strategy.tensor))
    if strategy.data > 1:
        found = (*found, _OVERLAP)
    if is_listed(strategy):
        return (*found, _EVEN)
    return (*found, *_of_branches(problem)) if strategy.pipeline > 1 else found


def _of_branches(problem: Problem) -> tuple[str, ...]:
    if not is_branching(problem.layers):
        return ()
    sets = down_sets(problem.layers)
    return (_BRANCHES,) if sets is not None and sets.every else (_BRANCHES, _RUNS)
