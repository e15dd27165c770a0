"""Interleaved and zero-bubble plans: the most even stages, memory by rank from the lists, chosen where they pay."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import schedules
from autoplan.errors import InfeasibleError
from autoplan.layers.types import Gemm, LayerKind
from autoplan.plan import Plan, Strategy
from autoplan.search import predict, search
from autoplan.search.engine import TOLERANCE
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.listed import _most_even, even_cuts, is_listed, rank_memories
from autoplan.search.problem import Problem
from autoplan.search.space import open_space
from tests.support.layer_graphs import Dense, cluster, problem

MIB = 2**20
BLOCKS = [Dense(flops=2e13, elements=20_000_000)] * 16


def forced(**keys: Any) -> dict[str, Any]:
    return {"data": 1, "tensor": 1, "pipeline": 4, "micro_batch_size": 1, **keys}


def predicted(**keys: Any) -> Plan:
    return predict(problem(BLOCKS, cluster(4), global_batch=8, forced=forced(**keys)))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(1, 5))
@settings(deadline=None)
def test_even_cuts_are_the_most_even_of_all(periods: list[float], stages: int) -> None:
    prefix = np.concatenate(([0.0], np.cumsum(periods)))
    found = _most_even(prefix.tobytes(), stages)
    if len(periods) < stages:
        assert found is None
        return
    assert found is not None

    def unevenness(cuts: tuple[int, ...]) -> tuple[float, float]:
        spans = [float(prefix[b] - prefix[a]) for a, b in itertools.pairwise(cuts)]
        return max(spans), sum(span**2 for span in spans)

    splits = [(0, *inner, len(periods)) for inner in itertools.combinations(range(1, len(periods)), stages - 1)]
    longest = min(unevenness(cuts)[0] for cuts in splits)
    squares = min(unevenness(cuts)[1] for cuts in splits if unevenness(cuts)[0] <= longest * (1 + 1e-9))
    assert unevenness(found) == pytest.approx((longest, squares))


def test_interleaving_shortens_the_bubble_by_the_chunks() -> None:
    plain = predicted(schedule="1f1b")
    plan = predicted(schedule="interleaved", virtual_stages=2)
    assert plan.strategy.virtual_stages == 2 and len(plan.stages) == 8
    assert [stage.last_layer - stage.first_layer for stage in plan.stages] == [1] * 8
    # 8 micro-batches on 4 ranks: 3 of 11 slots idle, and half as long ones of 9.5.
    assert plain.predicted.bubble_fraction == pytest.approx(3 / 11, abs=0.01)
    assert plan.predicted.bubble_fraction == pytest.approx(1.5 / 9.5, abs=0.01)
    assert plan.predicted.step_time_s < 0.9 * plain.predicted.step_time_s
    assert "most even" in " ".join(plan.assumptions)


def with_products(question: Problem) -> Problem:
    """Its layers' products are with their parameters, [4096, 4096] x [4096, 4096]."""
    gemm = Gemm(m=4096, n=4096, k=4096)

    def changed(kind: LayerKind) -> LayerKind:
        operators = (dataclasses.replace(op, gemm=gemm, parameter_bytes=2.0 * 4096**2) for op in kind.operators)
        return dataclasses.replace(kind, operators=tuple(operators))

    graph = question.layers
    kinds = tuple(changed(kind) for kind in graph.kinds)
    return dataclasses.replace(question, layers=dataclasses.replace(graph, kinds=kinds))


def test_zero_bubble_fills_the_bubble_with_weight_gradients() -> None:
    blocks = [Dense(flops=2e13, elements=1_000_000)] * 16
    question = with_products(problem(blocks, cluster(4), global_batch=8))
    plain = predict(problem_with(question, forced(schedule="1f1b")))
    plan = predict(problem_with(question, forced(schedule="zero_bubble")))
    assert plan.strategy.schedule == "zero_bubble" and len(plan.stages) == 4
    # F, I and W take a third each: (p - 1) (F + I + W) of a bubble become (p - 1) (F + I - W).
    assert plain.predicted.bubble_fraction == pytest.approx(3 / 11, abs=0.01)
    assert plan.predicted.bubble_fraction == pytest.approx(1 / 9, abs=0.01)
    # The last rank is fullest with one micro-batch in flight and three whose weight gradients wait: for each of its
    # four products the input and the output's gradient.
    terms = [stage.memory_terms.get("weight_gradient_inputs", 0.0) for stage in plan.stages]
    assert terms[0] == 0.0 and terms[3] == 3 * 4 * 2 * 2.0**16


