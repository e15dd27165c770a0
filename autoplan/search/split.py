"""Splitting a chain of layers into stages: the arcs, their exact bottleneck, and an exact dynamic program.

An *arc* (s, i, j) says "stage s holds layers i to j - 1". With period T (what a stage spends on one micro-batch), cost
C (what it adds once to the length of the pipeline: its period and its sends) and tail Y (what it does after its last
micro-batch), a path of S arcs from layer 0 to layer L costs

    (M - 1) * max T + sum C + max Y                              (GPipe and 1F1B; Huang 2019, Narayanan 2021)

Arcs that cannot fit the memory of a GPU do not exist; how much recompute makes an arc fit is decided within the arc
(:mod:`autoplan.search.recompute`), because memory couples only the layers of one stage and the objective never falls
when a period rises. The least recompute is dear to find exactly and cheap to bound from below, so an arc's period may
be *optimistic* until the arc is asked for (:attr:`SplitProblem.refine`): most arcs never are.

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
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


class StageTable(NamedTuple):
    """Arcs of one stage as [L + 1, L + 1] arrays in seconds, rows are first layers, columns one past the last; ``inf``
    where there is no such arc."""

    period_s: Floats
    cost_s: Floats
    tail_s: Floats


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """``layers`` layers in order on ``stages`` stages.

    ``first``/``end``: [n] spans of layers that may be a stage, ordered by end and then start. ``period_s``, ``cost_s``
    and ``tail_s``: [S, n] what a span costs on each stage, periods and costs ``inf`` where there is no such arc.
    ``exact``: [S, n] arcs whose period and cost are what they are; of the others they are no more than that.
    ``refine(arcs)`` gives a problem in which those of [S, n] ``arcs`` are exact too.
    """

    layers: int
    stages: int
    micro_batches: int
    first: Integers
    end: Integers
    period_s: Floats
    cost_s: Floats
    tail_s: Floats
    exact: Flags | None = None
    refine: Callable[[Flags], SplitProblem] | None = None

    @cached_property
    def by_end(self) -> Groups:
        return Groups.of(self.end)

    @cached_property
    def starting(self) -> Integers:
        """Spans in the order of their starts."""
        return np.argsort(self.first, kind="stable")

    @cached_property
    def by_first(self) -> Groups:
        return Groups.of(self.first[self.starting])

    def column(self, first: int, end: int) -> int:
        """Which span has these ends; raises :class:`ValueError` where none has."""
        low, high = np.searchsorted(self.end, (end, end + 1))
        at = int(low + np.searchsorted(self.first[low:high], first))
        if at == high or self.first[at] != first:
            raise ValueError(f"layers {first} to {end - 1} are no span of the problem")
        return at


def dense_problem(*, layers: int, stages: int, micro_batches: int, table: Callable[[int], StageTable]) -> SplitProblem:
    """The problem whose stage s has the arcs of ``table(s)``."""
    tables = [table(s) for s in range(stages)]
    end, first = np.nonzero(np.any([np.isfinite(t.period_s) for t in tables], axis=0).T)
    period, cost, tail = (np.stack([t[k][first, end] for t in tables]) for k in range(3))
    return SplitProblem(
        layers=layers,
        stages=stages,
        micro_batches=micro_batches,
        first=first,
        end=end,
        period_s=period,
        cost_s=np.where(np.isfinite(period), cost, math.inf),
        tail_s=tail,
    )


class Groups(NamedTuple):
    """Runs of equal values in an ascending array: where each starts, and its value."""

    starts: Integers
    values: Integers

    @classmethod
    def of(cls, ascending: Integers) -> Groups:
        if not len(ascending):
            return cls(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        starts = np.concatenate(([0], np.nonzero(np.diff(ascending))[0] + 1))
        return cls(starts, ascending[starts])

    def least(self, values: Floats, size: int) -> Floats:
        """[size] the least of each run, at its value; inf elsewhere."""
        answer = np.full(size, math.inf)
        if len(self.starts):
            answer[self.values] = np.minimum.reduceat(values, self.starts)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """``cuts``: first layer of each stage and, last, the number of layers. ``value_s`` is the objective, exactly.
    ``order``: the order of the layers that the cuts are of, () for the given one."""

    cuts: tuple[int, ...]
    value_s: float
    bottleneck_s: float
    tail_s: float
    order: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Arcs:
    """The arcs that a path no worse than some bound can use, ordered by stage, end and start; ``span`` is the column of
    each in its problem."""

    stages: int
    stage: Integers
    span: Integers
    first: Integers
    end: Integers
    period_s: Floats
    cost_s: Floats
    tail_s: Floats

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def limits(self) -> list[int]:
        """Where each stage's arcs start, and the number of arcs."""
        return [int(at) for at in np.searchsorted(self.stage, np.arange(self.stages + 1))]


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
    """The objective of a split given by its cuts; inf where one of its stages is no arc."""
    columns = [problem.column(i, j) for i, j in itertools.pairwise(cuts)]
    stages = np.arange(problem.stages)
    period, tail = float(problem.period_s[stages, columns].max()), float(problem.tail_s[stages, columns].max())
    if not math.isfinite(period):
        return Split(cuts=cuts, value_s=math.inf, bottleneck_s=math.inf, tail_s=tail)
    value = (problem.micro_batches - 1) * period + math.fsum(problem.cost_s[stages, columns]) + tail
    return Split(cuts=cuts, value_s=value, bottleneck_s=period, tail_s=tail)


