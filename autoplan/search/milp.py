"""The stage MILP in PuLP: choose one arc a stage, a path from the first layer to the last.

Variables: f[a] in {0, 1} for each useful arc a = (s, i, j); b >= 0, how far the longest period is above the exact
min-max period B*; d >= 0, how far the longest tail is above the exact min-max tail Y*.

    minimise    (M - 1) (B* + b) + sum_a C_a f_a + (Y* + d)                       objective()
    subject to  sum_{a ends at (s, j)} f_a = sum_{a starts at (s + 1, j)} f_a     flow_rows(): every layer in one stage
                sum_{a of stage s} f_a = 1                                        flow_rows()
                sum_{a of stage s} max(0, T_a - B*) f_a <= b                      excess_rows()
                sum_{a of stage s} max(0, Y_a - Y*) f_a <= d                      excess_rows()

B* as the floor and the dropping of arcs that no good path uses (:func:`autoplan.search.split.useful_arcs`) turn ten
seconds of HiGHS into milliseconds. Excesses, not a variable B with the bound B*: they make the linear relaxation
tighter, and B with a bound within 1e-9 of a coefficient made HiGHS 1.16 cut the optimum off in its presolve and call
the rest proven. Milliseconds are the unit, so that coefficients stay near 1. A solution is priced again exactly before
anyone believes it, and a proof counts only where the exact dynamic program agrees.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pulp

from autoplan.search.solver import MilpFailure, Outcome, SolverName, available_solvers, solve
from autoplan.search.split import (
    Arcs,
    Bounds,
    Flags,
    Floats,
    Integers,
    Split,
    SplitProblem,
    bounds,
    evaluate,
    least_path,
    path_of,
    shortest,
    useful_arcs,
)

MILLISECONDS = 1e3
TIME_LIMIT_S = 20.0
# More arcs than this and the dynamic program is the quicker proof; it is exact too.
MOST_ARCS = 20_000
# Up to so many optimistic arcs are asked for at once, and in a large table up to this share of its arcs: every round
# goes through all of them. Of more the best split's come first, as it bounds the others.
MOST_ASKED = 512
SHARE_ASKED = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """``split`` is the best found, None if none costs less than the cutoff. ``lower_bound_s``: no split costs less than
    this (or the cutoff, if that is lower). ``proven_by``: the solver whose proof closes the gap, "" if it is open.
    ``bound``: what no split of the table goes below, term by term. ``simulated_bound_s``: no split is simulated faster,
    those that the table leaves out included."""

    split: Split | None
    lower_bound_s: float
    proven_by: str
    bound: Bounds | None = None
    simulated_bound_s: float = 0.0


def solve_split(
    problem: SplitProblem,
    *,
    cutoff_s: float,
    solver: SolverName | None,
    time_limit_s: float | None = TIME_LIMIT_S,
) -> Solution | None:
    """The best split that costs at most ``cutoff_s``; None where nothing fits. ``solver`` None: dynamic program
    alone.

    Where periods are optimistic, the best split under them is asked for its exact cost, which bounds the arcs that a
    better one can use; once they are few enough, all of them are asked.
    """
    upper: Split | None = None
    while True:
        bound = bounds(problem)
        if bound is None:
            return None
        limit_s = min(cutoff_s, upper.value_s if upper else math.inf)
        floor_s = bound.value_s(problem.micro_batches)
        if floor_s > limit_s:
            return Solution(split=upper, lower_bound_s=floor_s, proven_by="bound", bound=bound)
        cuts = least_path(problem, period_at_most_s=bound.bottleneck_s)
        assert cuts is not None
        path = path_of(problem, cuts)
        known = problem.exact is None or bool(problem.exact[path].all())
        if not known:
            problem = _refined(problem, _flags(problem, path))
        found = evaluate(problem, cuts, path)
        if found.value_s <= limit_s:
            upper = found
        limit_s = min(limit_s, found.value_s)
        if not known and not math.isfinite(limit_s):
            continue
        arcs = useful_arcs(problem, bound, value_at_most_s=limit_s)
        asked = _flags(problem, arcs.at)
        if _is_exact(problem, asked):
            answer = _solve(problem, bound, arcs, upper, cutoff_s, solver, time_limit_s)
            return dataclasses.replace(answer, bound=bound)
        if known or np.count_nonzero(asked) <= max(MOST_ASKED, SHARE_ASKED * len(asked)):
            problem = _refined(problem, asked)


def _is_exact(problem: SplitProblem, arcs: Flags) -> bool:
    """Whether [A] ``arcs`` cost what the problem says."""
    return problem.exact is None or bool(problem.exact[arcs].all())


def _refined(problem: SplitProblem, arcs: Flags) -> SplitProblem:
    if problem.refine is None:
        raise ValueError("a problem with optimistic arcs has to know how to refine them")
    return problem.refine(arcs)


def _flags(problem: SplitProblem, arcs: Sequence[int] | Integers) -> Flags:
    """[A] the same arcs as flags."""
    flags = np.zeros(len(problem.places), dtype=bool)
    flags[arcs] = True
    return flags


def _solve(
    problem: SplitProblem,
    bound: Bounds,
    arcs: Arcs,
    upper: Split | None,
    cutoff_s: float,
    solver: SolverName | None,
    time_limit_s: float | None,
) -> Solution:
    best = shortest(problem, bound, arcs, upper=upper)
    if best is None or best.value_s > cutoff_s:
        return Solution(split=None, lower_bound_s=cutoff_s, proven_by="dynamic program")
    if best.value_s <= bound.value_s(problem.micro_batches) * (1 + 1e-12):
        return Solution(split=best, lower_bound_s=best.value_s, proven_by="bound")
    if solver is None or len(arcs) > MOST_ARCS:
        return Solution(split=best, lower_bound_s=best.value_s, proven_by="dynamic program")
    return _confirm(problem, bound, arcs, best, solver, time_limit_s)


def default_solver() -> SolverName | None:
    """The solver that measures fastest among those installed."""
    return next(iter(available_solvers()), None)


def _confirm(
    problem: SplitProblem, bound: Bounds, arcs: Arcs, best: Split, solver: SolverName, time_limit_s: float | None
) -> Solution:
    """Solve the MILP; keep its split where it is better than the dynamic program's, and its proof where it has one."""
    try:
        split, outcome = milp_split(problem, bound, arcs, solver=solver, time_limit_s=time_limit_s)
    except MilpFailure:
        return Solution(split=best, lower_bound_s=best.value_s, proven_by="dynamic program")
    if split is not None and split.value_s < best.value_s:
        best = split
    # The dynamic program is exact, so the gap is closed either way; the solver's name is on it only if it proved it.
    agrees = outcome.proven and split is not None and split.value_s <= best.value_s * (1 + 1e-9)
    return Solution(split=best, lower_bound_s=best.value_s, proven_by=solver if agrees else "dynamic program")


