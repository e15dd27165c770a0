"""One candidate solved: its best split, exactly, and what that takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.plan import Strategy
from autoplan.search.arcs import StageArcs
from autoplan.search.boundaries import fixed_split
from autoplan.search.evaluate import listed_times
from autoplan.search.listed import even_cuts, is_listed, rank_memories
from autoplan.search.milp import Solution, solve_split
from autoplan.search.simulated import simulated_with_longer_s, with_simulated_bound
from autoplan.search.solver import SolverName
from autoplan.search.space import Space
from autoplan.search.split import Split
from autoplan.search.tables import Tables
from autoplan.search.timing import StageTimes, brief_step_s

# Another order of the layers is worth less than this only by rounding.
LEAST_GAIN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A candidate with its best split: ``value_s`` is what the search minimises (the closed form of GPipe and 1F1B, the
    simulated step of other schedules), ``simulated_s`` the step that the simulator makes of it (a long step is
    extrapolated), ``order`` the order of the layers that ``cuts`` are of, () for the given one."""

    strategy: Strategy
    cuts: tuple[int, ...]
    value_s: float
    proven_by: str
    times: StageTimes
    order: tuple[int, ...] = ()

    @property
    def simulated_s(self) -> float:
        return self.value_s if is_listed(self.strategy) else brief_step_s(self.times)


def decide(space: Space, strategy: Strategy, solution: Solution | None) -> Decision | None:
    """The decision that a solution of ``strategy`` under GPipe or 1F1B is; None where it has no split."""
    if solution is None or solution.split is None:
        return None
    split = solution.split
    times = space.ordered(split.order).tables(strategy).of_split(split.cuts).times()
    return Decision(
        strategy=strategy,
        cuts=split.cuts,
        order=split.order,
        value_s=times.closed_form_s,
        proven_by=solution.proven_by,
        times=times,
    )


def decide_even_split(space: Space, strategy: Strategy, *, cutoff_s: float) -> tuple[Decision | None, float]:
    """The decision of an interleaved or zero-bubble strategy (:mod:`autoplan.search.listed`) if its step takes at most
    the cutoff, and seconds that it takes at least, inf where it does not fit. It is simulated only where the times of
    its stages allow the cutoff."""
    cuts = even_cuts(space, strategy)
    memories = None if cuts is None else rank_memories(space, strategy, cuts)
    if cuts is None or memories is None:
        return None, math.inf
    times = listed_times(space, strategy, cuts, memories)[-1]
    least_s = times.least_s
    if least_s > cutoff_s:
        return None, least_s
    value_s = times.objective_s
    decision = Decision(strategy=strategy, cuts=cuts, value_s=value_s, proven_by="even stages", times=times)
    return (decision if value_s <= cutoff_s else None), value_s


def solve_strategy(
    space: Space,
    strategy: Strategy,
    *,
    cutoff_s: float = math.inf,
    solver: SolverName | None = None,
    least_s: float = 0.0,
) -> Solution | None:
    """The best split of ``strategy`` if it costs at most ``cutoff_s``; None where there is none. ``least_s``: what no
    split of it costs less than, if that is known.

    Cuts of the given order of the layers come first; where there are others, one of those only if it is better.
    """
    if strategy.pipeline == 1:
        return _only_split(space.tables(strategy), cutoff_s)
    if is_listed(strategy):
        return _even_split(space, strategy, cutoff_s)
    if space.problem.stages:
        return fixed_split(space, strategy, space.problem.stages, cutoff_s=cutoff_s)
    found = _solve(space, strategy, space.tables, cutoff_s, solver, least_s)
    sets = space.down_sets
    if sets is None:
        return found
    in_order = None if found is None else found.split
    better_s = cutoff_s if in_order is None else min(cutoff_s, in_order.value_s * (1 - LEAST_GAIN))
    convex = _solve(space, strategy, space.convex_tables, better_s, solver, least_s)
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
    least_s: float = 0.0,
) -> Solution | None:
    """The best split among the arcs of ``tables_of``.

    Spans longer than a limit are left out. With M micro-batches a split that uses one costs more than
    (M - 1) limit + sum of periods; so an answer below that is the best of all, else the limit is raised. Limits under
    which ``least_s`` leaves no such answer are passed over.
    """
    steps = strategy.micro_batches - 1
    chain = space.chain_of(strategy)
    total, longest = float(chain.period[-1]), chain.longest_s
    # No split that costs at most the cutoff has a longer period than this.
    longest_useful = (cutoff_s - total) / steps if steps else math.inf
    limit = 1.25 * max(total / strategy.pipeline, longest) + longest
    while True:
        complete = limit >= min(longest_useful, total)
        safe_s = cutoff_s if complete else steps * limit + total
        if safe_s < least_s and not complete:
            limit *= 2
            continue
        tables = tables_of(strategy, period_limit_s=longest_useful if complete else limit)
        arcs = StageArcs(tables=tables)
        solution = solve_split(arcs.problem(), cutoff_s=min(cutoff_s, safe_s), solver=solver)
        if complete or (solution is not None and solution.split is not None):
            left_out_s = simulated_with_longer_s(strategy, total, tables.period_limit_s)
            return with_simulated_bound(arcs, solution, left_out_s)
        limit *= 2


def _even_split(space: Space, strategy: Strategy, cutoff_s: float) -> Solution | None:
    decision, least_s = decide_even_split(space, strategy, cutoff_s=cutoff_s)
    if decision is None:
        if math.isinf(least_s):
            return None
        return Solution(split=None, lower_bound_s=least_s, proven_by="even stages", simulated_bound_s=least_s)
    times = decision.times
    periods = [forward + backward for forward, backward in zip(times.forward_s, times.backward_s, strict=True)]
    split = Split(cuts=decision.cuts, value_s=decision.value_s, bottleneck_s=max(periods), tail_s=max(times.tail_s))
    return Solution(split=split, lower_bound_s=least_s, proven_by="even stages", simulated_bound_s=least_s)


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