def bounds(problem: SplitProblem) -> Bounds | None:
    """Exact min-max period, least sum and min-max tail, each by itself; None where no split fits."""
    start = np.full(problem.layers + 1, math.inf)
    start[0] = 0.0
    period, total, tail = start, start, start
    first, least, size = problem.first, problem.by_end.least, problem.layers + 1
    tails = np.where(np.isfinite(problem.period_s), problem.tail_s, math.inf)
    for s in range(problem.stages):
        period = least(np.maximum(period[first], problem.period_s[s]), size)
        total = least(total[first] + problem.cost_s[s], size)
        tail = least(np.maximum(tail[first], tails[s]), size)
    if not math.isfinite(period[-1]):
        return None
    return Bounds(bottleneck_s=float(period[-1]), sum_s=float(total[-1]), tail_s=float(tail[-1]))


def least_sum(problem: SplitProblem, *, period_at_most_s: float) -> Split | None:
    """The split of least sum among those whose every period is at most the given one: with the exact bottleneck this is
    a feasible split, usually within a percent of the best."""
    found = least_path(problem, period_at_most_s=period_at_most_s)
    return None if found is None else evaluate(problem, found)


def least_path(problem: SplitProblem, *, period_at_most_s: float) -> tuple[int, ...] | None:
    """The cuts of :func:`least_sum`; of equals those with the earliest starts, from the last stage back."""
    cost = np.where(problem.period_s <= period_at_most_s, problem.cost_s, math.inf)
    totals = _totals(problem, cost)
    if not math.isfinite(totals[-1][-1]):
        return None
    cuts = [problem.layers]
    for s in reversed(range(problem.stages)):
        low, high = np.searchsorted(problem.end, (cuts[-1], cuts[-1] + 1))
        at = low + int(np.argmin(totals[s][problem.first[low:high]] + cost[s, low:high]))
        cuts.append(int(problem.first[at]))
    return tuple(reversed(cuts))


def _totals(problem: SplitProblem, cost_s: Floats) -> list[Floats]:
    """For s from 0 to S, [L + 1] least cost of s stages that hold the layers before each cut."""
    start = np.full(problem.layers + 1, math.inf)
    start[0] = 0.0
    totals = [start]
    for s in range(problem.stages):
        totals.append(problem.by_end.least(totals[-1][problem.first] + cost_s[s], problem.layers + 1))
    return totals


def useful_arcs(problem: SplitProblem, bound: Bounds, *, value_at_most_s: float) -> Arcs:
    """Arcs on some path whose lower bound is at most ``value_at_most_s``.

    Lower bound of an arc: (M - 1) * max(B*, T) + least sum of a path through it + max(Y*, Y).
    """
    steps = problem.micro_batches - 1
    before = np.stack(_totals(problem, problem.cost_s)[:-1])
    after = np.full((problem.stages, problem.layers + 1), math.inf)
    after[-1, -1] = 0.0
    starting, by_first = problem.starting, problem.by_first
    for s in range(problem.stages - 1, 0, -1):
        through = (problem.cost_s[s] + after[s][problem.end])[starting]
        after[s - 1] = by_first.least(through, problem.layers + 1)
    # A hair above the bound, so that rounding never drops the path that gave the bound.
    limit = value_at_most_s * (1 + 1e-12)
    lower = before[:, problem.first] + problem.cost_s + after[:, problem.end]
    lower += np.maximum(problem.tail_s, bound.tail_s)
    if steps:
        lower += steps * np.maximum(problem.period_s, bound.bottleneck_s)
    stage, span = np.nonzero(lower <= limit) if math.isfinite(limit) else np.nonzero(np.isfinite(lower))
    return Arcs(
        stages=problem.stages,
        stage=stage,
        span=span,
        first=problem.first[span],
        end=problem.end[span],
        period_s=problem.period_s[stage, span],
        cost_s=problem.cost_s[stage, span],
        tail_s=problem.tail_s[stage, span],
    )


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
    first, end, cost = arcs.first[allowed], arcs.end[allowed], arcs.cost_s[allowed]
    limits = np.searchsorted(allowed, arcs.limits)
    total = np.full((problem.stages + 1, problem.layers + 1), math.inf)
    total[0, 0] = 0.0
    for s in range(problem.stages):
        mine = slice(limits[s], limits[s + 1])
        if mine.start == mine.stop:
            return None
        total[s + 1] = Groups.of(end[mine]).least(total[s, first[mine]] + cost[mine], problem.layers + 1)
    if not math.isfinite(total[-1, -1]):
        return None
    chosen, at = [], problem.layers
    for s in reversed(range(problem.stages)):
        low, high = limits[s] + np.searchsorted(end[limits[s] : limits[s + 1]], (at, at + 1))
        pick = low + int(np.argmin(total[s, first[low:high]] + cost[low:high]))
        chosen.append(int(allowed[pick]))
        at = int(first[pick])
    return np.array(chosen[::-1]), float(total[-1, -1])
