"""How a sharded dimension moves through operators that only rearrange: pure arithmetic on shapes.

A reshape is followed in the flat, row-major order of the elements. A shard of dimension d whose runs have size m is
periodic there: with Q the product of the sizes after d, every period of m x Q elements is cut into equal chunks, one
a rank. The same periods and chunks must be whole slices of one dimension of the other shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from autoplan.sharding.placements import Shard

_MOST_PARTS = 64  # more equal runs than this are written as blocks: their number grows with the batch


def reshape(before: Sequence[int], after: Sequence[int], state: Shard, degree: int) -> Shard | None:
    """Where ``state`` of a tensor of shape ``before`` lies in its reshape to ``after``; None where no dimension
    of ``after`` holds it."""
    behind = math.prod(before[state.dim + 1 :])
    if not state.divides(before[state.dim], degree):
        return None
    runs = set(state.sizes(before[state.dim])) if not state.block else {state.block}
    if len(runs) > 1:
        return _same_dimension(before, after, state, behind)
    period = runs.pop() * behind
    for dim in range(len(after)):
        inner = math.prod(after[dim + 1 :])
        outer = inner * after[dim]
        if inner < period <= outer:
            if period % inner or outer % period or (period // degree) % inner:
                return None
            return in_runs(dim, after[dim], period // inner)
    return None


def in_runs(dim: int, size: int, run: int) -> Shard:
    """The shard of a dimension of ``size`` that consists of equal runs, in the one form used throughout."""
    count = size // run
    if count == 1:
        return Shard(dim)
    return Shard(dim, parts=(run,) * count) if count <= _MOST_PARTS else Shard(dim, block=run)


def slice_runs(runs: Sequence[int], start: int, end: int) -> tuple[int, ...] | None:
    """The runs that lie between ``start`` and ``end``, None where one is cut."""
    edges = [0, *accumulate(runs)]
    if start not in edges or end not in edges or start >= end:
        return None
    return tuple(runs[edges.index(start) : edges.index(end)])


def of_runs(dim: int, runs: Sequence[int]) -> Shard:
    """A shard with these runs, in the one form used throughout."""
    return Shard(dim) if len(runs) == 1 else Shard(dim, parts=tuple(runs))


def _same_dimension(before: Sequence[int], after: Sequence[int], state: Shard, behind: int) -> Shard | None:
    """Unequal runs survive only where the dimension itself does."""
    for dim in range(len(after)):
        if after[dim] == before[state.dim] and math.prod(after[dim + 1 :]) == behind:
            return state.at(dim)
    return None
