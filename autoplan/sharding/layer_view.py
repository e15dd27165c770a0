"""One layer of the graph with its operators, as the tensor-parallel problem and its result see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from autoplan.layers.types import Operator
from autoplan.sharding.operation import GraphFacts, sample_bytes
from autoplan.sharding.placements import REPLICATE, Placement, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer in the graph: its nodes and operators in step, and the values that other layers read.

    ``shares``: the values that layers hand each other as shares; all others whole. ``sizes``: bytes that are known,
    which views of one graph share.
    """

    facts: GraphFacts
    nodes: tuple[Node, ...]
    operators: tuple[Operator, ...]
    exported: frozenset[Node]
    batch_size: int
    dynamic: bool
    shares: Mapping[Node, Shard] = field(default_factory=dict)
    sizes: dict[Node, tuple[float, bool]] = field(default_factory=dict, repr=False)

    def handed(self, node: Node) -> Placement:
        """How layers hand each other the value."""
        return self.shares.get(node, REPLICATE)

    def bytes_of(self, node: Node) -> tuple[float, bool]:
        """Bytes of a value, and whether those are a sample's: see :func:`sample_bytes`."""
        found = self.sizes.get(node)
        if found is None:
            found = self.sizes[node] = sample_bytes(node, batch_size=self.batch_size, dynamic=self.dynamic)
        return found
