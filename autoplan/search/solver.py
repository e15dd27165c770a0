"""One way into the MILP solvers, with an honest answer: *proven* only when the solver proved it, with gap 0.

HiGHS through its Python API, else the CBC that PuLP finds, else none (the caller has an exact dynamic program).
What makes a wrapper necessary (each seen with PuLP 3.3 and HiGHS 1.16):

- PuLP reports "Optimal" for an incumbent that a time limit stopped, and never reports the gap: here the model status
  and the dual bound are read from HiGHS itself, and of CBC only ``sol_status == 1`` counts.
- A variable holds a value even where there is no solution: values are read only when the solver says that they are
  feasible.
- NaN and infinite coefficients pass silently: refused before the solver sees them.
- HiGHS has one scheduler a process and fails when the number of threads changes: always one thread here, and after a
  failure one retry with a fresh scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import pulp

SolverName = Literal["HiGHS", "CBC"]

try:
    import highspy
except ImportError:  # the dynamic program and CBC serve without it
    highspy = None  # type: ignore[assignment]
# The class that highspy.Highs wraps: the wrapper's constructor prints a banner to standard output, which belongs to the
# caller's results.
_Highs: Any = highspy.Highs.__bases__[0] if highspy else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``values`` by variable name, None where no feasible point was found. ``bound``: what the objective cannot go
    below (-inf where the solver does not say). ``proven``: the values are optimal with gap 0. ``infeasible``: the
    solver proved that there is no solution."""

    values: dict[str, float] | None
    objective: float
    bound: float
    proven: bool
    infeasible: bool
    solver: str


class MilpFailure(RuntimeError):
    """The solver could not be run, or was given numbers that are not finite."""


@cache
def available_solvers() -> tuple[SolverName, ...]:
    """MILP solvers that can run here, best first."""
    found: list[SolverName] = []
    if highspy is not None:
        found.append("HiGHS")
    if pulp.PULP_CBC_CMD(msg=False).available():
        found.append("CBC")
    return tuple(found)


def solve(
    problem: pulp.LpProblem, *, solver: SolverName, time_limit_s: float | None = None, relative_gap: float = 0.0
) -> Outcome:
    """Minimise ``problem``; raises :class:`MilpFailure`.

    With ``relative_gap`` above 0 the solver may stop early, and the outcome is proven only if it closed the gap.
    """
    _check_finite(problem)
    if solver == "HiGHS":
        return _solve_highs(problem, time_limit_s, relative_gap)
    return _solve_cbc(problem, time_limit_s, relative_gap)


def _check_finite(problem: pulp.LpProblem) -> None:
    rows = [("objective", problem.objective), *((row.name, row) for row in problem.constraints())]
    for name, row in rows:
        for variable, coefficient in row.items():
            if not math.isfinite(coefficient):
                raise MilpFailure(f"coefficient of {variable.name} in {name} is {coefficient}")
        if not math.isfinite(row.constant):
            raise MilpFailure(f"constant of {name} is {row.constant}")


def _solve_highs(problem: pulp.LpProblem, time_limit_s: float | None, relative_gap: float) -> Outcome:
    variables = problem.variables()
    model = _highs_model(problem, variables)
    for attempt in range(2):
        highs = _Highs()
        options: dict[str, Any] = {"output_flag": False, "threads": 1, "mip_rel_gap": relative_gap, "mip_abs_gap": 0.0}
        if time_limit_s is not None:
            options["time_limit"] = float(time_limit_s)
        for key, value in options.items():
            highs.setOptionValue(key, value)
        loaded = highs.passModel(model)
        if loaded != highspy.HighsStatus.kError and highs.run() != highspy.HighsStatus.kError:
            return _highs_outcome(highs, variables)
        if attempt == 0:
            _Highs.resetGlobalScheduler(True)
    raise MilpFailure("HiGHS refused the model")


def _highs_model(problem: pulp.LpProblem, variables: list[pulp.LpVariable]) -> Any:
    """The whole model in one object: adding columns and rows one at a time takes three times as long."""
    infinity = highspy.kHighsInf
    column = {variable.name: index for index, variable in enumerate(variables)}
    model = highspy.HighsLp()
    rows = problem.constraints()
    model.num_col_, model.num_row_ = len(variables), len(rows)
    cost = np.zeros(len(variables))
    for variable, coefficient in problem.objective.items():
        cost[column[variable.name]] = coefficient
    model.col_cost_ = cost
    model.offset_ = float(problem.objective.constant)
    model.col_lower_ = np.array([-infinity if v.lowBound is None else v.lowBound for v in variables], float)
    model.col_upper_ = np.array([infinity if v.upBound is None else v.upBound for v in variables], float)
    kinds = highspy.HighsVarType
    model.integrality_ = [kinds.kInteger if v.cat == pulp.LpInteger else kinds.kContinuous for v in variables]
    starts, indices, values = [0], [], []
    for row in rows:
        for variable, coefficient in row.items():
            if coefficient:
                indices.append(column[variable.name])
                values.append(coefficient)
        starts.append(len(indices))
    sides = [-row.constant for row in rows]
    model.row_lower_ = np.array([s if r.sense >= 0 else -infinity for s, r in zip(sides, rows, strict=True)], float)
    model.row_upper_ = np.array([s if r.sense <= 0 else infinity for s, r in zip(sides, rows, strict=True)], float)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array(starts, np.int32)
    model.a_matrix_.index_ = np.array(indices, np.int32)
    model.a_matrix_.value_ = np.array(values, float)
    return model


def _highs_outcome(highs: Any, variables: list[pulp.LpVariable]) -> Outcome:
    status, info, statuses = highs.getModelStatus(), highs.getInfo(), highspy.HighsModelStatus
    feasible = info.primal_solution_status == 2  # kSolutionStatusFeasible
    infeasible = status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible)
    values, objective = None, math.inf
    if feasible and not infeasible:
        solution = highs.getSolution().col_value
        values = {variable.name: solution[index] for index, variable in enumerate(variables)}
        objective = float(info.objective_function_value)
    is_mip = any(variable.cat == pulp.LpInteger for variable in variables)
    bound = float(info.mip_dual_bound) if is_mip else (objective if status == statuses.kOptimal else -math.inf)
    bound = bound if math.isfinite(bound) else -math.inf
    # "Optimal" only means within the gap that was asked for.
    closed = objective - bound <= 1e-9 * max(1.0, abs(objective))
    proven = status == statuses.kOptimal and values is not None and closed
    return Outcome(
        values=values, objective=objective, bound=bound, proven=proven, infeasible=infeasible, solver="HiGHS"
    )


def _solve_cbc(problem: pulp.LpProblem, time_limit_s: float | None, relative_gap: float) -> Outcome:
    command = pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=relative_gap, timeLimit=time_limit_s)
    try:
        problem.solve(command)
    except pulp.PulpSolverError as error:
        raise MilpFailure(f"CBC: {error}") from None
    values, objective = None, math.inf
    if problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        values = {variable.name: float(variable.varValue or 0.0) for variable in problem.variables()}
        objective = float(pulp.value(problem.objective))
    # CBC's bound is not reported by PuLP: within a gap that was asked for, nothing is proven.
    proven = problem.sol_status == pulp.LpSolutionOptimal and values is not None and relative_gap == 0.0
    return Outcome(
        values=values,
        objective=objective,
        bound=objective if proven else -math.inf,
        proven=proven,
        infeasible=problem.sol_status == pulp.LpSolutionInfeasible,
        solver="CBC",
    )
