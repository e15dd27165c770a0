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
        """[..., size] the least of each run, at its value; inf elsewhere."""
        answer = np.full((*values.shape[:-1], size), math.inf)
        if len(self.starts):
            answer[..., self.values] = np.minimum.reduceat(values, self.starts, axis=-1)
        return answer


@dataclass(frozen=True, kw_only=True)
class Places:
    """The arcs of ``stages`` stages over ``layers`` layers, [A] ordered by ``stage``, ``end`` and ``first``."""

    layers: int
    stages: int
    stage: Integers
    first: Integers
    end: Integers

    def __len__(self) -> int:
        return len(self.stage)

    @cached_property
    def limits(self) -> list[int]:
        """Where each stage's arcs start, and the number of arcs."""
        return [int(at) for at in np.searchsorted(self.stage, np.arange(self.stages + 1))]

    @cached_property
    def of_stage(self) -> list[slice]:
        """Each stage's arcs."""
        return [slice(low, high) for low, high in itertools.pairwise(self.limits)]

    @cached_property
    def by_end(self) -> list[Groups]:
        """Each stage's arcs by where they end."""
        return [Groups.of(self.end[mine]) for mine in self.of_stage]

    @cached_property
    def by_first(self) -> list[tuple[Integers, Groups]]:
        """Each stage's arcs in the order of their starts, and grouped by them."""
        found = []
        for mine in self.of_stage:
            order = np.argsort(self.first[mine], kind="stable")
            found.append((order, Groups.of(self.first[mine][order])))
        return found

    @cached_property
    def keys(self) -> Integers:
        """[A] stage, end and first of each in one number, ascending."""
        size = self.layers + 1
        return (self.stage * size + self.end) * size + self.first

    @cached_property
    def _arriving(self) -> list[list[int]]:
        """For every stage and cut where the arcs begin that end there."""
        size = self.layers + 1
        wanted = np.arange(self.stages)[:, None] * size + np.arange(size + 1)
        found: list[list[int]] = np.searchsorted(self.stage * size + self.end, wanted).tolist()
        return found

    def arriving(self, stage: int, end: int) -> slice:
        """The arcs of a stage that end at a cut."""
        return slice(*self._arriving[stage][end : end + 2])


@dataclass(frozen=True, kw_only=True)
class SplitProblem:
    """What every arc of ``places`` costs, [A]: ``period_s`` and ``cost_s``, ``inf`` where it is none after all, and
    ``tail_s``.

    ``exact``: [A] arcs whose period and cost are what they are; of the others they are no more than that.
    ``refine(arcs)`` gives a problem in which those of [A] ``arcs`` are exact too.
    """

    places: Places
    micro_batches: int
    period_s: Floats
    cost_s: Floats
    tail_s: Floats
    exact: Flags | None = None
    refine: Callable[[Flags], SplitProblem] | None = None

    @property
    def layers(self) -> int:
        return self.places.layers

    @property
    def stages(self) -> int:
        return self.places.stages

    @cached_property
    def totals(self) -> list[Floats]:
        """For s from 0 to S, [L + 1] least cost of s stages that hold the layers before each cut."""
        return _totals(self.places, self.cost_s)


def dense_problem(*, layers: int, stages: int, micro_batches: int, table: Callable[[int], StageTable]) -> SplitProblem:
    """The problem whose stage s has the arcs of ``table(s)``."""
    tables = [table(s) for s in range(stages)]
    stage, end, first = np.nonzero([np.isfinite(t.period_s).T for t in tables])
    period, cost, tail = (np.stack([t[k] for t in tables])[stage, first, end] for k in range(3))
    places = Places(layers=layers, stages=stages, stage=stage, first=first, end=end)
    return SplitProblem(places=places, micro_batches=micro_batches, period_s=period, cost_s=cost, tail_s=tail)


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
class Arcs(Places):
    """The arcs that a path no worse than some bound can use; ``at``: which each is in its problem."""

    at: Integers
    period_s: Floats
    cost_s: Floats
    tail_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """``bottleneck_s``: the least possible max T (exact), ``sum_s`` the least sum C, ``tail_s`` the least max Y."""

    bottleneck_s: float
    sum_s: float
    tail_s: float

    def value_s(self, micro_batches: int) -> float:
        """No split costs less."""
        return (micro_batches - 1) * self.bottleneck_s + self.sum_s + self.tail_s


def evaluate(problem: SplitProblem, cuts: tuple[int, ...], arcs: list[int] | None = None) -> Split:
    """The objective of a split given by its cuts (``arcs``: its arcs, if they are known); inf where one of its stages
    is no arc after all, and :class:`ValueError` where it is not in the problem."""
    arcs = path_of(problem, cuts) if arcs is None else arcs
    period, tail = float(problem.period_s[arcs].max()), float(problem.tail_s[arcs].max())
    if not math.isfinite(period):
        return Split(cuts=cuts, value_s=math.inf, bottleneck_s=math.inf, tail_s=tail)
    value = (problem.micro_batches - 1) * period + math.fsum(problem.cost_s[arcs]) + tail
    return Split(cuts=cuts, value_s=value, bottleneck_s=period, tail_s=tail)


