"""The numeric check: shrink, run the plan's program on forked ranks, compare, and name the first that differs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from autoplan.capture import Capture, capture
from autoplan.capture.autocast import kept_regions
from autoplan.capture.batch import replace_leaves
from autoplan.capture.errors import node_line
from autoplan.cluster import Cluster
from autoplan.errors import AutoplanError, ModelError, RuntimeFault, StrategyError
from autoplan.layers import LayerGraph, build_layers
from autoplan.layers.operators import RANDOM, operator_name
from autoplan.plan import Plan, Strategy
from autoplan.runtime import Program, launch
from autoplan.runtime.build import check_executable
from autoplan.sharding import Placement, Sharding, shard_model
from autoplan.verification import locate, numbers, static
from autoplan.verification.precision import float64_throughout
from autoplan.verification.reduce import reduce_plan, reduce_strategy, reductions
from autoplan.verification.shrink import Small, resample, shrink
from autoplan.verification.types import Check, Difference, LayerNumbers, Numeric

RANKS = 16  # forked processes: what two cores and a few GiB bear
DEADLINE_S = 240.0
_LOW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is run: the small model, captured, with its layers, plan and sharding."""

    small: Small
    capture: Capture
    layers: LayerGraph
    plan: Plan
    sharding: Sharding | None
    cluster: Cluster


def check_numbers(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    captured: Capture,
    sharding: Sharding | None,
    plan: Plan,
    cluster: Cluster,
    ranks: int = RANKS,
) -> tuple[Numeric, tuple[Check, ...]]:
    """The comparison, and the static checks of the program that was run. ``captured`` and ``sharding`` are of the
    whole model: what it splits is split in the small one."""
    try:
        check_executable(captured, plan)
    except StrategyError as error:
        return Numeric(status="not executable here", reason=error.what), ()
    strategy = reduce_strategy(plan.strategy, ranks=ranks)
    with float64_throughout():
        try:
            small = shrink(model, example_inputs, loss_fn, before=plan.strategy, after=strategy)
            subject = subject_of(small, plan, strategy, sharding, cluster)
            check_executable(subject.capture, subject.plan)
        except (ModelError, StrategyError) as error:
            return Numeric(status="not executable here", reason=error.what), ()
        return compare(subject, (*reductions(plan.strategy, strategy), *_uncast(captured)))


def _uncast(captured: Capture) -> tuple[str, ...]:
    """Autocast never casts float64, so of a region both sides are compared without its casts, and that is said."""
    return tuple(
        f"{region} casts nothing in float64: both sides compute it uncast" for region in kept_regions(captured.notes)
    )


def subject_of(small: Small, plan: Plan, strategy: Strategy, sharding: Sharding | None, cluster: Cluster) -> Subject:
    """``small``, traced, under ``plan`` at the degrees of ``strategy``; ``sharding`` is the whole model's."""
    samples = strategy.global_batch
    example = resample(small.example_inputs, samples, seed=1)
    captured = capture(small.model, example, loss_fn=small.loss_fn)
    layers = build_layers(captured)
    small_sharding = None
    if strategy.tensor > 1:
        like = sharding if sharding is not None and _corresponds(sharding, layers) else None
        small_sharding = shard_model(
            captured,
            layers,
            degree=strategy.tensor,
            cluster=cluster,
            like=like,
            sequence=strategy.sequence_parallel,
        )
    return Subject(
        small=dataclasses.replace(small, example_inputs=example),
        capture=captured,
        layers=layers,
        plan=reduce_plan(plan, layers, strategy),
        sharding=small_sharding,
        cluster=cluster,
    )


def _corresponds(sharding: Sharding, layers: LayerGraph) -> bool:
    """Whether the layers are of the same kinds as the whole model's: equally many operators, in the same order."""
    return [len(kind.options) for kind in sharding.kinds] == [len(kind.operators) for kind in layers.kinds]


