"""Splitting a chain of layers into stages: the arcs, their exact bottleneck, and an exact dynamic program.

An *arc* (s, i, j) says "stage s holds layers i to j - 1". With period T (what a stage spends on one micro-batch), cost
C (what it adds once to the length of the pipeline: its period and its sends) and tail Y (what it does after its last
micro-batch), a path of S arcs from layer 0 to layer L costs

    (M - 1) * max T + sum C + max Y                              (GPipe and 1F1B; Huang 2019, Narayanan 2021)

Arcs that cannot fit the memory of a GPU do not exist; how much recompute makes an arc fit is decided within the arc
(:mod:`autoplan.search.recompute`), because memory couples only the layers of one stage and the objective never falls
when a period rises.

Dynamic program, exact: f_s(j) = min_i f_{s-1}(i) + C(s, i, j) over arcs with T < t and Y < y. A path found so has the
least sum under those limits, so a better one must have a smaller max T: lower t to the path's own max T and repeat
until nothing is left; the same for y outside. It is the upper bound for the MILP, its oracle in tests and its
stand-in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class StageTable(NamedTuple):
    """Arcs of one stage as [L + 1, L + 1] arrays in seconds, rows are first layers, columns one past the last; ``inf``
    where there is no such arc."""

    period_s: Floats
    cost_s: Floats
    tail_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """``layers`` layers in order on ``stages`` stages; ``table(s)`` prices stage s (called more than once)."""

    layers: int
    stages: int
    micro_batches: int
    table: Callable[[int], StageTable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """``cuts``: first layer of each stage and, last, the number of layers. ``value_s`` is the objective, exactly."""

    cuts: tuple[int, ...]
    value_s: float
    bottleneck_s: float
    tail_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arcs:
    """The arcs that a path no worse than some bound can use, ordered by stage, end and start."""

    stage: Integers
    first: Integers
    end: Integers
    period_s: Floats
    cost_s: Floats
    tail_s: Floats

    def __len__(self) -> int:
        return len(self.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """``bottleneck_s``: the least possible max T (exact), ``sum_s`` the least sum C, ``tail_s`` the least max Y."""

    bottleneck_s: float
    sum_s: float
    tail_s: float

    def value_s(self, micro_batches: int) -> float:
        """No split costs less."""
        return (micro_batches - 1) * self.bottleneck_s + self.sum_s + self.tail_s


def evaluate(problem: SplitProblem, cuts: tuple[int, ...]) -> Split:
    """The exact objective of a split given by its cuts."""
    tables = [problem.table(s) for s in range(problem.stages)]
    spans = list(itertools.pairwise(cuts))
    period = [float(t.period_s[i, j]) for t, (i, j) in zip(tables, spans, strict=True)]
    cost = [float(t.cost_s[i, j]) for t, (i, j) in zip(tables, spans, strict=True)]
    tail = [float(t.tail_s[i, j]) for t, (i, j) in zip(tables, spans, strict=True)]
    value = (problem.micro_batches - 1) * max(period) + math.fsum(cost) + max(tail)
    return Split(cuts=cuts, value_s=value, bottleneck_s=max(period), tail_s=max(tail))


def bounds(problem: SplitProblem) -> Bounds | None:
    """Exact min-max period, least sum and min-max tail, each by itself; None where no split fits."""
    start = np.full(problem.layers + 1, math.inf)
    start[0] = 0.0
    period, total, tail = start, start, start
    for s in range(problem.stages):
        table = problem.table(s)
        period = np.min(np.maximum(period[:, None], table.period_s), axis=0)
        total = np.min(total[:, None] + table.cost_s, axis=0)
        tail = np.min(np.maximum(tail[:, None], table.tail_s), axis=0)
    if not math.isfinite(period[-1]):
        return None
    return Bounds(bottleneck_s=float(period[-1]), sum_s=float(total[-1]), tail_s=float(tail[-1]))


def least_sum(problem: SplitProblem, *, period_at_most_s: float) -> Split | None:
    """The split of least sum among those whose every period is at most the given one: with the exact bottleneck this is
    a feasible split, usually within a percent of the best."""
    total = np.full(problem.layers + 1, math.inf)
    total[0] = 0.0
    back: list[Integers] = []
    for s in range(problem.stages):
        table = problem.table(s)
        cost = np.where(table.period_s <= period_at_most_s, table.cost_s, math.inf)
        sums = total[:, None] + cost
        back.append(np.argmin(sums, axis=0))
        total = np.min(sums, axis=0)
    if not math.isfinite(total[-1]):
        return None
    cuts = [problem.layers]
    for choice in reversed(back):
        cuts.append(int(choice[cuts[-1]]))
    return evaluate(problem, tuple(reversed(cuts)))


def useful_arcs(problem: SplitProblem, bound: Bounds, *, value_at_most_s: float) -> Arcs:
    """Arcs on some path whose lower bound is at most ``value_at_most_s``.

    Lower bound of an arc: (M - 1) * max(B*, T) + least sum of a path through it + max(Y*, Y).
    """
    steps = problem.micro_batches - 1
    forward = [np.full(problem.layers + 1, math.inf)]
    forward[0][0] = 0.0
    for s in range(problem.stages - 1):
        forward.append(np.min(forward[-1][:, None] + problem.table(s).cost_s, axis=0))
    backward = np.full(problem.layers + 1, math.inf)
    backward[-1] = 0.0
    # A hair above the bound, so that rounding never drops the path that gave the bound.
    limit = value_at_most_s * (1 + 1e-12)
    kept: list[tuple[Integers, ...]] = []
    values: list[tuple[Floats, ...]] = []
    for s in reversed(range(problem.stages)):
        table = problem.table(s)
        through = forward[s][:, None] + table.cost_s + backward[None, :]
        exists = np.isfinite(table.period_s)
        period = np.where(exists, np.maximum(table.period_s, bound.bottleneck_s), 0.0)
        lower = steps * period + through + np.maximum(table.tail_s, bound.tail_s)
        end, first = np.nonzero((exists & (lower <= limit)).T)
        kept.append((np.full(len(first), s), first, end))
        values.append((table.period_s[first, end], table.cost_s[first, end], table.tail_s[first, end]))
        backward = np.min(table.cost_s + backward[None, :], axis=1)
    stage, first, end = (np.concatenate(column) for column in zip(*reversed(kept), strict=True))
    period, cost, tail = (np.concatenate(column) for column in zip(*reversed(values), strict=True))
    return Arcs(stage=stage, first=first, end=end, period_s=period, cost_s=cost, tail_s=tail)


def shortest(problem: SplitProblem, bound: Bounds, arcs: Arcs, *, upper: Split | None = None) -> Split | None:
    """The exact dynamic program over ``arcs``: the best split, or ``upper`` if none is better."""
    best, tail_limit = upper, math.inf
    while True:
        found = _shortest_below(problem, bound, arcs, tail_limit, best)
        if found is None:
            return best
        least_s, tail_s, candidate = found
        if best is None or candidate.value_s < best.value_s:
            best = candidate
        if least_s + bound.tail_s >= best.value_s:
            return best
        # Whatever its tail, a split under this limit costs `least_s` plus its tail: only smaller tails can be better.
        tail_limit = min(tail_s, best.value_s - least_s)


def _shortest_below(
    problem: SplitProblem, bound: Bounds, arcs: Arcs, tail_limit: float, best: Split | None
) -> tuple[float, float, Split] | None:
    """Least (M - 1) max T + sum C over paths with tails below ``tail_limit``, the tail of the path that has it, and the
    best split met on the way; stops where no further path can beat ``best``."""
    steps = problem.micro_batches - 1
    period_limit, least = math.inf, (math.inf, math.inf)
    candidate: Split | None = None
    while (found := _least_path(problem, arcs, period_limit, tail_limit)) is not None:
        chosen, total = found
        period, tail = float(arcs.period_s[chosen].max()), float(arcs.tail_s[chosen].max())
        least = min(least, (steps * period + total, tail))
        value = steps * period + math.fsum(arcs.cost_s[chosen]) + tail
        if candidate is None or value < candidate.value_s:
            cuts = (*(int(i) for i in arcs.first[chosen]), problem.layers)
            candidate = Split(cuts=cuts, value_s=value, bottleneck_s=period, tail_s=tail)
        limit = min(candidate.value_s, best.value_s if best else math.inf)
        if steps * bound.bottleneck_s + total + bound.tail_s >= limit:
            break
        period_limit = period
    return None if candidate is None else (*least, candidate)


def _least_path(
    problem: SplitProblem, arcs: Arcs, period_below_s: float, tail_below_s: float
) -> tuple[Integers, float] | None:
    """Arc indices of the path of least sum with periods and tails strictly below the limits, and that sum."""
    allowed = np.nonzero((arcs.period_s < period_below_s) & (arcs.tail_s < tail_below_s))[0]
    width = problem.layers + 1
    total = np.full((problem.stages + 1, width), math.inf)
    total[0, 0] = 0.0
    back = np.full((problem.stages, width), -1)
    stage_of = arcs.stage[allowed]
    limits = np.searchsorted(stage_of, np.arange(problem.stages + 1))
    for s in range(problem.stages):
        mine = allowed[limits[s] : limits[s + 1]]
        if not len(mine):
            return None
        sums = total[s, arcs.first[mine]] + arcs.cost_s[mine]
        order = np.lexsort((np.arange(len(mine)), sums, arcs.end[mine]))
        ends, firsts = np.unique(arcs.end[mine][order], return_index=True)
        total[s + 1, ends] = sums[order][firsts]
        back[s, ends] = mine[order][firsts]
    if not math.isfinite(total[-1, -1]):
        return None
    chosen, at = [], problem.layers
    for s in reversed(range(problem.stages)):
        chosen.append(int(back[s, at]))
        at = int(arcs.first[chosen[-1]])
    return np.array(chosen[::-1]), float(total[-1, -1])
