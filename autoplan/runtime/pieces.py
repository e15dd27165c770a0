"""Where in the whole tensor lies what a rank stores of it: as rectangles, which files can be read and written by.

A rank stores of a parameter (and of each tensor of its optimizer state) all of it, its slices along a dimension (the
tensor axis: one slice of every run of a :class:`Shard`), a contiguous range of its flattened elements (ZeRO), or such
a range of such slices. A range of a flattened row-major tensor is at most 2 n - 1 rectangles of n dimensions: the end
of a first row, whole rows, the beginning of a last one, and so on inside. Slices along a dimension cut each of these
in turn. Rectangles are views of the storage: reading into them fills it, and nothing is copied to write them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from autoplan.sharding.placements import Placement, Shard

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size, a number each dimension


@dataclass(frozen=True, slots=True)
class Piece:
    """``view`` of a rank's storage holds what the whole tensor has at ``offset``, over the view's shape."""

    offset: tuple[int, ...]
    view: Tensor

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the whole tensor."""
        return tuple(slice(o, o + size) for o, size in zip(self.offset, self.view.shape, strict=True))


def pieces(
    stored: Tensor,
    *,
    shape: Sequence[int],
    placement: Placement | None = None,
    index: int = 0,
    degree: int = 1,
    extent: range | None = None,
) -> tuple[Piece, ...]:
    """What ``stored`` holds of a whole tensor of ``shape``: the ``index``-th of ``degree`` parts under ``placement``,
    and of these the flattened elements ``extent`` at the front of a 1-D tensor (None: all, in their shape)."""
    local = list(shape)
    if isinstance(placement, Shard):
        local[placement.dim] //= degree
    if extent is None:
        blocks = [Piece((0,) * len(local), stored.detach())]
    else:
        blocks = list(_flat_pieces(stored.detach(), local, extent))
    if isinstance(placement, Shard):
        runs = _runs(placement, shape[placement.dim], index, degree)
        blocks = [part for block in blocks for part in _along_runs(block, placement.dim, runs)]
    return tuple(block for block in blocks if block.view.numel())


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Rectangle]:
    """The flattened row-major elements ``start`` to ``stop`` of a tensor of ``shape``, in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start, first * inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _in_row(shape, last, last * inner, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Rectangle]:
    before = row * math.prod(shape[1:])
    for offset, size in rectangles(shape[1:], start - before, stop - before):
        yield (row, *offset), (1, *size)


def _flat_pieces(stored: Tensor, shape: Sequence[int], extent: range) -> Iterator[Piece]:
    at = 0
    for offset, size in rectangles(shape, extent.start, extent.stop):
        count = math.prod(size)
        yield Piece(offset, stored[at : at + count].view(size))
        at += count


def _runs(placement: Shard, size: int, index: int, degree: int) -> list[tuple[int, int, int]]:
    """(start in the part, start in the whole, length) of the part's slice of each run."""
    found, here, there = [], 0, 0
    for run in placement.sizes(size):
        length = run // degree
        found.append((here, there + index * length, length))
        here, there = here + length, there + run
    return found


def _along_runs(block: Piece, dim: int, runs: Sequence[tuple[int, int, int]]) -> Iterator[Piece]:
    first, last = block.offset[dim], block.offset[dim] + block.view.shape[dim]
    for here, there, length in runs:
        start, stop = max(first, here), min(last, here + length)
        if start < stop:
            offset = (*block.offset[:dim], there + start - here, *block.offset[dim + 1 :])
            yield Piece(offset, block.view.narrow(dim, start - first, stop - start))