def compare(subject: Subject, reduced: tuple[str, ...] = ()) -> tuple[Numeric, tuple[Check, ...]]:
    """Run it and compare: the numbers, and the static checks of the program that ran."""
    strategy, small = subject.plan.strategy, subject.small
    checks, programs = static.check_static(subject.capture, subject.layers, subject.plan, subject.cluster)
    batches, ignored = _batches(subject)
    expected = numbers.train_alone(small.model, small.loss_fn, subject.capture, batches)
    tolerance, note = _tolerance(subject.capture)
    shared: dict[str, Any] = {
        "strategy": strategy,
        "reductions": (*reduced, *small.reductions, *note, *ignored),
        "ranks": strategy.gpus,
        "steps": len(batches),
        "tolerance": tolerance,
    }
    reason = _incomparable(subject, expected, batches)
    if reason:
        return Numeric(status="not executable here", reason=reason, **shared), ()
    try:
        program = Program(
            subject.capture,
            subject.plan,
            subject.layers,
            cluster=subject.cluster,
            sharding=subject.sharding,
            device="cpu",
        )
        for tensor_rank in range(strategy.tensor):  # once here instead of in every rank
            program._builder.graphs(tensor_rank)
        found = _on_ranks(strategy.gpus, lambda: numbers.train_rank(program, batches, expected, tolerance))
    except AutoplanError as error:
        return Numeric(status="differs", reason=error.what, first=_crash(error, subject), **shared), checks
    findings = [(rank, finding) for rank, own in enumerate(found) for finding in own]
    names = _Names(subject)
    table = names.table([finding for _, finding in findings])
    wrong = [(rank, finding) for rank, finding in findings if finding.ratio > 1.0]
    if not wrong:
        return Numeric(status="equal", layers=table, **shared), checks
    placements = _placed(programs, strategy.tensor)
    positions = programs.positions if programs is not None else {}
    first = _first(subject, program, batches, placements, positions, wrong, names)
    return Numeric(status="differs", layers=table, first=first, **shared), checks


def _incomparable(subject: Subject, expected: numbers.Numbers, batches: Sequence[Any]) -> str:
    """Why the single process itself gives nothing to compare with; "" where it does."""
    if not all(torch.isfinite(torch.tensor(expected.losses))):
        return "the single process's own loss is not finite"
    again = numbers.train_alone(subject.small.model, subject.small.loss_fn, subject.capture, batches[:1])
    if math.isclose(again.losses[0], expected.losses[0], rel_tol=numbers.TOLERANCE):
        return ""
    drawing = next((n for n in subject.capture.graph_module.graph.nodes if _draws(n)), None)
    where = f", first at {node_line(drawing)}" if drawing is not None else ""
    return f"two runs of the single process differ: its forward draws random numbers{where}"


def _draws(node: Node) -> bool:
    """Dropout apart, which is off here."""
    name = operator_name(node.target)
    return node.op == "call_function" and name in RANDOM and "dropout" not in name


def _on_ranks(count: int, body: Callable[[], Any]) -> list[Any]:
    if count == 1:
        return [body()]
    return launch(body, gpus=count, device="cpu", timeout_s=DEADLINE_S / 2, deadline_s=DEADLINE_S)


def _tolerance(captured: Capture) -> tuple[float, tuple[str, ...]]:
    """Float64's, or float32's where the model itself computes in it."""
    for node in captured.graph_module.graph.nodes:
        value = node.meta.get("val")
        low = isinstance(value, Tensor) and value.dim() and value.dtype in _LOW
        if low and node.op == "call_function":
            said = f"tolerance of float32: the model computes in it at {node_line(node)}"
            return numbers.FLOAT32_TOLERANCE, (said,)
    return numbers.TOLERANCE, ()


# ------------------------------------------------------------------------------------------------------------ batches


def _batches(subject: Subject) -> tuple[list[Any], tuple[str, ...]]:
    """A batch a step: labels ignored unevenly, and in the second step micro-batches of unequal sizes."""
    strategy, small = subject.plan.strategy, subject.small
    sizes = [strategy.global_batch] * numbers.STEPS
    if strategy.micro_batch_size > 1 and strategy.micro_batches > 1 and subject.capture.dynamic_batch:
        sizes[1] -= strategy.data
    plain = [resample(small.example_inputs, size, seed=step + 1) for step, size in enumerate(sizes)]
    targets = _targets(subject.capture)
    if not targets:
        return plain, ()
    ignoring = [_ignore(batch, targets) for batch in plain]
    try:
        with torch.no_grad(), numbers.values_kept(subject.capture):
            numbers.CallAndLoss(small.model, small.loss_fn, ignoring[0])(*numbers.tensors(ignoring[0]).values())
    except Exception:  # labels that are read as something else too (an embedding's rows) can't be ignored
        return plain, ("no labels ignored: the model reads them as more than targets",)
    return ignoring, ()


