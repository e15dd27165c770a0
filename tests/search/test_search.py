"""The whole search: equal to trying everything, least parallelism within 2%, the same bytes every time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.plan import Plan, Strategy
from autoplan.search import planner, predict, search
from autoplan.search.choice import CONFIRMED, SHARDING_TOLERANCE
from autoplan.search.decisions import solve_strategy
from autoplan.search.engine import TOLERANCE
from autoplan.search.evaluate import Evaluation, evaluate_decision
from autoplan.search.listed import is_listed
from autoplan.search.preferences import preference
from autoplan.search.problem import Problem
from autoplan.search.space import open_space
from tests.support.layer_graphs import GIB, Dense, cluster, problem

MIB = 2**20


def every(question: Problem) -> dict[Strategy, Evaluation]:
    """Every candidate that fits, each solved alone and priced."""
    space = open_space(question)
    found = {}
    for index in range(len(space.candidates)):
        strategy = space.candidates.strategy(index)
        solution = solve_strategy(space, strategy)
        if solution is not None and solution.split is not None:
            found[strategy] = evaluate_decision(space, strategy, solution.split.cuts)
    return found


questions = st.builds(
    problem,
    st.lists(
        st.builds(
            Dense,
            flops=st.sampled_from([1e10, 3e11]),
            elements=st.sampled_from([1_000_000, 40_000_000]),
            saved=st.sampled_from([10.0 * MIB, 150.0 * MIB]),
        ),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from(
        [
            cluster(4, memory_gib=1.5),
            cluster(4, memory_gib=3.0, intra=5e9),
            cluster(2, nodes=2, memory_gib=2.0),
            cluster(8, memory_gib=8.0),
        ]
    ),
    global_batch=st.sampled_from([4, 6, 8]),
)


def check_equal_to_trying_everything(question: Problem) -> None:
    everything = every(question)
    if not everything:
        return
    plan = search(question)
    proof = plan.certificate
    assert proof.status == "optimal" and proof.gap == 0.0
    assert proof.considered == len(open_space(question).candidates)
    assert proof.best_s == pytest.approx(min(priced.objective_s for priced in everything.values()), rel=1e-9)
    assert proof.lower_bound_s <= min(priced.step_s for priced in everything.values()) * (1 + 1e-9)
    assert plan.predicted.step_time_s * (1 - proof.simulated_gap) == pytest.approx(proof.lower_bound_s)
    assert any(
        preference(plan.strategy) == preference(strategy)
        and plan.predicted.step_time_s == pytest.approx(everything[strategy].step_s, rel=1e-9)
        for strategy in expected(everything)
    )


@settings(max_examples=30, deadline=None)
@given(questions)
def test_search_equals_trying_every_candidate(question: Problem) -> None:
    check_equal_to_trying_everything(question)


@pytest.mark.wide
@settings(max_examples=300, deadline=None)
@given(questions)
def test_search_equals_trying_every_candidate_on_300_instances(question: Problem) -> None:
    check_equal_to_trying_everything(question)


def expected(everything: dict[Strategy, Evaluation]) -> list[Strategy]:
    """The rules by hand: of the interleaved and zero-bubble candidates, and of the others within 3% of the least value,
    the least parallel whose simulated step is within 2% of the shortest; then whole state at the same degrees if its
    value is less than 10% more and it needs neither more recompute nor a smaller micro-batch.

    More than one where values stand on the very edge of a tolerance.
    """
    best = min(priced.objective_s for priced in everything.values())
    answers = []
    for edge in (1 - 1e-9, 1 + 1e-9):
        confirmed = {
            s: priced.step_s
            for s, priced in everything.items()
            if is_listed(s) or priced.objective_s <= best * (1 + CONFIRMED) * edge
        }
        shortest = min(confirmed.values())
        near = [s for s, step in confirmed.items() if step <= shortest * (1 + TOLERANCE) * edge]
        near = near or [s for s, step in confirmed.items() if step == shortest]
        least = min(near, key=lambda s: (preference(s), everything[s].step_s))
        whole = [
            s
            for s, priced in everything.items()
            if degrees(s) == degrees(least)
            and s.zero_stage == 0
            and s.micro_batch_size >= least.micro_batch_size
            and priced.objective_s <= best * (1 + SHARDING_TOLERANCE) * edge
            and recomputed(priced) <= recomputed(everything[least]) * (1 + 1e-9)
        ]
        taken = min(whole, key=lambda s: everything[s].objective_s) if least.zero_stage and whole else least
        answers.append(taken)
    return answers


def recomputed(priced: Evaluation) -> float:
    return priced.strategy.micro_batches * sum(stage.recompute_s for stage in priced.stages)


def degrees(strategy: Strategy) -> tuple[int, int, int]:
    return strategy.data, strategy.pipeline, strategy.tensor


@settings(max_examples=10, deadline=None)
@given(questions)
def test_predict_takes_what_costs_least(question: Problem) -> None:
    everything = every(question)
    if everything:
        best = min(priced.objective_s for priced in everything.values())
        shortest = min(p.step_s for p in everything.values() if p.objective_s <= best * (1 + CONFIRMED))
        assert predict(question).predicted.step_time_s == pytest.approx(shortest, rel=1e-9)


def check_consistent(plan: Plan) -> None:
    """What every plan must keep: its parts add up."""
    assert math.fsum(plan.predicted.time_terms.values()) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert plan.predicted.peak_memory_bytes == max(stage.peak_memory_bytes for stage in plan.stages)
    assert plan.predicted.peak_memory_bytes <= plan.cluster.memory_bytes
    covered = [layer for stage in plan.stages for layer in range(stage.first_layer, stage.last_layer + 1)]
    assert covered == list(range(len(plan.model.layers)))
    for stage in plan.stages:
        assert math.fsum(stage.memory_terms.values()) == pytest.approx(stage.peak_memory_bytes, rel=1e-9)
        assert sum(stage.recompute.values()) == stage.last_layer - stage.first_layer + 1 == len(stage.layer_recompute)
    assert plan.strategy.gpus == plan.gpus_used <= plan.gpus
    assert plan.strategy.global_batch == plan.global_batch
    assert plan.certificate.lower_bound_s <= plan.predicted.step_time_s
    proof = plan.certificate
    assert proof.considered == proof.pruned_by_memory + proof.pruned_by_bound + proof.solved


SMALL = [Dense(elements=5_000_000)] * 8  # 40 M parameters: 0.6 GiB of state


def test_fits_one_card_data_parallel() -> None:
    plan = search(problem(SMALL, cluster(8)))
    assert plan.strategy.axes == ("data",) and plan.strategy.data == 8
    assert "fits one card" in plan.case and "only the batch is split" in plan.case
    check_consistent(plan)


def test_fits_one_card_data_parallel_on_slow_links_too() -> None:
    """At 2 GB/s the gradients' all-reduce is 70 ms of a step of 10 s."""
    plan = search(problem([Dense(elements=5_000_000, flops=3e13)] * 8, cluster(8, intra=2e9), zero_stages=(0,)))
    assert plan.strategy.axes == ("data",)


