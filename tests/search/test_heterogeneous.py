"""Several kinds of GPUs: equal to trying every layout, slow cards used where they help and idle where they hurt."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, StrategyError
from autoplan.explain.changes import thresholds
from autoplan.plan import Plan, Stage
from autoplan.search import predict, search
from autoplan.search.engine import TOLERANCE
from autoplan.search.forced import read_forced
from autoplan.search.heterogeneous import search_groups
from autoplan.search.heterogeneous_crossings import across_at
from autoplan.search.heterogeneous_engine import decide, evaluate_layout
from autoplan.search.heterogeneous_seats import seats_of
from autoplan.search.heterogeneous_space import MixedSpace, bound_of, open_mixed_space
from autoplan.search.heterogeneous_split import floor_of, milp_layout, useful_arcs
from autoplan.search.problem import Problem
from autoplan.search.solver import available_solvers
from autoplan.search.timing import brief_step_s
from tests.support.layer_graphs import Dense, problem
from tests.support.mixed import every_layout, group, mixed

MIB = 2**20


def space_of(question: Problem) -> MixedSpace:
    return open_mixed_space(question, read_forced(question), tuple(range(len(question.cluster.groups))))


layers = st.lists(
    st.builds(
        Dense,
        flops=st.sampled_from([1e10, 3e11]),
        elements=st.sampled_from([1_000_000, 40_000_000]),
        saved=st.sampled_from([10.0 * MIB, 150.0 * MIB]),
    ),
    min_size=2,
    max_size=5,
)
groups = st.builds(
    lambda gpus, nodes, speed, memory: group(gpus, nodes=nodes, speed=speed, memory_gib=memory),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([1.0, 0.5, 0.25]),
    st.sampled_from([0.8, 1.5, 4.0]),
)


def tie_ends(chain: list[Dense]) -> list[Dense]:
    """``chain`` whose first and last layer hold one tensor, and so equally many elements."""
    first, *middle, last = chain
    last = dataclasses.replace(last, elements=first.elements, shared="both")
    return [dataclasses.replace(first, shared="both"), *middle, last]


questions = st.builds(
    lambda chain, parts, between, batch, tied: problem(
        tie_ends(chain) if tied else chain,
        mixed(parts, between=between),
        global_batch=batch,
    ),
    layers,
    st.lists(groups, min_size=2, max_size=3),
    st.sampled_from([1e9, 25e9]),
    st.sampled_from([4, 6]),
    st.booleans(),
)


def check_equal_to_every_layout(question: Problem) -> None:
    """Every candidate's dynamic program and MILP find what trying every layout finds, and no bound is above it."""
    space = space_of(question)
    for strategy in space.candidates[:: max(1, len(space.candidates) // 6)]:
        tried = [(priced.objective_s, priced.step_s) for _, _, priced in every_layout(space, strategy)]
        found = decide(space, strategy)
        if not tried:
            assert found is None
            continue
        least_s, simulated_s = min(value for value, _ in tried), min(step for _, step in tried)
        assert found is not None
        assert found.value_s == pytest.approx(least_s, rel=1e-9)
        bound = bound_of(space, strategy)
        assert bound.fits
        assert bound.step_s <= least_s * (1 + 1e-9)
        assert bound.simulated_s <= simulated_s * (1 + 1e-9)
        for solver in available_solvers()[:1]:
            _, seats = seats_of(space, strategy)
            floor = floor_of(seats)
            assert floor is not None
            layout, proven = milp_layout(seats, floor, useful_arcs(seats, floor, least_s * 1.1), solver=solver)
            assert layout is not None
            assert proven
            assert layout.value_s == pytest.approx(least_s, rel=1e-9)


@settings(max_examples=6, deadline=None)
@given(questions)
def test_every_candidate_equals_trying_every_layout(question: Problem) -> None:
    check_equal_to_every_layout(question)


@pytest.mark.wide
@settings(max_examples=120, deadline=None)
@given(questions)
def test_every_candidate_equals_trying_every_layout_on_120_instances(question: Problem) -> None:
    check_equal_to_every_layout(question)


def check_whole_search(question: Problem) -> None:
    """The least closed form over each kind alone, all alike and every layout of every candidate is what is proven, and
    no simulated step is shorter than the bound."""
    ways = [*question.cluster.groups, dataclasses.replace(question.cluster, groups=(), between=())]
    steps, values = [], []
    for way in ways:
        try:
            plan = search(dataclasses.replace(question, cluster=way))
        except InfeasibleError:
            continue
        steps.append(plan.predicted.step_time_s)
        values.append(plan.certificate.best_s)
    space = space_of(question)
    for strategy in space.candidates:
        if (found := decide(space, strategy)) is not None:
            values.append(found.value_s)
            steps.append(found.simulated_s)
    if not values:
        with pytest.raises(InfeasibleError):
            search(question)
        return
    plan = search(question)
    proof = plan.certificate
    assert proof.status == "optimal"
    assert proof.best_s == pytest.approx(min(values), rel=1e-9)
    assert proof.objective_bound_s <= min(values) * (1 + 1e-9)
    assert proof.lower_bound_s <= min(steps) * (1 + 1e-9)
    assert proof.considered == proof.pruned_by_memory + proof.pruned_by_bound + proof.solved
    assert Plan.from_json(plan.to_json()) == plan
    check_uses_what_it_says(plan, question.cluster)


def check_uses_what_it_says(plan: Plan, cluster: Cluster) -> None:
    """Every stage on GPUs that are there, and no GPU used twice."""
    width = plan.gpus_used // plan.strategy.pipeline
    named = {g.name: g for g in plan.cluster.groups}
    for g in plan.cluster.groups:
        # The ranks' first stages: of virtual stages each has several.
        whole = sum(width for stage in plan.stages[: plan.strategy.pipeline] if stage.device == g.name)
        assert whole <= g.gpus_used <= g.gpus
    assert sum(g.gpus_used for g in named.values()) == plan.gpus_used <= cluster.gpus
    order = [stage.device for stage in plan.stages]
    runs = [name for name, _ in itertools.groupby(order)]
    assert len(runs) == len(set(runs))


@settings(max_examples=2, deadline=None)
@given(questions)
def test_the_search_proves_the_least_of_all_ways(question: Problem) -> None:
    check_whole_search(question)


@pytest.mark.wide
@settings(max_examples=30, deadline=None)
@given(questions)
def test_the_search_proves_the_least_of_all_ways_on_30_instances(question: Problem) -> None:
    check_whole_search(question)


def big(count: int = 24, **more: Any) -> list[Dense]:
    return [Dense(flops=3e12, elements=20_000_000, saved=64.0 * MIB, **more)] * count


def layers_on(plan: Plan, name: str) -> int:
    return sum(size(stage) for stage in plan.stages if stage.device == name)


def size(stage: Stage) -> int:
    return stage.last_layer - stage.first_layer + 1


def test_layers_go_to_kinds_in_proportion_to_their_pace() -> None:
    fast, slow = group(4, name="fast"), group(4, speed=0.5, name="slow")
    plan = search(problem(big(), mixed([fast, slow]), global_batch=128, heads=1))
    assert layers_on(plan, "fast") == 2 * layers_on(plan, "slow") == 16
    assert "stage 0 on fast with 16 of 24 layers, stage 1 on slow with 8" in plan.case
    alone = search(problem(big(), fast, global_batch=128, heads=1))
    assert plan.predicted.step_time_s < 0.75 * alone.predicted.step_time_s


@pytest.mark.parametrize("speed", [0.02, 0.05])
def test_slow_cards_idle_where_they_hurt_and_the_plan_says_why(speed: float) -> None:
    fast, slow = group(4, name="fast"), group(4, speed=speed, name="slow")
    plan = search(problem(big(8), mixed([slow, fast], between=1e9), global_batch=32, heads=1))
    assert {stage.device for stage in plan.stages} == {"fast"}
    assert [g.gpus_used for g in plan.cluster.groups] == [0, 4]
    assert "Idle: the 4 slow, because with them the best plan is" in plan.case
    assert {"slow alone", "all GPUs alike", "pipeline across kinds"} <= {a.family for a in plan.alternatives}
    assert plan.predicted.step_time_s == pytest.approx(
        search(problem(big(8), fast, global_batch=32, heads=1)).predicted.step_time_s
    )


def test_a_model_that_fits_no_kind_alone_is_split_over_kinds_by_their_memory() -> None:
    """24 and 12 GiB, 28 GiB with the optimizer's work: two thirds on the large card."""
    large, small = group(1, memory_gib=24, name="large"), group(1, memory_gib=12, name="small")
    chain = [Dense(flops=1e12, elements=80_000_000, saved=1.0 * MIB)] * 18
    plan = search(problem(chain, mixed([large, small]), global_batch=8))
    assert {stage.device for stage in plan.stages} == {"large", "small"}
    assert layers_on(plan, "small") < 9 < layers_on(plan, "large")
    for stage in plan.stages:
        assert stage.peak_memory_bytes <= plan.cluster.memory_of(stage)
    assert "no kind alone holds the model" in plan.case


def test_cards_short_of_memory_stand_at_the_end_where_fewer_micro_batches_are_in_flight() -> None:
    roomy, poor = group(2, memory_gib=16, name="roomy"), group(2, memory_gib=1.6, name="poor")
    chain = [Dense(flops=3e12, elements=5_000_000, saved=200.0 * MIB)] * 8
    plan = search(problem(chain, mixed([poor, roomy]), global_batch=32, heads=1, recompute_policies=("none",)))
    order = [stage.device for stage in plan.stages]
    assert order == sorted(order, key=["roomy", "poor"].index)
    assert "poor" in order


def test_alike_kinds_share_the_batch_at_the_pace_of_the_weaker() -> None:
    """The same card with two sizes of memory: data parallelism over both is as good as over one kind."""
    large, small = group(4, memory_gib=16, name="large"), group(4, memory_gib=8, name="small")
    plan = search(problem(big(4), mixed([large, small]), global_batch=64))
    assert plan.strategy.axes == ("data",)
    assert plan.stages[0].device == "large + small"
    assert plan.gpus_used == 8


def test_three_kinds() -> None:
    cluster = mixed([group(2, speed=s, name=n) for n, s in (("a", 1.0), ("b", 0.5), ("c", 0.25))])
    plan = search(problem(big(28), cluster, global_batch=128, heads=1))
    counts = [layers_on(plan, name) for name in "abc"]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == 28
    assert min(counts) > 0


def test_a_slow_link_between_groups_keeps_a_pipeline_inside_one() -> None:
    halves = [group(2, name="one"), group(2, speed=0.9, name="two")]
    chain = big(8, input=float(64 * MIB))
    near = search(problem(chain, mixed(halves), global_batch=16, crossing=64.0 * MIB))
    far = search(problem(chain, mixed(halves, between=1e6), global_batch=16, crossing=64.0 * MIB))
    assert sum(g.gpus_used > 0 for g in near.cluster.groups) == 2
    assert [g.gpus_used for g in far.cluster.groups] == [2, 0]


def test_the_same_bytes_every_time() -> None:
    question = problem(big(), mixed([group(4, name="fast"), group(4, speed=0.4, name="slow")]), global_batch=64)
    assert len({search(question).to_json() for _ in range(3)}) == 1


def test_without_a_solver_the_dynamic_program_answers_the_same() -> None:
    question = problem(big(), mixed([group(4, name="fast"), group(4, speed=0.4, name="slow")]), global_batch=64)
    with_solver, without = search(question), search(question, solver=None)
    assert with_solver.stages == without.stages
    assert without.certificate.solver in ("dynamic program", "bound", "enumeration")


def test_nothing_fits_says_which_kind_comes_nearest() -> None:
    tiny = [group(2, memory_gib=0.5, name="half"), group(2, memory_gib=0.25, name="quarter")]
    chain = [Dense(elements=400_000_000)] * 4
    with pytest.raises(InfeasibleError) as caught:
        search(problem(chain, mixed(tiny), global_batch=8))
    assert "Nearest is half alone" in str(caught.value)
    assert caught.value.short_by_bytes > 0


def test_forced_degrees_hold_across_kinds() -> None:
    cluster = mixed([group(4, name="fast"), group(4, speed=0.5, name="slow")])
    forced = {"pipeline": 4, "data": 2, "tensor": 1}
    plan = search(problem(big(), cluster, global_batch=64, forced=forced))
    assert (plan.strategy.pipeline, plan.strategy.data, plan.strategy.tensor) == (4, 2, 1)
    assert {stage.device for stage in plan.stages} == {"fast", "slow"}
    assert plan.case.startswith("Forced: pipeline 4")
    priced = predict(problem(big(), cluster, global_batch=64, forced=forced))
    assert priced.predicted.step_time_s <= plan.predicted.step_time_s * (1 + 1e-9)


def test_what_no_part_of_the_cluster_can_run_is_refused() -> None:
    cluster = mixed([group(4), group(4, speed=0.5)])
    with pytest.raises(StrategyError):
        search(problem(big(), cluster, global_batch=64, forced={"pipeline": 9}))


def test_no_more_gpus_than_asked_for() -> None:
    cluster = mixed([group(4, name="fast"), group(4, speed=0.5, name="slow")])
    plan = search(problem(big(), cluster, global_batch=64, forced={"max_gpus": 6}))
    assert plan.gpus_used <= 6


def test_out_of_time_the_best_so_far_is_not_called_optimal() -> None:
    question = problem(big(), mixed([group(4, name="fast"), group(4, speed=0.5, name="slow")]), global_batch=64)
    proof = search(question, time_limit_s=0.0).certificate
    assert proof.status == "feasible"
    assert 0 < proof.gap < 1
    assert proof.objective_bound_s <= search(question).certificate.best_s


def test_ranges_nodes_and_boundaries_hold_across_kinds() -> None:
    cluster = mixed([group(4, name="fast"), group(4, speed=0.5, name="slow")])
    ranged = search(problem(big(), cluster, global_batch=64, forced={"pipeline": ">=4", "tensor": 1}))
    assert ranged.strategy.pipeline >= 4
    fixed = search(problem(big(), cluster, global_batch=64, forced={"stages": "0-9,10-23"}))
    assert [stage.first_layer for stage in fixed.stages] == [0, 10]


def test_terms_and_bounds_of_a_mixed_plan_agree() -> None:
    plan = search(problem(big(), mixed([group(4, name="f"), group(4, speed=0.4, name="s")]), global_batch=64))
    assert math.isclose(sum(plan.predicted.time_terms.values()), plan.predicted.step_time_s, rel_tol=1e-9)
    assert plan.certificate.objective_s <= plan.certificate.best_s * (1 + TOLERANCE) * (1 + 1e-9)


def test_links_so_slow_that_another_way_wins_are_named_and_the_search_agrees() -> None:
    cluster = mixed([group(2, name="fast"), group(2, speed=0.5, name="slow")], between=1e9)
    question = problem([Dense(flops=1e10, elements=2_000_000)] * 12, cluster, global_batch=64, heads=1)
    plan = search(question)
    assert {stage.device for stage in plan.stages} == {"fast", "slow"}
    slower = [c for c in plan.crossings if c.quantity == "inter_bytes_per_s" and c.factor < 1 and c.strategy]
    assert len(slower) == 1
    (crossing,) = slower
    assert crossing.value == pytest.approx(crossing.factor * cluster.inter.bytes_per_s)
    assert crossing.strategy in [other.strategy for other in plan.alternatives]
    there = search(dataclasses.replace(question, cluster=cluster.with_links(inter=crossing.factor * 0.95)))
    assert there.strategy.describe() != plan.strategy.describe()  # it leaves the plan there at the latest


def test_a_pipeline_over_kinds_is_priced_over_other_links_as_a_search_there_prices_it() -> None:
    cluster = mixed([group(2, name="fast"), group(2, speed=0.5, name="slow")])
    question = problem([Dense(flops=3e12, elements=20_000_000)] * 12, cluster, global_batch=64, heads=1)
    searched = search_groups(question, solver=None, deadline=math.inf, tolerance=TOLERANCE)
    assert searched.across is not None
    decision = searched.across.chosen
    rival = across_at(searched.space, decision)(lambda c, factor: c.with_links(inter=factor))
    assert rival.step_s(1.0) == pytest.approx(decision.simulated_s, rel=1e-9)
    there = space_of(dataclasses.replace(question, cluster=cluster.with_links(inter=0.25)))
    again = evaluate_layout(there, decision.strategy, decision.seats, decision.cuts, step_s=brief_step_s)
    assert rival.step_s(0.25) == pytest.approx(again.step_s, rel=1e-9) and rival.step_s(0.25) > rival.step_s(1.0)


def test_an_axis_names_the_link_of_each_kind_that_runs_it() -> None:
    fast, slow = group(2, name="fast"), group(2, speed=0.5, name="slow")
    slow = dataclasses.replace(slow, intra=dataclasses.replace(slow.intra, name="PCIe"))
    question = problem([Dense(flops=3e12, elements=20_000_000)] * 12, mixed([fast, slow]), global_batch=64, heads=1)
    plan = search(dataclasses.replace(question, forced={"data": 2, "pipeline": 2}))
    data = next(axis for axis in plan.axes if axis.name == "data")
    assert (data.link_on("fast"), data.link_on("slow")) == (fast.intra.name, "PCIe")
    assert next(axis for axis in plan.axes if axis.name == "pipeline").link == "between"
    assert Plan.from_json(plan.to_json()) == plan  # what the axes say agrees with the cluster


def test_what_does_not_fit_a_kind_is_priced_with_the_memory_that_it_lacks_there() -> None:
    cluster = mixed([group(2, memory_gib=16.0, name="large"), group(2, memory_gib=2.0, name="small")])
    question = problem([Dense(flops=3e12, elements=60_000_000)] * 8, cluster, global_batch=64, heads=1)
    plan = search(question)
    (lost,) = (other for other in plan.alternatives if other.family == "small alone")
    assert lost.step_time_s is None
    of_small = [c for c in plan.crossings if c.quantity == "memory_bytes" and c.strategy == lost.strategy]
    value = cluster.groups[1].device.memory_bytes + lost.short_by_bytes
    (crossing,) = (c for c in of_small if c.value == pytest.approx(value))
    assert crossing.factor == pytest.approx(value / cluster.groups[1].device.memory_bytes)
    roomy = cluster.groups[1].with_more_memory(lost.short_by_bytes * 1.01)
    forced = {"data": lost.strategy.data, "pipeline": lost.strategy.pipeline, "tensor": lost.strategy.tensor}
    there = search(dataclasses.replace(question, cluster=roomy, forced=forced))
    assert there.predicted.step_time_s <= (crossing.step_time_s or 0.0) * (1 + 1e-6)  # its stages may be cut better
    (said,) = (t for t in thresholds(plan) if t.condition.endswith("more on each GPU of small"))
    assert said.value == pytest.approx(value) and said.step_time_s == crossing.step_time_s
    assert Plan.from_json(plan.to_json()) == plan