def _targets(captured: Capture) -> dict[tuple[str | int, ...], int]:
    """Inputs that a mean over targets counts, by path, with the value that it ignores."""
    by_placeholder = {spec.placeholder: spec.path for spec in captured.inputs}
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    found: dict[tuple[str | int, ...], int] = {}
    for term in captured.loss_terms:
        node = nodes.get(term.node)
        if term.weight != "targets" or node is None or len(node.args) < 2 or not isinstance(node.args[1], Node):
            continue
        source: Node = node.args[1]
        while source.op == "call_function" and source.all_input_nodes:
            source = source.all_input_nodes[0]
        ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
        if source.op == "placeholder" and source.name in by_placeholder and isinstance(ignored, int):
            found[by_placeholder[source.name]] = ignored
    return found


def _ignore(batch: Any, targets: Mapping[tuple[str | int, ...], int]) -> Any:
    """Sample i ignores its last i labels, one sample all of them; of labels one a sample, every third."""
    changed: dict[Any, Tensor] = {}
    for path, tensor in numbers.tensors(batch).items():
        if path not in targets or tensor.is_floating_point():
            continue
        value = tensor.clone()
        for sample in range(value.shape[0]):
            if value.dim() == 1:
                if sample % 3 == 1:
                    value[sample] = targets[path]
                continue
            length = value.shape[1]
            value[sample, length - sample % length :] = targets[path]
        if value.dim() > 1 and value.shape[0] > 2:
            value[-2] = targets[path]
        changed[path] = value
    return replace_leaves(batch, changed)


# ------------------------------------------------------------------------------------------------- the first difference


class _Names:
    """From names of parameters and operators to layers and the user's lines."""

    def __init__(self, subject: Subject) -> None:
        graph = subject.capture.graph_module.graph
        self.nodes = {node.name: node for node in graph.nodes}
        self.position = {node.name: index for index, node in enumerate(graph.nodes)}
        self.layer_of_node = {name: layer.name for layer in subject.layers.layers for name in layer.nodes}
        self.readers: dict[str, Node] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                for reader in node.users:
                    self.readers.setdefault(str(node.target), reader)
        self.order = {layer.name: index for index, layer in enumerate(subject.layers.layers)}
        for group in subject.capture.tied:
            known = next((self.readers[name] for name in group if name in self.readers), None)
            for name in group:
                if known is not None:
                    self.readers.setdefault(name, known)

    def layer(self, name: str) -> str:
        """The layer that an operator is of, or that reads a parameter or buffer."""
        reader = self.readers.get(name)
        return self.layer_of_node.get(reader.name if reader is not None else name, name.rpartition(".")[0])

    def where(self, name: str) -> str:
        node = self.readers.get(name) or self.nodes.get(name)
        return node_line(node) if node is not None else ""

    def position_of(self, name: str) -> int:
        reader = self.readers.get(name)
        return self.position.get(reader.name if reader is not None else name, -1)

    def table(self, findings: Sequence[numbers.Finding]) -> tuple[LayerNumbers, ...]:
        """The worst of each layer, in the model's order."""
        worst: dict[str, numbers.Finding] = {}
        tensors: dict[str, set[tuple[str, str, int]]] = {}
        for finding in findings:
            layer = self.layer(finding.name) if finding.name else finding.quantity
            tensors.setdefault(layer, set()).add((finding.quantity, finding.name, finding.step))
            if layer not in worst or finding.ratio > worst[layer].ratio:
                worst[layer] = finding
        ordered = sorted(worst, key=lambda layer: (self.order.get(layer, len(self.order)), layer))
        return tuple(
            LayerNumbers(
                layer=layer,
                compared=len(tensors[layer]),
                worst=worst[layer].ratio,
                tensor=f"{worst[layer].quantity} {worst[layer].name}".strip(),
            )
            for layer in ordered
        )


