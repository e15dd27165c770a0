"""Rules of operators that rearrange elements: reshapes, permutations, slices, splits and concatenations.

All of them are linear, so summands pass through. The literals that name sizes of the sharded dimension are divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

from autoplan.sharding.operation import Operation
from autoplan.sharding.placements import Placement, Shard
from autoplan.sharding.rules import RESULT, Option, Rule, local_size
from autoplan.sharding.views import of_runs, reshape, slice_runs


class Rearrangement(Rule):
    """One operand; ``forward`` maps its placement to the result's, ``backward`` the other way."""

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        raise NotImplementedError

    def backward(self, operation: Operation, state: Shard) -> Shard | None:
        raise NotImplementedError

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if slot == RESULT:
            before, after = self.backward(operation, state), state
            if before is not None and self.forward(operation, before) == after:
                yield Option((before,), after)
        else:
            moved = self.forward(operation, state)
            if moved is not None:
                yield Option((state,), moved)

    def passes_partial(self, operation: Operation) -> bool:
        return True


class Reshape(Rearrangement):
    """view, reshape, flatten, unflatten: ``sizes`` is the argument that lists them, "" for none."""

    def __init__(self, sizes: str = "") -> None:
        self.sizes = sizes

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        return reshape(operation.operands[0].shape, operation.shape, state, operation.degree)

    def backward(self, operation: Operation, state: Shard) -> Shard | None:
        return reshape(operation.shape, operation.operands[0].shape, state, operation.degree)

    def local_arguments(self, operation: Operation, option: Option) -> dict[str, Any]:
        if not self.sizes or not isinstance(option.output, Shard):
            return {}
        sizes = list(operation.arguments[self.sizes])
        first = operation.dim("dim") if operation.key == "unflatten" else 0
        index = option.output.dim - first
        if 0 <= index < len(sizes):
            sizes[index] = local_size(sizes[index], operation.degree)
        return {self.sizes: sizes}


class Permutation(Rearrangement):
    """transpose, permute, unsqueeze, squeeze: dimensions change places, come or go with size one."""

    def sources(self, operation: Operation) -> list[int | None]:
        """For each dimension of the result the operand's, None for a new one."""
        rank = len(operation.operands[0].shape)
        order: list[int | None] = list(range(rank))
        match operation.key:
            case "transpose" | "swapaxes":
                names = ("dim0", "dim1") if operation.key == "transpose" else ("axis0", "axis1")
                a, b = (operation.dim(name) for name in names)
                order[a], order[b] = order[b], order[a]
            case "t" | "numpy_T" | "mT":
                order[-1], order[-2] = order[-2], order[-1]
            case "permute":
                order = [dim % rank for dim in operation.arguments["dims"]]
            case "unsqueeze":
                order.insert(operation.dim("dim", rank + 1), None)
            case "squeeze":
                gone = operation.arguments.get("dim", list(range(rank)))
                dims = [dim % rank for dim in ([gone] if isinstance(gone, int) else gone)]
                shape = operation.operands[0].shape
                order = [dim for dim in range(rank) if not (dim in dims and shape[dim] == 1)]
        return order

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        order = self.sources(operation)
        return state.at(order.index(state.dim)) if state.dim in order else None

    def backward(self, operation: Operation, state: Shard) -> Shard | None:
        source = self.sources(operation)[state.dim]
        return None if source is None else state.at(source)


class Select(Rearrangement):
    """One index of one dimension: the others stay."""

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        gone = operation.dim("dim")
        return None if state.dim == gone else state.at(state.dim - (state.dim > gone))

    def backward(self, operation: Operation, state: Shard) -> Shard | None:
        return state.at(state.dim + (state.dim >= operation.dim("dim")))