def milp_split(
    problem: SplitProblem,
    bound: Bounds,
    arcs: Arcs,
    *,
    solver: SolverName,
    time_limit_s: float | None = None,
    relative_gap: float = 0.0,
) -> tuple[Split | None, Outcome]:
    """Build and solve the MILP over ``arcs``; the split is priced exactly. Raises :class:`MilpFailure`."""
    model = pulp.LpProblem("stages", pulp.LpMinimize)
    use = [model.add_variable(f"f_{a:06d}", 0, 1, cat=pulp.LpInteger) for a in range(len(arcs))]
    excess = model.add_variable("b", 0.0), model.add_variable("d", 0.0)
    model += objective(problem, bound, arcs, use, *excess)
    flow_rows(model, problem, arcs, use)
    excess_rows(model, arcs.stage, (arcs.period_s - bound.bottleneck_s) * MILLISECONDS, use, excess[0])
    excess_rows(model, arcs.stage, (arcs.tail_s - bound.tail_s) * MILLISECONDS, use, excess[1])
    outcome = solve(model, solver=solver, time_limit_s=time_limit_s, relative_gap=relative_gap)
    if outcome.values is None:
        return None, outcome
    chosen = [a for a in range(len(arcs)) if outcome.values[use[a].name] > 0.5]
    cuts = (*(int(arcs.first[a]) for a in sorted(chosen, key=lambda a: int(arcs.stage[a]))), problem.layers)
    if len(cuts) != problem.stages + 1 or list(cuts) != sorted(set(cuts)) or cuts[0] != 0:
        raise MilpFailure(f"{solver} returned arcs that are no path: {cuts}")
    return evaluate(problem, cuts), outcome


def objective(
    problem: SplitProblem,
    bound: Bounds,
    arcs: Arcs,
    use: list[pulp.LpVariable],
    period_excess: pulp.LpVariable,
    tail_excess: pulp.LpVariable,
) -> pulp.LpAffineExpression:
    """(M - 1) (B* + b) + sum C f + Y* + d, in milliseconds."""
    steps = problem.micro_batches - 1
    terms = [(f, float(c) * MILLISECONDS) for f, c in zip(use, arcs.cost_s, strict=True)]
    fixed = (steps * bound.bottleneck_s + bound.tail_s) * MILLISECONDS
    return pulp.LpAffineExpression([*terms, (period_excess, float(steps)), (tail_excess, 1.0)], constant=fixed)


def flow_rows(model: pulp.LpProblem, problem: SplitProblem, arcs: Arcs, use: list[pulp.LpVariable]) -> None:
    """One arc a stage, each starting where the one before it ends."""
    of_stage: dict[int, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
    at_cut: dict[tuple[int, int], list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
    for a, f in enumerate(use):
        s, i, j = int(arcs.stage[a]), int(arcs.first[a]), int(arcs.end[a])
        of_stage[s].append((f, 1.0))
        if s:
            at_cut[s, i].append((f, -1.0))
        if s < problem.stages - 1:
            at_cut[s + 1, j].append((f, 1.0))
    for s in sorted(of_stage):
        model += pulp.LpAffineExpression(of_stage[s]) == 1, f"one_{s:04d}"
    for s, cut in sorted(at_cut):
        model += pulp.LpAffineExpression(at_cut[s, cut]) == 0, f"flow_{s:04d}_{cut:05d}"


def excess_rows(
    model: pulp.LpProblem, stages: Integers, excess_ms: Floats, use: list[pulp.LpVariable], most: pulp.LpVariable
) -> None:
    """No stage's arc is further above the floor than ``most``."""
    above: dict[int, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
    for a in (excess_ms > 0).nonzero()[0]:
        above[int(stages[a])].append((use[int(a)], float(excess_ms[a])))
    for s in sorted(above):
        model += pulp.LpAffineExpression([*above[s], (most, -1.0)]) <= 0, f"{most.name}_{s:04d}"