def test_a_stage_repeats_the_memory_of_its_gpu() -> None:
    plan = predicted(schedule="interleaved", virtual_stages=2)
    for stage, other in zip(plan.stages[:4], plan.stages[4:], strict=True):
        assert stage.memory_terms == other.memory_terms
    # 4 + 4 layers of weights, and the chunks that the list holds: 11 on the first rank, 5 on the last.
    first, last = plan.stages[0].memory_terms, plan.stages[3].memory_terms
    assert first["weights"] == pytest.approx(4 * 20_000_000 * 2)
    held = [schedules.chunks_in_flight(rank=rank, ranks=4, virtual_stages=2, micro_batches=8) for rank in (0, 3)]
    assert first["saved_activations"] / last["saved_activations"] == pytest.approx(held[0] / held[1])


def test_a_plan_of_stages_on_shared_gpus_survives_its_file() -> None:
    plan = predicted(schedule="interleaved", virtual_stages=2)
    assert Plan.from_json(plan.to_json()) == plan
    assert math.fsum(plan.predicted.time_terms.values()) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_a_schedule_is_filled_in_where_only_the_chunks_are_given() -> None:
    plan = predicted(virtual_stages=4)
    assert plan.strategy.schedule == "interleaved" and plan.strategy.virtual_stages == 4


def test_the_search_interleaves_where_the_bubble_is_large() -> None:
    """8 samples through 4 stages, and matrices that can't be split: links of 2 GB/s."""
    question = problem(
        [Dense(flops=2e13, elements=100_000_000)] * 16,
        cluster(4, intra=2e9),
        global_batch=8,
        zero_stages=(0,),
        max_tensor=1,
    )
    plan = search(question)
    assert plan.strategy.pipeline > 1 and is_listed(plan.strategy)
    plain = search(problem_with(question, {"schedule": "1f1b"}))
    assert plan.predicted.step_time_s * (1 + TOLERANCE) < plain.predicted.step_time_s


def problem_with(question: Problem, keys: dict[str, Any]) -> Problem:
    return dataclasses.replace(question, forced=keys)


def test_a_schedule_that_gains_little_is_not_chosen() -> None:
    """256 micro-batches through 2 stages wait for 0.4% of the step."""
    question = problem(
        [Dense(flops=2e12, elements=100_000_000)] * 16, cluster(2, intra=2e9), global_batch=256, zero_stages=(0,)
    )
    plan = search(problem_with(question, {"pipeline": 2, "micro_batch_size": 1}))
    assert plan.strategy.schedule == "1f1b"


def test_recompute_where_the_chunks_in_flight_do_not_fit() -> None:
    layers = [Dense(flops=2e13, elements=20_000_000, saved=300.0 * MIB)] * 16
    keys = forced(schedule="interleaved", virtual_stages=2)
    roomy = predict(problem(layers, cluster(4, memory_gib=64.0), global_batch=8, forced=keys))
    tight = predict(problem(layers, cluster(4, memory_gib=6.0), global_batch=8, forced=keys))
    assert all(set(stage.recompute) == {"none"} for stage in roomy.stages)
    assert set(tight.stages[0].recompute) != {"none"}
    assert tight.predicted.peak_memory_bytes <= 6.0 * 2**30


def test_what_does_not_fit_says_by_how_much() -> None:
    layers = [Dense(flops=2e13, elements=200_000_000)] * 16
    keys = forced(schedule="interleaved", virtual_stages=2)
    with pytest.raises(InfeasibleError) as caught:
        predict(problem(layers, cluster(4, memory_gib=4.0), global_batch=8, forced=keys))
    assert caught.value.short_by_bytes > 0


@given(
    st.sampled_from([("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]),
    st.lists(st.sampled_from([20.0 * MIB, 200.0 * MIB]), min_size=6, max_size=9),
    st.integers(1, 9),
)
@settings(max_examples=30, deadline=None)
def test_memory_is_the_fullest_moment_of_the_list(
    schedule: tuple[str, int], saved: list[float], micro_batches: int
) -> None:
    name, virtual = schedule
    strategy = Strategy(
        pipeline=2, virtual_stages=virtual, micro_batches=micro_batches, schedule=name, micro_batch_size=1
    )
    layers = [Dense(flops=1e12, elements=1_000_000, saved=bytes_) for bytes_ in saved]
    space = open_space(problem(layers, cluster(2, memory_gib=80.0), global_batch=micro_batches))
    cuts = even_cuts(space, strategy)
    assert cuts is not None
    memories = rank_memories(space, strategy, cuts)
    assert memories is not None
    for rank, memory in enumerate(memories):
        most = now = 0.0
        for stage, kind, _ in schedules.rank_actions(
            name, rank=rank, stages=2 * virtual, micro_batches=micro_batches, virtual_stages=virtual
        ):
            now += {"F": 1, "W": 0}.get(kind, -1) * sum(saved[cuts[stage] : cuts[stage + 1]])
            most = max(most, now)
        assert memory.terms["saved_activations"] <= most * (1 + 1e-9)
        if name == "interleaved":  # zero bubble may be fullest where it holds more for weights
            assert memory.terms["saved_activations"] == pytest.approx(most)
    assert evaluate_decision(space, strategy, cuts).step_s > 0
