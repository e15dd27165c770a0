"""The way into the solvers: proven only when the solver proved it, and never a number that is none."""

from __future__ import annotations

import math

import pulp
import pytest

from autoplan.search.solver import MilpFailure, available_solvers, solve

SOLVERS = available_solvers()


def knapsack(items: int) -> pulp.LpProblem:
    """A multi-dimensional knapsack that no solver closes in milliseconds."""
    problem = pulp.LpProblem("knapsack", pulp.LpMinimize)
    take = [problem.add_variable(f"x_{i:04d}", 0, 1, cat=pulp.LpInteger) for i in range(items)]
    problem += pulp.LpAffineExpression([(x, -(100 + (i * 7919) % 97)) for i, x in enumerate(take)])
    for row in range(20):
        weights = [(x, 50 + (i * 31 + row * 17 + i * row) % 101) for i, x in enumerate(take)]
        problem += pulp.LpAffineExpression(weights) <= 25 * items
    return problem


def small() -> pulp.LpProblem:
    """Minimise -x - 2y with x + y <= 1 in integers: -2."""
    problem = pulp.LpProblem("small", pulp.LpMinimize)
    x, y = (problem.add_variable(name, 0, 1, cat=pulp.LpInteger) for name in ("x", "y"))
    problem += -1 * x - 2 * y
    problem += x + y <= 1
    return problem


def test_a_solver_is_installed() -> None:
    assert SOLVERS


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_optimum_is_proven(solver: str) -> None:
    outcome = solve(small(), solver=solver)
    assert outcome.proven
    assert outcome.objective == pytest.approx(-2)
    assert outcome.values is not None and outcome.values["y"] == pytest.approx(1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_infeasible_has_no_values(solver: str) -> None:
    problem = small()
    x = problem.variablesDict()["x"]
    problem += x >= 2
    outcome = solve(problem, solver=solver)
    assert outcome.infeasible and not outcome.proven
    assert outcome.values is None and outcome.objective == math.inf


def test_a_time_limit_is_not_a_proof() -> None:
    """Stock PuLP calls this "Optimal"."""
    outcome = solve(knapsack(100), solver="HiGHS", time_limit_s=0.05)
    assert not outcome.proven
    assert outcome.bound < outcome.objective


def test_a_gap_that_was_asked_for_is_not_a_proof() -> None:
    outcome = solve(knapsack(60), solver="HiGHS", relative_gap=0.5)
    assert outcome.values is not None
    assert not outcome.proven
    assert outcome.bound < outcome.objective


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("solver", SOLVERS)
def test_numbers_that_are_none_are_refused(solver: str, bad: float) -> None:
    problem = small()
    problem += pulp.LpAffineExpression([(problem.variablesDict()["x"], bad)]) <= 1, "broken"
    with pytest.raises(MilpFailure, match="broken"):
        solve(problem, solver=solver)


def test_nothing_is_written_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    for solver in SOLVERS:
        solve(small(), solver=solver)
    assert capfd.readouterr().out == ""


def test_another_number_of_threads_in_the_process_does_no_harm() -> None:
    """HiGHS keeps one scheduler a process and fails where the number of threads changes."""
    highspy = pytest.importorskip("highspy")
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.run()
    assert solve(small(), solver="HiGHS").proven