LARGE = [Dense(elements=100_000_000)] * 16  # 1.6 G parameters: 24 GiB of state on cards of 16 GiB


def test_does_not_fit_one_card_pipeline() -> None:
    """Slow links between the cards: sends of activations are cheaper than sharded state."""
    plan = search(problem(LARGE, cluster(4, intra=2e9), zero_stages=(0,)))
    assert plan.strategy.pipeline > 1 and plan.strategy.tensor == 1
    assert "does not fit one card" in plan.case and "layers are split into stages" in plan.case
    check_consistent(plan)


def test_does_not_fit_one_card_sharded_state() -> None:
    """Fast links, and a batch too small to fill a pipeline: the state is sharded over the data axis."""
    layers = [Dense(elements=100_000_000, flops=2e13)] * 16
    plan = search(problem(layers, cluster(4, intra=400e9), global_batch=4))
    assert plan.strategy.axes == ("data", "zero")
    assert "state is sharded over the data axis" in plan.case
    check_consistent(plan)


HUGE_LAYER = [Dense(elements=2_000_000_000, flops=2e13)] * 2  # one layer has 30 GiB of state on cards of 16 GiB


def test_one_layer_does_not_fit_tensor_parallel() -> None:
    plan = search(problem(HUGE_LAYER, cluster(8), global_batch=1))
    assert plan.strategy.tensor > 1
    assert "matrices are split" in plan.case
    assert all(other.step_time_s is None for other in plan.alternatives if "tensor" not in other.family)
    check_consistent(plan)


