"""The first tensor that differs, in the order in which a step computes, with its layer and the user's line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from autoplan.capture.errors import node_line
from autoplan.errors import AutoplanError, RuntimeFault
from autoplan.runtime import Program
from autoplan.sharding import Placement
from autoplan.verification import locate, numbers, static
from autoplan.verification.types import Difference, LayerNumbers

if TYPE_CHECKING:
    from autoplan.verification.numeric import Subject


class Names:
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


def placed(programs: static.Programs | None, degree: int) -> Mapping[str, Placement]:
    if programs is None or degree == 1:
        return {}
    try:
        return static.lint.check_placements(programs.sharded, programs.whole, programs.placements, degree=degree)
    except AutoplanError:
        return {}


def first_difference(
    subject: Subject,
    program: Program,
    batches: Sequence[Any],
    placements: Mapping[str, Placement],
    positions: Mapping[str, Placement],
    wrong: Sequence[tuple[int, numbers.Finding]],
    names: Names,
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
            by_rank = numbers.on_ranks(subject.plan.strategy.gpus, compared)
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


def _of_value(quantity: str, rank: int, found: locate.Wrong, step: int, names: Names) -> Difference:
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


def _of_finding(rank: int, finding: numbers.Finding, names: Names) -> Difference:
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


def crash(error: AutoplanError, subject: Subject) -> Difference:
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
