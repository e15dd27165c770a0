"""Rules of operators that select, order or accumulate along one dimension, stack, repeat, or compare to a target.

Along the dimension that they work on they need the whole; every other dimension passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoplan.sharding.operation import Operation
from autoplan.sharding.placements import PARTIAL, Placement, Shard
from autoplan.sharding.rules import RESULT, Option, Pointwise, Rule, absent


class AlongDimension(Rule):
    """Every dimension but the one named in an argument passes; ``linear``: so do summands."""

    def __init__(self, argument: str = "dim", *, linear: bool = False) -> None:
        self.argument, self.linear = argument, linear

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        rank = len(operation.operands[0].shape)
        named = operation.arguments[self.argument]
        dims = {dim % rank for dim in ([named] if isinstance(named, int) else named)}
        if len(operation.operands) == 1 and dims and state.dim not in dims and state.dim < rank:
            yield Option((state,), state)

    def passes_partial(self, operation: Operation) -> bool:
        return self.linear


class Index(Rule):
    """x[i, j, ...] by tensors: dimensions of x that no index names pass, where the indices stand side by side."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        places = self._places(operation)
        if places is None or slot not in (0, RESULT):
            return
        if slot == RESULT:
            if state.dim not in places:
                return
            own = state.at(places.index(state.dim))
        else:
            own = state
        target = places[own.dim]
        if target is None:
            return
        others = tuple(absent(operation, index) for index in range(1, len(operation.operands)))
        yield Option((own, *others), state.at(target))

    def passes_partial(self, operation: Operation) -> bool:
        return False

    def _places(self, operation: Operation) -> list[int | None] | None:
        """For each dimension of x the result's, None for an indexed one; None where the indices stand apart."""
        indices = list(operation.arguments["indices"])
        rank = len(operation.operands[0].shape)
        named = [dim for dim, index in enumerate(indices) if index is not None]
        by_mask = any(not _is_whole_number(operand.node) for operand in operation.operands[1:])
        if not named or named != list(range(named[0], named[-1] + 1)) or by_mask:
            return None
        wide = max((len(operand.shape) for operand in operation.operands[1:]), default=0)
        if len(operation.shape) != rank - len(named) + wide:
            return None
        behind = wide - len(named)
        return [None if dim in named else dim if dim < named[0] else dim + behind for dim in range(rank)]


class Gather(Rule):
    """x and its indices agree along every dimension but the one that is gathered from."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        dim, shapes = operation.dim("dim"), [operand.shape for operand in operation.operands]
        if state.dim != dim and len({shape[state.dim] for shape in shapes}) == 1:
            yield Option((state, state), state)


class IndexSelect(Rule):
    """Dimensions that are not picked from pass."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if slot in (0, RESULT) and state.dim != operation.dim("dim"):
            yield Option((state, absent(operation, 1)), state)


class Stack(Rule):
    """A new dimension; all operands agree along the others."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        new = operation.dim("dim", len(operation.shape))
        if slot == RESULT:
            if state.dim == new:
                return
            own = state.at(state.dim - (state.dim > new))
        else:
            own = state
        inputs: tuple[Placement, ...] = (own,) * len(operation.operands)
        yield Option(inputs, own.at(own.dim + (own.dim >= new)))

    def passes_partial(self, operation: Operation) -> bool:
        return True


class Repeat(Rule):
    """Dimensions that are repeated once pass; new ones stand in front."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        new = len(operation.shape) - len(operation.operands[0].shape)
        own = state.at(state.dim - new) if slot == RESULT else state
        if own.dim < 0 or operation.arguments["repeats"][own.dim + new] != 1:
            return
        yield Option((own,), own.at(own.dim + new))

    def passes_partial(self, operation: Operation) -> bool:
        return True


class Loss(Rule):
    """Element-wise, then summed: every rank holds a summand of the sum. A mean needs the whole."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        reduction = int(operation.arguments.get("reduction", 1))
        if reduction == _NONE:
            yield from _POINTWISE.options(operation, slot, state)
        elif reduction == _SUM and slot != RESULT:
            shapes = {operand.shape for operand in operation.operands}
            if len(shapes) == 1:
                yield Option((state,) * len(operation.operands), PARTIAL)


_NONE, _SUM = 0, 2  # torch's numbers of reductions
_POINTWISE = Pointwise()


def _is_whole_number(node: Any) -> bool:
    dtype = node.meta["val"].dtype
    return not dtype.is_floating_point and str(dtype) not in ("torch.bool", "torch.uint8")


__all__ = ["AlongDimension", "Gather", "Index", "IndexSelect", "Loss", "Repeat", "Stack"]