class Slice(Rearrangement):
    """A slice of the sharded dimension must be made of whole runs: the key part of a packed qkv."""

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        dim, start, end, size = self._range(operation)
        if state.dim != dim or (start, end) == (0, size):
            return state
        if int(operation.arguments.get("step", 1)) != 1 or state.block:
            return None
        runs = slice_runs(state.sizes(size), start, end)
        return None if runs is None else of_runs(dim, runs)

    def backward(self, operation: Operation, state: Shard) -> Shard | None:
        dim, start, end, size = self._range(operation)
        if state.dim != dim or (start, end) == (0, size):
            return state
        if state.block:
            return None
        runs = (start, *state.sizes(end - start), size - end)
        return of_runs(dim, [run for run in runs if run])

    def local_arguments(self, operation: Operation, option: Option) -> dict[str, Any]:
        dim, start, end, _ = self._range(operation)
        state = option.inputs[0]
        if not isinstance(state, Shard) or state.dim != dim:
            return {}
        return {"start": start // operation.degree, "end": end // operation.degree}

    def _range(self, operation: Operation) -> tuple[int, int, int, int]:
        dim = operation.dim("dim")
        size = operation.operands[0].shape[dim]
        first = operation.arguments.get("start")
        start = min(_from_front(first if isinstance(first, int) else 0, size), size)
        return dim, start, start + operation.shape[dim], size


class Split(Rearrangement):
    """split, split_with_sizes, chunk: the pieces of a sharded dimension are its runs, or made of whole runs."""

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        dim, pieces = self._pieces(operation)
        if state.dim != dim:
            return state
        if state.block:
            return None
        size = operation.operands[0].shape[dim]
        edges = [0, *accumulate(pieces)]
        found = {slice_runs(state.sizes(size), a, b) for a, b in pairwise(edges)}
        if None in found:
            return None
        layouts = {of_runs(dim, runs) for runs in found if runs is not None}
        return layouts.pop() if len(layouts) == 1 else None

    def backward(self, operation: Operation, state: Shard) -> Shard | None:
        dim, pieces = self._pieces(operation)
        if state.dim != dim:
            return state
        if state.block or any(sum(state.sizes(piece)) != piece for piece in pieces):
            return None
        return of_runs(dim, [run for piece in pieces for run in state.sizes(piece)])

    def local_arguments(self, operation: Operation, option: Option) -> dict[str, Any]:
        dim, _ = self._pieces(operation)
        state = option.inputs[0]
        if not isinstance(state, Shard) or state.dim != dim:
            return {}
        for name in ("split_size", "split_sizes"):
            if name in operation.arguments:
                sizes = operation.arguments[name]
                local = (
                    [local_size(size, operation.degree) for size in sizes] if isinstance(sizes, list | tuple) else None
                )
                return {name: local if local is not None else local_size(sizes, operation.degree)}
        return {}

    def _pieces(self, operation: Operation) -> tuple[int, list[int]]:
        dim = operation.dim("dim")
        return dim, [shape[dim] for shape in operation.shapes]


class Chunk(Split):
    """Chunks are split by count, which only names the same pieces on a rank where all are of one size."""

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        dim, pieces = self._pieces(operation)
        return super().forward(operation, state) if state.dim != dim or len(set(pieces)) == 1 else None


class Unbind(Select):
    """Everything at each index of one dimension, as a tuple: the others stay."""


class Item(Rearrangement):
    """getitem of a tuple: the state of a tuple is that of each of its elements."""

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        return state if state.dim < len(operation.shape) else None

    def backward(self, operation: Operation, state: Shard) -> Shard | None:
        shapes = operation.operands[0].shapes
        fits = all(state.dim < len(shape) and state.divides(shape[state.dim], operation.degree) for shape in shapes)
        return state if fits else None


class Pad(Rearrangement):
    """Dimensions that are not padded pass."""

    def forward(self, operation: Operation, state: Shard) -> Shard | None:
        before, after = operation.operands[0].shape, operation.shape
        return state if before[state.dim] == after[state.dim] else None

    backward = forward

    def passes_partial(self, operation: Operation) -> bool:
        return not operation.arguments.get("value")


class Concatenation(Rule):
    """Along another dimension all operands agree; along the sharded one their runs follow each other."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        rank = len(operation.shape)
        dim = operation.dim("dim", rank)
        if any(len(operand.shape) != rank for operand in operation.operands):
            return
        if state.dim != dim:
            yield Option((state,) * len(operation.operands), state)
            return
        if state.block:
            return
        sizes = [operand.shape[dim] for operand in operation.operands]
        if slot == RESULT:
            edges = [0, *accumulate(sizes)]
            found = [slice_runs(state.sizes(operation.shape[dim]), a, b) for a, b in pairwise(edges)]
            layouts = [of_runs(dim, runs) for runs in found if runs is not None]
            if len(layouts) < len(found):
                return
        else:
            layouts = [state if size == sizes[slot] else Shard(dim) for size in sizes]
        if all(layout.divides(size, operation.degree) for layout, size in zip(layouts, sizes, strict=True)):
            runs = [run for layout, size in zip(layouts, sizes, strict=True) for run in layout.sizes(size)]
            inputs: tuple[Placement, ...] = tuple(layouts)
            yield Option(inputs, of_runs(dim, runs))

    def passes_partial(self, operation: Operation) -> bool:
        return True


def _from_front(index: int, size: int) -> int:
    return max(index + size, 0) if index < 0 else index
