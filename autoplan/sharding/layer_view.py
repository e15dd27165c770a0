"""One layer of the graph with its operators, as the tensor-parallel problem and its result see it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autoplan.layers.types import Operator
from autoplan.sharding.operation import GraphFacts, sample_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer in the graph: its nodes and operators in step, and the values that other layers read."""

    facts: GraphFacts
    nodes: tuple[Node, ...]
    operators: tuple[Operator, ...]
    exported: frozenset[Node]
    batch_size: int
    dynamic: bool

    def bytes_of(self, node: Node) -> tuple[float, bool]:
        return sample_bytes(node, batch_size=self.batch_size, dynamic=self.dynamic)