def path_of(problem: SplitProblem, cuts: tuple[int, ...]) -> list[int]:
    """The arcs of a split."""
    places, at = problem.places, np.array(cuts)
    if len(at) != places.stages + 1:
        raise ValueError(f"{len(at) - 1} stages are no split of a problem of {places.stages}")
    keys = (np.arange(places.stages) * (places.layers + 1) + at[1:]) * (places.layers + 1) + at[:-1]
    found = np.searchsorted(places.keys, keys)
    missing = np.nonzero(places.keys[np.minimum(found, len(places) - 1)] != keys)[0] if len(places) else [0]
    if len(missing):
        first, end = cuts[missing[0]], cuts[missing[0] + 1]
        raise ValueError(f"layers {first} to {end - 1} on stage {missing[0]} are no arc of the problem")
    arcs: list[int] = found.tolist()
    return arcs


def bounds(problem: SplitProblem) -> Bounds | None:
    """Exact min-max period, least sum and min-max tail, each by itself; None where no split fits."""
    places, size = problem.places, problem.layers + 1
    longest = np.full((2, size), math.inf)  # of periods, and of tails
    longest[:, 0] = 0.0
    each = np.stack((problem.period_s, np.where(np.isfinite(problem.period_s), problem.tail_s, math.inf)))
    for mine, groups in zip(places.of_stage, places.by_end, strict=True):
        through = np.maximum(longest[:, places.first[mine]], each[:, mine])
        longest = groups.least(through, size)
    if not math.isfinite(longest[0, -1]):
        return None
    total = float(problem.totals[-1][-1])
    return Bounds(bottleneck_s=float(longest[0, -1]), sum_s=total, tail_s=float(longest[1, -1]))


def least_sum(problem: SplitProblem, *, period_at_most_s: float) -> Split | None:
    """The split of least sum among those whose every period is at most the given one: with the exact bottleneck this is
    a feasible split, usually within a percent of the best."""
    found = least_path(problem, period_at_most_s=period_at_most_s)
    return None if found is None else evaluate(problem, found)


def least_path(problem: SplitProblem, *, period_at_most_s: float) -> tuple[int, ...] | None:
    """The cuts of :func:`least_sum`; of equals those with the earliest starts, from the last stage back."""
    cost = np.where(problem.period_s <= period_at_most_s, problem.cost_s, math.inf)
    path = _path(problem.places, cost)
    return None if path is None else (*(int(i) for i in problem.places.first[path]), problem.layers)


def _path(places: Places, cost_s: Floats) -> Integers | None:
    """The arcs of least sum, a stage each; None where none is finite."""
    totals = _totals(places, cost_s)
    if not math.isfinite(totals[-1][-1]):
        return None
    chosen, at = [], places.layers
    for s in reversed(range(places.stages)):
        among = places.arriving(s, at)
        chosen.append(among.start + int(np.argmin(totals[s][places.first[among]] + cost_s[among])))
        at = int(places.first[chosen[-1]])
    return np.array(chosen[::-1])


def _totals(places: Places, cost_s: Floats) -> list[Floats]:
    """For s from 0 to S, [L + 1] least cost of s stages that hold the layers before each cut."""
    start = np.full(places.layers + 1, math.inf)
    start[0] = 0.0
    totals = [start]
    for mine, groups in zip(places.of_stage, places.by_end, strict=True):
        totals.append(groups.least(totals[-1][places.first[mine]] + cost_s[mine], places.layers + 1))
    return totals


def useful_arcs(problem: SplitProblem, bound: Bounds, *, value_at_most_s: float) -> Arcs:
    """Arcs on some path whose lower bound is at most ``value_at_most_s``.

    Lower bound of an arc: (M - 1) * max(B*, T) + least sum of a path through it + max(Y*, Y).
    """
    places, steps = problem.places, problem.micro_batches - 1
    before = np.stack(problem.totals[:-1])
    after = np.full((problem.stages, problem.layers + 1), math.inf)
    after[-1, -1] = 0.0
    for s in range(problem.stages - 1, 0, -1):
        mine, (order, groups) = places.of_stage[s], places.by_first[s]
        through = (problem.cost_s[mine] + after[s][places.end[mine]])[order]
        after[s - 1] = groups.least(through, problem.layers + 1)
    # A hair above the bound, so that rounding never drops the path that gave the bound.
    limit = value_at_most_s * (1 + 1e-12)
    lower = before[places.stage, places.first] + problem.cost_s + after[places.stage, places.end]
    lower += np.maximum(problem.tail_s, bound.tail_s)
    if steps:
        lower += steps * np.maximum(problem.period_s, bound.bottleneck_s)
    at = np.nonzero(lower <= limit if math.isfinite(limit) else np.isfinite(lower))[0]
    return Arcs(
        layers=problem.layers,
        stages=problem.stages,
        at=at,
        stage=places.stage[at],
        first=places.first[at],
        end=places.end[at],
        period_s=problem.period_s[at],
        cost_s=problem.cost_s[at],
        tail_s=problem.tail_s[at],
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
    while (found := _least_path(arcs, period_limit, tail_limit)) is not None:
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


def _least_path(arcs: Arcs, period_below_s: float, tail_below_s: float) -> tuple[Integers, float] | None:
    """Arc indices of the path of least sum with periods and tails strictly below the limits, and that sum."""
    allowed = (arcs.period_s < period_below_s) & (arcs.tail_s < tail_below_s)
    chosen = _path(arcs, np.where(allowed, arcs.cost_s, math.inf))
    if chosen is None:
        return None
    total = 0.0
    for cost in arcs.cost_s[chosen]:  # in the order in which the dynamic program adds
        total += float(cost)
    return chosen, total
