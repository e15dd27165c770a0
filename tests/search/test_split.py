"""Splitting a chain: the MILP, the dynamic program and brute force agree, and the bounds bound."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.milp import milp_split, solve_split
from autoplan.search.solver import available_solvers
from autoplan.search.split import (
    SplitProblem,
    StageTable,
    bounds,
    dense_problem,
    evaluate,
    least_sum,
    shortest,
    useful_arcs,
)


def random_problem(seed: int, *, layers: int, stages: int, micro_batches: int, repeated: bool = False) -> SplitProblem:
    """Random periods, sends and tails; about a third of the arcs don't fit. ``repeated``: few distinct values, many
    ties."""
    random = np.random.default_rng(seed)
    period = random.integers(1, 3, layers) * 1e-3 if repeated else random.uniform(1e-3, 3e-3, layers)
    weight = random.uniform(0, 1, layers)
    sends = random.uniform(0, 1e-3, layers + 1)
    sums, held = np.concatenate(([0.0], np.cumsum(period))), np.concatenate(([0.0], np.cumsum(weight)))
    tables = []
    for stage in range(stages):
        spans = sums[None, :] - sums[:, None]
        memory = held[None, :] - held[:, None]
        fits = (spans > 0) & (memory <= random.uniform(0.8, 2.0) * weight.sum() / stages)
        times = np.where(fits, spans, math.inf)
        cost = times + (sends[:, None] if stage else 0.0)
        tables.append(StageTable(times, cost, np.where(fits, memory * 5e-3, math.inf)))
    return dense_problem(layers=layers, stages=stages, micro_batches=micro_batches, table=lambda s: tables[s])


def brute_force(problem: SplitProblem) -> float:
    """The least objective over all ways to cut, inf where nothing fits."""
    ways = itertools.combinations(range(1, problem.layers), problem.stages - 1)
    return min((value_of(problem, (0, *cuts, problem.layers)) for cuts in ways), default=math.inf)


def value_of(problem: SplitProblem, cuts: tuple[int, ...]) -> float:
    """What a split costs, inf where one of its spans fits no stage."""
    try:
        return evaluate(problem, cuts).value_s
    except ValueError:
        return math.inf


instances = st.builds(
    random_problem,
    st.integers(0, 2**32 - 1),
    layers=st.integers(4, 9),
    stages=st.integers(1, 4),
    micro_batches=st.integers(1, 12),
    repeated=st.booleans(),
)


@settings(max_examples=120, deadline=None)
@given(instances)
def test_milp_dynamic_program_and_brute_force_agree(problem: SplitProblem) -> None:
    best = brute_force(problem)
    bound = bounds(problem)
    if bound is None:
        assert best == math.inf
        return
    everything = useful_arcs(problem, bound, value_at_most_s=1e6)
    by_program = shortest(problem, bound, everything)
    by_milp, outcome = milp_split(problem, bound, everything, solver="HiGHS")
    assert by_program is not None and by_milp is not None
    assert by_program.value_s == pytest.approx(best, rel=1e-12)
    assert by_milp.value_s == pytest.approx(best, rel=1e-9)
    assert outcome.proven
    # What the solver claims is what the split costs.
    assert outcome.objective == pytest.approx(by_milp.value_s * 1e3, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(instances)
def test_pruned_solution_is_the_optimum_and_proven(problem: SplitProblem) -> None:
    solution = solve_split(problem, cutoff_s=math.inf, solver="HiGHS")
    best = brute_force(problem)
    if solution is None:
        assert best == math.inf
        return
    assert solution.split is not None
    assert solution.split.value_s == pytest.approx(best, rel=1e-12)
    assert solution.lower_bound_s == solution.split.value_s
    assert solution.proven_by in ("HiGHS", "bound", "dynamic program")


@settings(max_examples=100, deadline=None)
@given(instances)
def test_bounds_are_below_the_optimum(problem: SplitProblem) -> None:
    bound = bounds(problem)
    if bound is None:
        return
    assert bound.value_s(problem.micro_batches) <= brute_force(problem) * (1 + 1e-12)


@settings(max_examples=50, deadline=None)
@given(instances)
def test_the_cutoff_is_kept(problem: SplitProblem) -> None:
    best = brute_force(problem)
    if best == math.inf:
        return
    assert solve_split(problem, cutoff_s=best * 0.999, solver=None).split is None  # type: ignore[union-attr]
    at_the_cutoff = solve_split(problem, cutoff_s=best * (1 + 1e-9), solver=None)
    assert at_the_cutoff is not None and at_the_cutoff.split is not None


@pytest.mark.skipif("CBC" not in available_solvers(), reason="CBC is not installed")
@settings(max_examples=10, deadline=None)
@given(instances)
def test_cbc_finds_the_same(problem: SplitProblem) -> None:
    bound = bounds(problem)
    if bound is None:
        return
    split, outcome = milp_split(problem, bound, useful_arcs(problem, bound, value_at_most_s=1e6), solver="CBC")
    assert outcome.proven and split is not None
    assert split.value_s == pytest.approx(brute_force(problem), rel=1e-9)


def test_the_bottleneck_is_exact() -> None:
    """Layers of 1, 2, 3, 4 ms on two stages: 6 | 4 is the best bottleneck, 1 | 9 the least sum of cut costs."""
    problem = random_problem(1, layers=8, stages=3, micro_batches=4)
    bound = bounds(problem)
    assert bound is not None
    ways = [(0, *cuts, 8) for cuts in itertools.combinations(range(1, 8), 2)]
    feasible = [evaluate(problem, cuts) for cuts in ways if value_of(problem, cuts) < math.inf]
    assert bound.bottleneck_s == min(split.bottleneck_s for split in feasible)
    first = least_sum(problem, period_at_most_s=bound.bottleneck_s)
    assert first is not None and first.bottleneck_s == bound.bottleneck_s


def test_large_chains_are_solved_exactly() -> None:
    problem = random_problem(3, layers=126, stages=16, micro_batches=64)
    with_solver = solve_split(problem, cutoff_s=math.inf, solver="HiGHS")
    without = solve_split(problem, cutoff_s=math.inf, solver=None)
    assert with_solver is not None and without is not None
    assert with_solver.split is not None and without.split is not None
    assert with_solver.split.value_s == without.split.value_s