def _placed(programs: static.Programs | None, degree: int) -> Mapping[str, Placement]:
    if programs is None or degree == 1:
        return {}
    try:
        return static.lint.check_placements(programs.sharded, programs.whole, programs.placements, degree=degree)
    except AutoplanError:
        return {}


def _first(
    subject: Subject,
    program: Program,
    batches: Sequence[Any],
    placements: Mapping[str, Placement],
    positions: Mapping[str, Placement],
    wrong: Sequence[tuple[int, numbers.Finding]],
    names: _Names,
) -> Difference:
    """The first that differs in the order in which a step computes: values, gradients from the loss, weights. Looked
    for in the first step that differs, after the same steps before it (what is stale is right in the first step)."""
    earliest = min(finding.step for _, finding in wrong)
    gradients = [(rank, f) for rank, f in wrong if f.quantity == "gradient" and f.step == earliest]
    located: list[tuple[int, locate.Wrong]] = []
    # Shares of a sequence over two axes at once are not compared value by value.
    alone = subject.plan.strategy.context == 1 or not subject.plan.strategy.sequence_parallel
    if alone and any(f.quantity in ("loss", "gradient", "gradient norm") and f.step == earliest for _, f in wrong):
        before, batch, small = batches[:earliest], batches[earliest], subject.small
        with numbers.values_kept(subject.capture):
            numbers.advance_alone(small.model, small.loss_fn, subject.capture, before)
            recorded = locate.record(subject.capture, batch)

        def compared() -> list[locate.Wrong]:
            numbers.advance_rank(program, before)
            return locate.compare_rank(program, batch, recorded, placements, positions)

        try:
            by_rank = _on_ranks(subject.plan.strategy.gpus, compared)
        except RuntimeFault:
            by_rank = []
        located = [(rank, found) for rank, own in enumerate(by_rank) for found in own]
    values = [entry for entry in located if entry[1].kind == "value"]
    if values:
        rank, found = min(values, key=lambda entry: entry[1].position)
        return _of_value("value", rank, found, earliest, names)
    backward = max(
        (entry for entry in located if entry[1].kind == "gradient"), key=lambda entry: entry[1].position, default=None
    )
    parameter = max(gradients, key=lambda entry: names.position_of(entry[1].name), default=None)
    if backward is not None and (parameter is None or backward[1].position > names.position_of(parameter[1].name)):
        return _of_value("gradient of a value", *backward, earliest, names)
    if parameter is not None:
        return _of_finding(*parameter, names)
    ranking = {"loss": 0, "gradient": 1, "gradient norm": 2, "weight": 3, "buffer": 3}
    rank, finding = min(
        wrong, key=lambda entry: (entry[1].step, ranking[entry[1].quantity], names.position_of(entry[1].name))
    )
    return _of_finding(rank, finding, names)


def _of_value(quantity: str, rank: int, found: locate.Wrong, step: int, names: _Names) -> Difference:
    return Difference(
        layer=names.layer(found.name),
        quantity=quantity,
        name=found.name,
        error=found.error,
        allowed=found.allowed,
        step=step,
        rank=rank,
        where=names.where(found.name),
    )


def _of_finding(rank: int, finding: numbers.Finding, names: _Names) -> Difference:
    return Difference(
        layer=names.layer(finding.name) if finding.name else "",
        quantity=finding.quantity,
        name=finding.name,
        error=finding.error,
        allowed=finding.allowed,
        step=finding.step,
        rank=rank,
        where=names.where(finding.name) if finding.name else "",
    )


def _crash(error: AutoplanError, subject: Subject) -> Difference:
    """A program that fails where the single process does not."""
    quoted = error.what.split("`")[1::2]
    layers = {name: layer.name for layer in subject.layers.layers for name in layer.nodes}
    return Difference(
        layer=next((layers[name] for name in quoted if name in layers), ""),
        quantity="run",
        name=quoted[0] if quoted else "",
        error=numbers.ENORMOUS,
        allowed=0.0,
        step=getattr(error, "step", None) or 0,
        rank=getattr(error, "rank", None) or 0,
        where=error.where,
    )