def test_fastest_at_scale_is_the_combination() -> None:
    """64 samples on 256 GPUs: data alone leaves 192 idle, so layers and matrices are split too."""
    layers = [Dense(flops=2e13, elements=100_000_000)] * 16
    plan = search(problem(layers, cluster(8, nodes=32), global_batch=64))
    assert plan.strategy.data > 1 and (plan.strategy.pipeline > 1 or plan.strategy.tensor > 1)
    assert plan.strategy.gpus > 64
    check_consistent(plan)


def test_fewer_gpus_where_more_are_slower() -> None:
    """A step of microseconds: every collective costs more than it saves, and it is said aloud."""
    layers = [Dense(flops=1e6, elements=10_000, saved=1e3)] * 2
    plan = search(problem(layers, cluster(8, intra=1e8), global_batch=8))
    assert plan.gpus_used == 1 and plan.gpus == 8
    assert "7 of the 8 GPUs stay unused" in plan.case


def test_a_batch_of_six_on_four_gpus() -> None:
    """6 samples can't be split over 4 ranks: the plan keeps to divisors."""
    plan = search(problem(SMALL, cluster(4), global_batch=6))
    assert 6 % plan.strategy.data == 0
    check_consistent(plan)


def test_a_coupled_batch_is_never_split() -> None:
    question = problem(LARGE, cluster(4), global_batch=8, batch_coupling="batch_norm at model.py:3: batch statistics")
    plan = search(question)
    assert plan.strategy.data == 1 and plan.strategy.micro_batches == 1 and plan.strategy.micro_batch_size == 8
    check_consistent(plan)


def test_a_static_graph_keeps_its_micro_batch() -> None:
    plan = search(problem(SMALL, cluster(4), global_batch=32, fixed_micro_batch=4))
    assert plan.strategy.micro_batch_size == 4


def test_only_what_the_space_allows() -> None:
    plan = search(problem(LARGE, cluster(4), zero_stages=(0,), recompute_policies=("none",)))
    assert plan.strategy.zero_stage == 0
    assert all(set(stage.recompute) == {"none"} for stage in plan.stages)


def test_illegal_tensor_degrees_are_left_out() -> None:
    """3 heads: no tensor degree divides them, so the layer that does not fit can't be split."""
    plan = search(problem(LARGE, cluster(4), heads=3))
    assert plan.strategy.tensor == 1


def test_axes_say_what_is_sent() -> None:
    """Data 4, ZeRO-0: an all-reduce a layer; 40 M gradients of 2 bytes, 2 (n - 1) / n of them sent."""
    plan = search(problem(SMALL, cluster(4), zero_stages=(0,), forced={"data": 4}))
    (axis,) = plan.axes
    assert axis.name == "data" and axis.times_per_step == 8 and axis.link == "near"
    assert axis.bytes_per_step == pytest.approx(2 * 3 / 4 * 40e6 * 2)


def test_pipeline_and_tensor_axes_count_their_messages() -> None:
    """Four stages of two layers, 8 micro-batches: 16 messages a middle stage; 2 all-reduces x 2 layers x 8."""
    forced = {"data": 1, "pipeline": 4, "tensor": 2, "micro_batch_size": 4, "schedule": "1f1b"}
    plan = search(problem(SMALL, cluster(8), forced=forced))
    axes = {axis.name: axis for axis in plan.axes}
    assert axes["pipeline"].times_per_step == 16
    assert axes["pipeline"].bytes_per_step == 8 * 2 * 4 * MIB
    assert axes["tensor"].times_per_step == 2 * 2 * 8
    assert axes["tensor"].bytes_per_step == pytest.approx(32 * 2 * (2 - 1) / 2 * 4 * MIB)


def test_alternatives_have_a_time_or_what_is_missing() -> None:
    plan = search(problem(LARGE, cluster(4)))
    families = {other.family: other for other in plan.alternatives}
    one = families["one GPU"]
    assert one.step_time_s is None
    # 1.6 G parameters x 16 bytes are 23.8 GiB, and the step and the activations come on top.
    assert one.short_by_bytes > 7.8 * GIB
    assert "does not fit" in one.why_not
    for other in plan.alternatives:
        assert (other.step_time_s is None) == (other.short_by_bytes > 0)


