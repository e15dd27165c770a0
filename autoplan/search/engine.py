"""Best-first search over the candidates, with proof.

Candidates are opened in the order of their lower bounds; opening one solves its stage split exactly (by the dynamic
program; the MILP confirms the fastest and the chosen). Once the next
bound passes the best value found, no candidate that is left can be better: the list of bounds is the certificate.

That was the closed form. The schedule simulator then ranks the candidates that are within :data:`CONFIRMED` of it, and
the least parallelism within :data:`TOLERANCE` of the shortest simulated step is looked for, in the order of
:func:`preference`; sharded state gives way to the same degrees without it within :data:`SHARDING_TOLERANCE`.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoplan.plan import Strategy
from autoplan.search.arcs import StageArcs
from autoplan.search.blocks import BlockBounds
from autoplan.search.boundaries import fixed_split
from autoplan.search.bounds import LowerBounds, fits_greedily, lower_bounds
from autoplan.search.evaluate import evaluate_decision, evaluate_listed
from autoplan.search.listed import even_cuts, is_listed, least_step_s, rank_memories
from autoplan.search.milp import Solution, default_solver, solve_split
from autoplan.search.other_schedules import faster_schedule
from autoplan.search.simulated import (
    simulated_with_longer_s,
    simulated_with_longest_s,
    with_simulated_bound,
)
from autoplan.search.solver import SolverName
from autoplan.search.space import Space
from autoplan.search.split import Split
from autoplan.search.tables import Tables
from autoplan.search.timing import StageTimes, brief_step_s

TOLERANCE = 0.02
# The closed form is within a few percent of the simulator where stages are nearly even: candidates that close to the
# best are simulated, at most so many of them.
CONFIRMED = 0.03
MOST_CONFIRMED = 64
# State that fits whole is sharded only where that gains more than the cost models can be wrong by (median error of
# step times over families of runs: 2 to 9%); what fits one card gets plain data parallelism.
SHARDING_TOLERANCE = 0.10
_SIMPLEST = ("1f1b", "gpipe", "interleaved", "zero_bubble")
# Another order of the layers is worth less than this only by rounding.
LEAST_GAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A candidate with its best split: ``value_s`` is the objective in closed form, ``simulated_s`` the step that the
    simulator makes of it (a long step is extrapolated), ``order`` the order of the layers that ``cuts`` are of, () for
    the given one."""

    strategy: Strategy
    cuts: tuple[int, ...]
    value_s: float
    proven_by: str
    times: StageTimes
    order: tuple[int, ...] = ()

    @property
    def simulated_s(self) -> float:
        return brief_step_s(self.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of the candidates."""

    considered: int
    pruned_by_memory: int
    pruned_by_bound: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """``best`` is the fastest in closed form, ``fastest`` in the simulator, ``chosen`` the least parallel within
    tolerance of that. ``lower_bound_s``: no candidate's closed form is less; ``proven`` if that is ``best`` itself.
    ``simulated_bound_s``: no candidate's simulated step is shorter, whatever its split. ``confirmed``: candidates that
    were simulated."""

    chosen: Decision
    best: Decision
    fastest: Decision
    lower_bound_s: float
    simulated_bound_s: float
    proven: bool
    confirmed: int
    counts: Counts


def preference(strategy: Strategy) -> tuple[int, ...]:
    """Smaller is less parallel: axes of the mesh in use, then degrees (tensor weighs most, data least), then GPUs.

    Sharded state adds no axis of its own but comes after plain data parallelism, so that with equal times the order is
    one GPU, data, sharded state, pipeline, tensor, and then combinations. Of equal degrees the simplest schedule.
    """
    return (
        sum(degree > 1 for degree in (strategy.data, strategy.pipeline, strategy.tensor)),
        strategy.tensor,
        strategy.pipeline,
        strategy.zero_stage,
        strategy.data,
        strategy.gpus,
        _SIMPLEST.index(strategy.schedule),
        strategy.virtual_stages,
    )


@dataclass(kw_only=True)
class Engine:
    """One search. ``solver`` None leaves the proof to the dynamic program; ``deadline`` is a :func:`time.monotonic`."""

    space: Space
    solver: SolverName | None = field(default_factory=default_solver)
    deadline: float = math.inf
    _fits: dict[int, bool] = field(default_factory=dict, init=False)
    _known: dict[int, tuple[float, Decision | None]] = field(default_factory=dict, init=False)
    _floors: dict[int, float] = field(default_factory=dict, init=False)
    _simulated: dict[Strategy, float] = field(default_factory=dict, init=False)
    _longest: dict[int, float] = field(default_factory=dict, init=False)
    _order: list[int] | None = field(default=None, init=False)
    _bounds: LowerBounds | None = field(default=None, init=False)

    @cached_property
    def _blocks(self) -> BlockBounds:
        return BlockBounds(space=self.space)

    @property
    def bounds(self) -> LowerBounds:
        if self._bounds is None:
            self._bounds = lower_bounds(self.space, self.space.candidates)
        return self._bounds

    def order(self, chosen: np.ndarray | None = None) -> list[int]:
        """Candidates (of those ``chosen``) that pass the memory bound, by lower bound, then by preference."""
        if self._order is None:
            bounds, strategies = self.bounds, self.space.candidates
            rows = [int(i) for i in np.nonzero(bounds.short_bytes <= 0)[0]]
            self._order = sorted(rows, key=lambda i: (bounds.step_s[i], preference(strategies.strategy(i)), i))
        return self._order if chosen is None else [index for index in self._order if chosen[index]]

    def best_first(self, indices: list[int]) -> Iterator[tuple[int, float]]:
        """Candidates (given by lower bound) with a sharper lower bound, by that; of equals the one that is given first.
        A candidate is bounded sharply when its turn comes, so that most never are."""
        waiting: list[tuple[float, int, bool]] = []
        given = iter(enumerate(indices))
        ahead = next(given, None)
        while waiting or ahead is not None:
            while ahead is not None and (not waiting or self.bounds.step_s[ahead[1]] <= waiting[0][0]):
                heapq.heappush(waiting, (float(self.bounds.step_s[ahead[1]]), ahead[0], False))
                ahead = next(given, None)
            bound, place, sharp = heapq.heappop(waiting)
            if sharp:
                yield indices[place], bound
                continue
            sharper = self.sharper_s(indices[place])
            if math.isfinite(sharper):
                heapq.heappush(waiting, (max(bound, sharper), place, True))

    def fits(self, index: int) -> bool:
        """The greedy memory test, remembered."""
        if index not in self._fits:
            strategy = self.space.candidates.strategy(index)
            # Filling stages to the brim reaches furthest in one order of the layers alone.
            ordered = strategy.pipeline == 1 or (self.space.down_sets is None and not is_listed(strategy))
            self._fits[index] = not ordered or fits_greedily(self.space.tables(strategy))
        return self._fits[index]

    def run(self, tolerance: float = TOLERANCE) -> Found | None:
        """The search; None where nothing fits."""
        best, floor, proven = self._fastest(tolerance)
        if best is None:
            return None
        fastest = self._simulated_fastest(best)
        chosen = fastest
        if tolerance:
            chosen = self._unsharded(self._least_parallel(best, fastest, tolerance), best)
        other = self._faster_schedule(chosen, tolerance) if tolerance else None
        return Found(
            chosen=self._confirm(other[0] if other else chosen),
            best=self._confirm(best),
            fastest=fastest,
            lower_bound_s=floor,
            simulated_bound_s=self._simulated_bound_s(self.step_s(fastest)) if other is None else self._least_work_s(),
            proven=proven and (other is None or other[1]),
            confirmed=len(self._simulated),
            counts=self._counts(),
        )

    def _faster_schedule(self, chosen: Decision, tolerance: float) -> tuple[Decision, bool] | None:
        """What another schedule gains, where none was forced and time is left."""
        forced = self.space.forced
        given = forced.schedule is not None or forced.virtual_stages is not None or self.space.problem.stages
        if given or self.space.candidates.schedule != "1f1b" or time.monotonic() > self.deadline:
            return None
        return faster_schedule(self, chosen, tolerance)

    def _least_work_s(self) -> float:
        """No candidate's step is shorter under any schedule than what its busiest rank works."""
        return float(self.bounds.works_s[self.bounds.short_bytes <= 0].min())

    def under(self, strategy: Strategy, limit_s: float) -> Decision | None:
        """The decision of a strategy under an interleaved or zero-bubble schedule, if its step may be below a limit."""
        if self.rules_out(strategy, limit_s):
            return None
        solution = _even_split(self.space, strategy, math.inf)
        if solution is None or solution.simulated_bound_s >= limit_s:
            return None
        return _decision(self.space, strategy, solution)

    def rules_out(self, strategy: Strategy, limit_s: float) -> bool:
        """Whether a bound says that the strategy's split under such a schedule is no faster than a limit."""
        works_s = strategy.micro_batches * self._blocks.bottleneck_s(strategy)
        return works_s >= limit_s or least_step_s(self.space, strategy) >= limit_s

    def step_s(self, decision: Decision) -> float:
        """The simulated step, remembered."""
        if decision.strategy not in self._simulated:
            self._simulated[decision.strategy] = decision.simulated_s
        return self._simulated[decision.strategy]

    def _simulated_fastest(self, best: Decision) -> Decision:
        """The shortest simulated step among the candidates whose closed form is nearly the best."""
        limit, fastest, opened = best.value_s * (1 + CONFIRMED), best, 0
        for index in self.order():
            if self.bounds.step_s[index] > limit or opened >= MOST_CONFIRMED or time.monotonic() > self.deadline:
                break
            if self.bounds.simulated_s[index] >= self.step_s(fastest):
                continue
            opened += 1
            found = self.open(index, cutoff_s=limit)
            if found is not None and self.step_s(found) < self.step_s(fastest):
                fastest = found
        return fastest

    def _simulated_bound_s(self, fastest_s: float) -> float:
        """No candidate can be simulated faster than this: those that were opened by what their splits take at least."""
        bound_s, simulated_s = fastest_s, self.bounds.simulated_s
        for index in np.nonzero((self.bounds.short_bytes <= 0) & (simulated_s < fastest_s))[0]:
            if simulated_s[index] < bound_s and self.fits(int(index)):
                bound_s = min(bound_s, max(float(simulated_s[index]), self._simulated_floor_s(int(index))))
        return bound_s

    def _simulated_floor_s(self, index: int) -> float:
        """What every split of a candidate takes at least, as far as it was looked into."""
        if index in self._floors or index not in self._longest:
            return self._floors.get(index, 0.0)
        strategy = self.space.candidates.strategy(index)
        if strategy.schedule not in ("gpipe", "1f1b"):
            return 0.0
        chain = self.space.chain(strategy.tensor, strategy.micro_batch_size)
        return simulated_with_longest_s(strategy, float(chain.period[-1]), self._longest[index])

    def _fastest(self, tolerance: float) -> tuple[Decision | None, float, bool]:
        best: Decision | None = None
        for index, bound in self.best_first(self.order()):
            if best is not None and bound >= best.value_s:
                break
            if best is not None and time.monotonic() > self.deadline:
                return best, min(bound, best.value_s), False
            # Up to the tolerance above the best, so that the answer serves the search for less parallelism too.
            found = self.open(index, cutoff_s=best.value_s * (1 + max(tolerance, CONFIRMED)) if best else math.inf)
            if found is not None and (best is None or found.value_s < best.value_s):
                best = found
        return best, best.value_s if best else math.inf, best is not None

    def _least_parallel(self, best: Decision, fastest: Decision, tolerance: float) -> Decision:
        """The first group of :func:`preference` that has a step within ``tolerance`` of the shortest: its shortest."""
        limit, limit_s = best.value_s * (1 + CONFIRMED), self.step_s(fastest) * (1 + tolerance)
        for group in self._preferred_to(fastest.strategy, limit):
            found: Decision | None = None
            for index in group:
                if time.monotonic() > self.deadline:
                    return fastest
                if self.bounds.simulated_s[index] > (self.step_s(found) if found else limit_s):
                    continue
                better = self.open(index, cutoff_s=limit)
                if better is not None and self.step_s(better) < (self.step_s(found) if found else limit_s):
                    found = better
            if found is not None:
                return found
        return fastest

    def _unsharded(self, chosen: Decision, best: Decision) -> Decision:
        """The same degrees with whole state on every rank, where that is not much slower than ``best``."""
        if chosen.strategy.zero_stage == 0:
            return chosen
        degrees = _degrees(chosen.strategy)
        limit = best.value_s * (1 + SHARDING_TOLERANCE)
        found: Decision | None = None
        for index in self.order():
            cutoff = found.value_s if found else limit
            if self.bounds.step_s[index] > cutoff or time.monotonic() > self.deadline:
                break
            strategy = self.space.candidates.strategy(index)
            if strategy.zero_stage == 0 and _degrees(strategy) == degrees:
                found = self.open(index, cutoff_s=cutoff) or found
        return found or chosen

    def _preferred_to(self, strategy: Strategy, limit_s: float) -> Iterator[list[int]]:
        """Candidates under the limit that are less parallel than ``strategy``, grouped by preference, least first."""
        ceiling = preference(strategy)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in self.order():
            if self.bounds.step_s[index] > limit_s:
                break
            key = preference(self.space.candidates.strategy(index))
            if key < ceiling:
                groups.setdefault(key, []).append(index)
        for key in sorted(groups):
            yield groups[key]

    def open(self, index: int, *, cutoff_s: float) -> Decision | None:
        """The best split of one candidate by the dynamic program, if it costs at most ``cutoff_s``; remembered."""
        if not self.fits(index):
            return None
        known = self._known.get(index)
        if known is None or (known[1] is None and known[0] < cutoff_s):
            if self.sharper_s(index) > cutoff_s:
                return None
            strategy = self.space.candidates.strategy(index)
            solution = solve_strategy(self.space, strategy, cutoff_s=cutoff_s)
            known = cutoff_s, _decision(self.space, strategy, solution)
            self._floors[index] = math.inf if solution is None else solution.simulated_bound_s
            self._known[index] = known
        decision = known[1]
        return decision if decision is not None and decision.value_s <= cutoff_s else None

    def sharper_s(self, index: int) -> float:
        """A lower bound of one candidate that knows of recompute; inf where it does not fit."""
        step_s = float(self.bounds.step_s[index])
        strategy = self.space.candidates.strategy(index)
        if strategy.pipeline == 1:
            return max(step_s, self.space.tables(strategy).least_whole_s)
        return max(step_s, self._working_s(strategy, index))

    def _working_s(self, strategy: Strategy, index: int) -> float:
        """What the rank with the longest period makes of a step, by its blocks alone. Interleaved ranks hold no fewer
        micro-batches than those of 1F1B; of a zero-bubble step all counts but, at the end, weight gradients."""
        if index not in self._longest:
            self._longest[index] = self._blocks.bottleneck_s(strategy)
        longest_s, micro_batches = self._longest[index], strategy.micro_batches
        if strategy.schedule == "interleaved":
            return micro_batches * longest_s
        if strategy.schedule == "zero_bubble":
            return max(1, micro_batches - strategy.pipeline + 1) * longest_s
        longer_s = max(0.0, longest_s - float(self.bounds.longest_s[index]))
        return float(self.bounds.step_s[index]) + (micro_batches - 1) * longer_s

    def _confirm(self, decision: Decision) -> Decision:
        """The same decision proven by the MILP, or by what proved it where there is no solver or nothing to solve."""
        if self.solver is None or decision.proven_by != "dynamic program":
            return decision
        # A hair above, so that the value itself is not cut off.
        solution = solve_strategy(
            self.space, decision.strategy, cutoff_s=decision.value_s * (1 + 1e-9), solver=self.solver
        )
        confirmed = _decision(self.space, decision.strategy, solution)
        return confirmed if confirmed is not None and confirmed.value_s <= decision.value_s else decision

    def _counts(self) -> Counts:
        considered = len(self.space.candidates)
        memory = int(np.sum(self.bounds.short_bytes > 0)) + sum(not fits for fits in self._fits.values())
        solved = len(self._known)
        return Counts(
            considered=considered,
            pruned_by_memory=memory,
            pruned_by_bound=considered - memory - solved,
            solved=solved,
        )


def _degrees(strategy: Strategy) -> tuple[int, int, int]:
    return strategy.data, strategy.pipeline, strategy.tensor


def _decision(space: Space, strategy: Strategy, solution: Solution | None) -> Decision | None:
    if solution is None or solution.split is None:
        return None
    split = solution.split
    if is_listed(strategy):
        times = evaluate_decision(space, strategy, split.cuts, step_s=brief_step_s).times
        assert times is not None
        return Decision(
            strategy=strategy,
            cuts=split.cuts,
            value_s=split.value_s,
            proven_by=solution.proven_by,
            times=times,
        )
    times = space.ordered(split.order).tables(strategy).of_split(split.cuts).times()
    return Decision(
        strategy=strategy,
        cuts=split.cuts,
        order=split.order,
        value_s=times.closed_form_s,
        proven_by=solution.proven_by,
        times=times,
    )


def solve_strategy(
    space: Space, strategy: Strategy, *, cutoff_s: float = math.inf, solver: SolverName | None = None
) -> Solution | None:
    """The best split of ``strategy`` if it costs at most ``cutoff_s``; None where there is none.

    Cuts of the given order of the layers come first; where there are others, one of those only if it is better.
    """
    if strategy.pipeline == 1:
        return _only_split(space.tables(strategy), cutoff_s)
    if is_listed(strategy):
        return _even_split(space, strategy, cutoff_s)
    if space.problem.stages:
        return fixed_split(space, strategy, space.problem.stages, cutoff_s=cutoff_s)
    found = _solve(space, strategy, space.tables, cutoff_s, solver)
    sets = space.down_sets
    if sets is None or strategy.virtual_stages > 1:
        return found
    in_order = None if found is None else found.split
    better_s = cutoff_s if in_order is None else min(cutoff_s, in_order.value_s * (1 - LEAST_GAIN))
    convex = _solve(space, strategy, space.convex_tables, better_s, solver)
    if convex is None or convex.split is None:
        if found is None or convex is None:
            return found or convex
        floor_s = found.lower_bound_s if in_order is not None else min(found.lower_bound_s, convex.lower_bound_s)
        simulated_s = min(found.simulated_bound_s, convex.simulated_bound_s)
        return dataclasses.replace(found, lower_bound_s=floor_s, simulated_bound_s=simulated_s)
    order, cuts = sets.order(convex.split.cuts)
    return dataclasses.replace(convex, split=dataclasses.replace(convex.split, cuts=cuts, order=order))


def _solve(
    space: Space,
    strategy: Strategy,
    tables_of: Callable[..., Tables],
    cutoff_s: float,
    solver: SolverName | None,
) -> Solution | None:
    """The best split among the arcs of ``tables_of``.

    Spans longer than a limit are left out. With M micro-batches a split that uses one costs more than
    (M - 1) limit + sum of periods; so an answer below that is the best of all, else the limit is raised.
    """
    steps = strategy.micro_batches - 1
    chain = space.chain(strategy.tensor, strategy.micro_batch_size)
    total, longest = float(chain.period[-1]), chain.longest_s
    # No split that costs at most the cutoff has a longer period than this.
    longest_useful = (cutoff_s - total) / steps if steps else math.inf
    limit = 1.25 * max(total / strategy.pipeline, longest) + longest
    while True:
        complete = limit >= min(longest_useful, total)
        safe_s = cutoff_s if complete else steps * limit + total
        tables = tables_of(strategy, period_limit_s=longest_useful if complete else limit)
        arcs = StageArcs(tables=tables)
        solution = solve_split(arcs.problem(), cutoff_s=min(cutoff_s, safe_s), solver=solver)
        if complete or (solution is not None and solution.split is not None):
            left_out_s = simulated_with_longer_s(strategy, total, tables.period_limit_s)
            return with_simulated_bound(arcs, solution, left_out_s)
        limit *= 2


def _even_split(space: Space, strategy: Strategy, cutoff_s: float) -> Solution | None:
    """The one split of an interleaved or zero-bubble strategy (:mod:`autoplan.search.listed`)."""
    cuts = even_cuts(space, strategy)
    memories = None if cuts is None else rank_memories(space, strategy, cuts)
    if cuts is None or memories is None:
        return None
    priced = evaluate_listed(space, strategy, cuts, memories, step_s=brief_step_s)
    split = Split(
        cuts=cuts,
        value_s=priced.objective_s,
        bottleneck_s=max(stage.period_s for stage in priced.stages),
        tail_s=max(stage.tail_s for stage in priced.stages),
    )
    return Solution(
        split=split if priced.objective_s <= cutoff_s else None,
        lower_bound_s=priced.objective_s,
        proven_by="even stages",
        simulated_bound_s=priced.step_s,
    )


def _only_split(tables: Tables, cutoff_s: float) -> Solution | None:
    """One stage: the whole model, nothing to choose."""
    least_s = tables.least_whole_s
    if least_s > cutoff_s:
        return Solution(split=None, lower_bound_s=least_s, proven_by="bound", simulated_bound_s=least_s)
    period = float(tables.base_period[0] + tables.extra(tables.in_flight(0))[0])
    if not math.isfinite(period):
        return None
    tail = float(tables.tail[0])
    value = tables.strategy.micro_batches * period + tail
    split = Split(cuts=(0, tables.chain.layers), value_s=value, bottleneck_s=period, tail_s=tail)
    return Solution(
        split=split if value <= cutoff_s else None,
        lower_bound_s=value,
        proven_by="enumeration",
        simulated_bound_s=value,
    )
