"""What the passes that write an axis into a graph share."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from autoplan.passes.graph_facts import memory_order
from autoplan.sharding.operation import tensors_of
from autoplan.sharding.placements import Placement, Shard
from autoplan.sharding.rules import LocalSize


@dataclass(slots=True)
class LocalValues:
    """Stand-ins of local shapes; nodes of equal shapes share one, for making them is a pass's main cost."""

    degree: int
    _made: dict[tuple[Any, ...], Tensor] = field(init=False, default_factory=dict)

    def of(self, value: Any, dim: int) -> Any:
        """``value``, a tensor or a tuple of tensors, with a rank's part of ``dim``, in memory as ``value`` lies."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.of(item, dim) for item in value)
        if value.dim() <= dim:  # an element that nothing reads, of a tuple whose elements are unlike
            return value
        order = memory_order(value)
        key = (*map(str, value.shape), value.dtype, value.device, dim, order)
        if key not in self._made:
            sizes = list(value.shape)
            sizes[dim] = sizes[dim] // self.degree
            made = value.detach().new_empty([sizes[d] for d in order])
            self._made[key] = made.permute([order.index(d) for d in range(len(order))])
        return self._made[key]


class AxisWriter:
    """What writers of an axis do alike: ``graph`` is the new one, ``written`` its node of each old one, ``origin`` the
    captured node of each that is added."""

    __slots__ = ()
    graph: Graph
    written: dict[Node, Node]
    origin: dict[str, str]
    local_values: LocalValues

    def _written_sizes(self, local: Mapping[str, Any], node: Node) -> dict[str, Any]:
        """Local arguments with fx nodes of the new graph, symbolic sizes divided."""
        degree = self.local_values.degree

        def one(value: Any) -> Any:
            if isinstance(value, LocalSize):
                new = self.graph.call_function(operator.floordiv, (self.written[value.size], degree))
                new.meta = {**place_of(node), "val": value.size.meta["val"] // degree}
                new.meta["autoplan_origin"] = self.origin[new.name] = origin_of(node)
                return new
            if isinstance(value, list | tuple):
                return [one(item) for item in value]
            return self.written[value] if isinstance(value, Node) else value

        return {name: one(value) for name, value in local.items()}

    def _meta(self, node: Node, placement: Placement) -> dict[str, Any]:
        """The meta of ``node`` where its value is placed so."""
        meta = dict(node.meta)
        if isinstance(placement, Shard) and tensors_of(meta.get("val")):
            meta["val"] = self.local_values.of(meta["val"], placement.dim)
        return meta


def origin_of(node: Node) -> str:
    """The node of the captured graph beside which ``node`` belongs."""
    return str(node.meta.get("autoplan_origin", node.name))


def layout(state: Placement) -> tuple[Any, ...]:
    """The last arguments of a function that cuts or joins along ``state``; none of one that does not."""
    if not isinstance(state, Shard):
        return ()
    return (state.dim, list(state.parts), state.block) if state.parts or state.block else (state.dim,)


def shard_of(arguments: Sequence[Any]) -> Shard:
    """The inverse of :func:`layout`, for a function that cuts or joins."""
    dim, *rest = arguments
    parts, block = rest or ((), 0)
    return Shard(dim, tuple(parts), block)


def place_of(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def override(
    node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], local: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``args`` and ``kwargs`` with the arguments in ``local`` replaced, wherever they stand."""
    names = [argument.name for argument in node.target._schema.arguments] if local else []  # type: ignore[union-attr]
    listed, named = list(args), dict(kwargs)
    for name, value in local.items():
        index = names.index(name)
        if name not in named and index < len(listed):
            listed[index] = value
        else:
            named[name] = value
    return tuple(listed), named
