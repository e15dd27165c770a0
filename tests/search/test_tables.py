"""What a stage costs in the search's tables is what the cost models say of it, with the best recompute that fits."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cost_models.memory import stage_memory
from autoplan.plan import Strategy
from autoplan.search.arcs import StageArcs
from autoplan.search.decisions import solve_strategy
from autoplan.search.evaluate import evaluate_decision, stage_costs, stage_times
from autoplan.search.space import Space, open_space
from tests.support.layer_graphs import Dense, cluster, problem

MIB = 2**20
POLICIES = ("none", "selective", "full")

layers_of = st.lists(
    st.builds(
        Dense,
        flops=st.sampled_from([2e11, 1e12]),
        elements=st.sampled_from([1_000_000, 20_000_000]),
        saved=st.sampled_from([40.0 * MIB, 200.0 * MIB]),
        core=st.sampled_from([0.0, 60.0 * MIB]),
        core_flops=st.just(1e11),
        input=st.just(5.0 * MIB),
        shared=st.sampled_from(["", "", "tied"]),
    ),
    min_size=3,
    max_size=5,
)


def space_of(layers: list[Dense], *, memory_gib: float, gpus: int = 8, **more: object) -> Space:
    tied = [dataclasses.replace(d, elements=2_000_000) if d.shared else d for d in layers]
    return open_space(problem(tied, cluster(gpus, memory_gib=memory_gib), global_batch=8, **more))


def strategies_for(pipeline: int) -> st.SearchStrategy[Strategy]:
    return st.sampled_from(
        [
            Strategy(pipeline=pipeline, micro_batches=8),
            Strategy(pipeline=pipeline, micro_batches=4, micro_batch_size=2),
            Strategy(pipeline=pipeline, micro_batches=8, schedule="gpipe"),
            Strategy(pipeline=pipeline, data=2, zero_stage=1, micro_batches=4),
            Strategy(pipeline=pipeline, data=2, zero_stage=2, micro_batches=4),
            Strategy(pipeline=pipeline, data=2, zero_stage=3, micro_batches=4),
            Strategy(pipeline=pipeline, data=2, tensor=2, micro_batches=4),
        ]
    )


def best_policies(space: Space, strategy: Strategy, stage: int, first: int, end: int) -> float:
    """Least period of a stage over every policy of every layer, by the memory model itself; inf where none fits."""
    kinds = [space.kinds(strategy.tensor)[layer.kind] for layer in space.problem.layers.layers[first:end]]
    tables = space.tables(strategy)
    best = math.inf
    for policies in itertools.product(POLICIES, repeat=end - first):
        terms = stage_memory(
            kinds,
            strategy=strategy,
            stage=stage,
            recipe=space.recipe,
            device=space.problem.cluster.device,
            recompute=policies,
        )
        if sum(terms.values()) <= space.problem.cluster.device.memory_bytes * (1 - 1e-6):
            best = min(best, stage_costs(space, tables, stage, first, end, policies).period_s)
    return best


@settings(max_examples=120, deadline=None)
@given(layers_of, st.floats(0.3, 3.0), st.integers(1, 3).flatmap(strategies_for))
def test_every_period_is_the_least_over_all_recompute_choices(
    layers: list[Dense], memory_gib: float, strategy: Strategy
) -> None:
    space = space_of(layers, memory_gib=memory_gib)
    tables = space.tables(strategy)
    total, last = len(layers), strategy.pipeline - 1
    for stage in range(strategy.pipeline):
        table = StageArcs(tables=tables).table(stage)
        for first, end in itertools.combinations(range(total + 1), 2):
            if (first == 0) != (stage == 0) or (end == total) != (stage == last):
                assert table.period_s[first, end] == math.inf
                continue
            if end - first > total - strategy.pipeline + 1:
                continue  # the other stages would be left without a layer
            sends = sum(float(tables.send_s(s)[c]) for s, c in ((stage - 1, first), (stage, end)) if 0 <= s < last)
            period = float(table.cost_s[first, end]) - sends
            expected = best_policies(space, strategy, stage, first, end)
            assert period == pytest.approx(expected, rel=1e-9)
            if expected < math.inf:
                policies = tables.policies(stage, first, end)
                costs = stage_costs(space, tables, stage, first, end, policies)
                assert costs.peak_bytes <= space.problem.cluster.device.memory_bytes
                assert costs.period_s == pytest.approx(expected, rel=1e-9)
                assert costs.tail_s == pytest.approx(float(table.tail_s[first, end]), rel=1e-9)


def brute_force(space: Space, strategy: Strategy) -> float:
    """The least objective over all cuts and, through :func:`best_policies`, all recompute choices."""
    total, best = len(space.problem.layers.layers), math.inf
    tables = space.tables(strategy)
    for inner in itertools.combinations(range(1, total), strategy.pipeline - 1):
        cuts = (0, *inner, total)
        spans = list(enumerate(itertools.pairwise(cuts)))
        if any(best_policies(space, strategy, s, i, j) == math.inf for s, (i, j) in spans):
            continue
        stages = tuple(stage_costs(space, tables, s, i, j, tables.policies(s, i, j)) for s, (i, j) in spans)
        sends = tuple(float(tables.send_s(s)[cuts[s + 1]]) for s in range(strategy.pipeline - 1))
        best = min(best, stage_times(strategy, stages, sends).closed_form_s)
    return best


@settings(max_examples=120, deadline=None)
@given(layers_of, st.floats(0.2, 2.0), st.integers(1, 3).flatmap(strategies_for), st.sampled_from(["HiGHS", None]))
def test_the_stages_are_the_best_over_all_cuts_and_recompute_choices(
    layers: list[Dense], memory_gib: float, strategy: Strategy, solver: str | None
) -> None:
    space = space_of(layers, memory_gib=memory_gib)
    solution = solve_strategy(space, strategy, solver=solver)  # type: ignore[arg-type]
    expected = brute_force(space, strategy)
    if expected == math.inf:
        assert solution is None or solution.split is None
        return
    assert solution is not None and solution.split is not None
    assert solution.split.value_s == pytest.approx(expected, rel=1e-9)
    evaluation = evaluate_decision(space, strategy, solution.split.cuts)
    assert evaluation.objective_s == pytest.approx(solution.split.value_s, rel=1e-9)


def test_recompute_only_where_memory_is_short() -> None:
    """1F1B holds 4 micro-batches on the first of four stages and one on the last: only early stages recompute."""
    layers = [Dense(saved=300.0 * MIB, elements=1_000_000, input=2.0 * MIB)] * 8
    space = space_of(layers, memory_gib=2.0)
    solution = solve_strategy(space, Strategy(pipeline=4, micro_batches=8))
    assert solution is not None and solution.split is not None
    evaluation = evaluate_decision(space, Strategy(pipeline=4, micro_batches=8), solution.split.cuts)
    recomputed = [sum(p != "none" for p in stage.policies) for stage in evaluation.stages]
    assert recomputed[0] > 0 and recomputed[-1] == 0
    assert recomputed == sorted(recomputed, reverse=True)


def test_uneven_stages_make_room_for_a_heavy_head() -> None:
    """A head as long as four layers: the last stage gets fewer layers."""
    layers = [Dense()] * 12 + [Dense(flops=4e12)]
    space = space_of(layers, memory_gib=64.0)
    solution = solve_strategy(space, Strategy(pipeline=4, micro_batches=8))
    assert solution is not None and solution.split is not None
    sizes = [j - i for i, j in itertools.pairwise(solution.split.cuts)]
    assert sizes == [4, 4, 4, 1]


def test_1f1b_steady_state_is_the_simulator_s() -> None:
    """Uniform stages with sends that take a fifth of a stage: closed form and simulation within 3%."""
    layers = [Dense(flops=1e11)] * 8
    machines = cluster(8, memory_gib=64.0, intra=5e9)
    space = open_space(problem(layers, machines, global_batch=64, crossing=float(2 * MIB)))
    strategy = Strategy(pipeline=8, micro_batches=64)
    evaluation = evaluate_decision(space, strategy, tuple(range(9)))
    assert sum(evaluation.sends_s) / 7 > 0.1 * evaluation.stages[0].period_s
    assert evaluation.objective_s == pytest.approx(evaluation.step_s, rel=0.03)