@pytest.mark.parametrize("solver", ["HiGHS", "CBC", None])
def test_every_solver_finds_the_same_plan(solver: str | None) -> None:
    layers = [Dense(flops=1e12 * (1 + i % 3), elements=60_000_000 + 7_000_000 * (i % 5)) for i in range(14)]
    question = problem(layers, cluster(4, memory_gib=10), zero_stages=(0,))
    mine, default = search(question, solver=solver), search(question)
    assert mine.strategy == default.strategy and mine.stages == default.stages
    assert mine.certificate.status == "optimal"


def test_equal_inputs_give_equal_bytes() -> None:
    texts = {search(problem(LARGE, cluster(4, nodes=2))).to_json() for _ in range(3)}
    assert len(texts) == 1


def test_a_time_limit_leaves_an_honest_gap() -> None:
    """No time at all: the first candidate that fits is the answer, and what is not known is said."""
    layers = [Dense(flops=1e12 * (1 + i % 3), elements=90_000_000 + 9_000_000 * (i % 5)) for i in range(14)]
    question = problem(layers, cluster(8, memory_gib=12, intra=10e9))
    hurried, patient = search(question, time_limit_s=0.0), search(question)
    assert patient.certificate.status == "optimal" and patient.certificate.gap == 0.0
    assert hurried.certificate.best_s >= patient.certificate.best_s
    assert hurried.certificate.lower_bound_s <= patient.certificate.best_s
    if hurried.certificate.status != "optimal":
        assert hurried.certificate.gap > 0


@pytest.mark.parametrize("layers", range(4, 9))
def test_a_gap_of_nothing_but_rounding_is_none(layers: int) -> None:
    proof = search(problem([Dense()] * layers, cluster(1)), time_limit_s=0.0).certificate
    assert (proof.status == "optimal") == (proof.gap < 1e-12)


def test_predict_names_what_it_filled_in() -> None:
    plan = predict(problem(SMALL, cluster(4), forced={"tensor": 2, "schedule": "gpipe"}))
    assert plan.strategy.tensor == 2 and plan.strategy.schedule == "gpipe"
    assert plan.assumptions[0].startswith("not given, so the value that costs least: data 2")
    assert "tensor" not in plan.assumptions[0] and "schedule" not in plan.assumptions[0]


def test_forced_degrees_leave_the_rest_to_data() -> None:
    plan = search(problem(SMALL, cluster(8), forced={"pipeline": 2, "tensor": 2}))
    assert (plan.strategy.data, plan.strategy.pipeline, plan.strategy.tensor) == (2, 2, 2)
    check_consistent(plan)


def test_a_forced_recompute_is_every_layer_s() -> None:
    plan = search(problem(SMALL, cluster(8), forced={"recompute": "full"}))
    assert all(set(stage.recompute) == {"full"} for stage in plan.stages)
    assert plan.predicted.time_terms["recompute"] > 0


def test_the_simulator_has_the_last_word() -> None:
    """A long first layer, short others: the closed form charges stages that the first hides, the simulator does not."""
    layers = [Dense(flops=1e12 * (4 if i in (0, 7) else 1), elements=40_000_000) for i in range(12)]
    question = problem(layers, cluster(8, memory_gib=3), global_batch=16, recompute_policies=("none",))
    plan, everything = search(question), every(question)
    best = min(priced.objective_s for priced in everything.values())
    shortest = min(p.step_s for p in everything.values() if p.objective_s <= best * (1 + CONFIRMED))
    assert plan.predicted.step_time_s <= shortest * (1 + TOLERANCE)
    assert plan.certificate.confirmed > 0


def test_a_plan_that_costs_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost that was searched for is compared with the final plan's in every search."""
    original = planner.evaluate_decision

    def dearer(*arguments: Any) -> Evaluation:
        priced = original(*arguments)
        return dataclasses.replace(priced, objective_s=priced.objective_s * (1 + 2e-6))

    monkeypatch.setattr(planner, "evaluate_decision", dearer)
    with pytest.raises(AssertionError, match="and its plan costs"):
        search(problem(SMALL, cluster(4)))
