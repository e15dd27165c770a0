"""The scalar loss as a sum of terms, each of which is known how to split over parts of the batch.

Back from the loss through linear operators: loss = sum of coefficient x term. A term is a mean or a sum over the
samples; a constant, which depends on no sample (a regulariser); and totals, which are no summands but counts of the
inputs that something divides by, as in ``(x * mask).sum() / mask.sum()``. With parts p of the batch,

    mean over the batch = sum_p (sum over part p) / N      with N = sum_p (what the mean counts in part p)
    constant            = sum_p constant / P               with P = sum_p 1

so a weight a term, added up over the parts, is all that a part needs to know of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.fx import GraphModule, Node

from autoplan.capture.batch_flow import Flow
from autoplan.capture.batch_losses import LOSSES, counts_targets
from autoplan.capture.batch_state import Free, Reduced, Total, bound, short_name, tensors
from autoplan.capture.coupling import loss_node, trace_batch
from autoplan.capture.types import Coupling, InputSpec, LossTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """``argument`` of ``user`` (a node, or a number in the code) is the same in every part."""

    user: Node
    argument: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A term where it stands in the graph. ``mask``: what selected the rows that a mean counts, if any."""

    term: LossTerm
    node: Node
    constant: Constant | None = None
    mask: Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """``sites`` in the order of the terms. ``total_uses``: (user, argument) pairs to be computed from totals."""

    sites: tuple[Site, ...]
    total_uses: tuple[tuple[Node, Node], ...]
    couplings: tuple[Coupling, ...]
    notes: tuple[str, ...]


def analyse(
    graph_module: GraphModule, inputs: tuple[InputSpec, ...]
) -> tuple[tuple[LossTerm, ...], tuple[Coupling, ...]]:
    """The terms of the loss, and the places where samples meet. No couplings: the batch may be split.

    Terms are empty where the loss is not a sum of terms; then there is a coupling that says why.
    """
    found = decompose(graph_module, inputs)
    return tuple(site.term for site in found.sites), found.couplings


def decompose(graph_module: GraphModule, inputs: tuple[InputSpec, ...]) -> Decomposition:
    """As :func:`analyse`, with the nodes, and notes on operators that were taken to work on each sample by itself."""
    flow = trace_batch(graph_module, inputs)
    loss = loss_node(graph_module)
    state = flow.state(loss)
    sites: tuple[Site, ...] = ()
    if isinstance(state, Reduced):
        sites = _sites(flow, graph_module, loss)
    elif isinstance(state, (Free, Total)):
        output = graph_module.graph.output_node()
        if isinstance(state, Total):
            flow.total_uses[output, loss] = state.sources
        constant = _constant_site(Constant(user=output, argument=loss), 1.0)
        sites = (constant, *_total_sites(flow))
    elif not flow.couplings:
        flow.couple(loss, "the loss is not a sum or mean over the samples of the batch")
    uses = tuple(flow.total_uses) if sites else ()
    return Decomposition(
        sites=sites, total_uses=uses, couplings=tuple(flow.couplings.values()), notes=tuple(flow.notes)
    )


def _sites(flow: Flow, graph_module: GraphModule, loss: Node) -> tuple[Site, ...]:
    """Walk back from the loss, in reverse order of the graph, handing each operand its share of the coefficient."""
    coefficients: dict[Node, float] = {loss: 1.0}
    found: list[Site] = []
    constants: set[tuple[Node, Any]] = set()
    for node in reversed(graph_module.graph.nodes):
        coefficient = coefficients.pop(node, None)
        if coefficient is None:
            continue
        if node in flow.means or node in flow.sums:
            found.append(_reduction_site(flow, node, coefficient))
            continue
        for operand, factor in _summands(flow, node):
            if isinstance(operand, Node) and isinstance(flow.state(operand), Reduced):
                coefficients[operand] = coefficients.get(operand, 0.0) + coefficient * factor
            elif (node, operand) not in constants:
                constants.add((node, operand))
                found.append(_constant_site(Constant(user=node, argument=operand), coefficient * factor))
    return (*reversed(found), *_total_sites(flow))


def _summands(flow: Flow, node: Node) -> Iterator[tuple[Any, float]]:
    """What a linear operator adds up, with the plain number that each is multiplied by."""
    name, a = short_name(node), bound(node)
    if name in ("add", "sub", "rsub"):
        left, right, alpha = a["self"], a["other"], float(a.get("alpha", 1))
        signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[name]
        for operand, sign in zip((left, right), signs, strict=True):
            if isinstance(operand, Node) or operand != 0:
                yield operand, sign
    elif name in ("mul", "div", "true_divide"):
        left, right = a["self"], a["other"]
        if (node, left) in flow.total_uses or not isinstance(flow.state(left), Reduced):
            left, right = right, left
        number = float(right) if isinstance(right, (int, float)) else 1.0
        yield left, number if name == "mul" else 1.0 / number if number else float("inf")
    elif name == "neg":
        yield a["self"], -1.0
    elif name == "mean":
        elements, means = flow.elements(node.args[0]), flow.elements(node)
        yield node.args[0], means / max(1, elements)
    else:
        for operand in tensors(node.args):
            yield operand, 1.0


def _reduction_site(flow: Flow, node: Node, coefficient: float) -> Site:
    reduction: Literal["mean", "sum"] = "mean" if node in flow.means else "sum"
    weight: Literal["elements", "targets", "none"] = "none"
    if node in flow.means:
        weight = "targets" if short_name(node) in LOSSES and counts_targets(node) else "elements"
    term = LossTerm(node=node.name, reduction=reduction, weight=weight, coefficient=coefficient)
    return Site(node=node, term=term, mask=flow.counted_by.get(node))


def _constant_site(constant: Constant, coefficient: float) -> Site:
    node = constant.argument if isinstance(constant.argument, Node) else constant.user
    term = LossTerm(node=node.name, reduction="constant", weight="none", coefficient=coefficient)
    return Site(node=node, term=term, constant=constant)


def _total_sites(flow: Flow) -> tuple[Site, ...]:
    sources: dict[Node, None] = {}
    for nodes in flow.total_uses.values():
        sources.update(dict.fromkeys(sorted(nodes, key=lambda node: node.name)))
    return tuple(
        Site(node=node, term=LossTerm(node=node.name, reduction="total", weight="node", coefficient=0.0))
        for node in sources
    )
