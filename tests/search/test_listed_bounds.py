"""No interleaved or zero-bubble candidate is simulated faster than its bounds say, whatever its GPUs hold."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.bounds import lower_bounds
from autoplan.search.decisions import decide_even_split
from autoplan.search.degrees import chunk_counts
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.listed_least import EvenSplitBounds
from autoplan.search.problem import Problem
from autoplan.search.space import open_space
from tests.support.layer_graphs import Dense, cluster, problem

MIB = 2**20

blocks = st.builds(
    Dense,
    flops=st.sampled_from([1e10, 2e11, 1e12]),
    elements=st.sampled_from([0, 1_000_000, 20_000_000]),
    saved=st.sampled_from([1.0 * MIB, 40.0 * MIB, 200.0 * MIB]),
    core=st.sampled_from([0.0, 60.0 * MIB]),
    core_flops=st.just(1e10),
)


@st.composite
def questions(draw: st.DrawFn) -> Problem:
    """A block repeated, between other layers, on up to 8 GPUs."""
    middle = [draw(blocks)] * draw(st.integers(2, 14))
    ends = draw(st.lists(blocks, max_size=2)), draw(st.lists(blocks, max_size=2))
    gpus, nodes = draw(st.sampled_from([(4, 1), (4, 2), (8, 1)]))
    forced = {"schedule": draw(st.sampled_from(["interleaved", "zero_bubble"]))}
    return problem(
        [*ends[0], *middle, *ends[1]],
        cluster(gpus, nodes=nodes, memory_gib=draw(st.floats(0.3, 6.0))),
        global_batch=draw(st.sampled_from([4, 6, 16, 24])),
        forced=forced,
    )


def check_no_bound_is_above_the_step(question: Problem, most: int) -> None:
    space = open_space(question)
    bounds = lower_bounds(space, space.candidates)
    even = EvenSplitBounds(space=space)
    for index in range(0, len(space.candidates), max(1, len(space.candidates) // most)):
        strategy = space.candidates.strategy(index)
        found, _ = decide_even_split(space, strategy, cutoff_s=math.inf)
        if found is None:
            continue
        assert bounds.short_bytes[index] <= 0, strategy
        step_s = evaluate_decision(space, strategy, found.cuts).step_s
        by_boundaries = even.working_s(strategy), even.step_s(strategy)
        for bound_s in (bounds.simulated_s[index], *by_boundaries, found.times.least_s):
            assert bound_s <= step_s * (1 + 1e-9), strategy


@settings(max_examples=8, deadline=None)
@given(questions())
def test_no_bound_is_above_the_simulated_step(question: Problem) -> None:
    check_no_bound_is_above_the_step(question, most=30)


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(questions())
def test_no_bound_is_above_the_simulated_step_on_60_instances(question: Problem) -> None:
    check_no_bound_is_above_the_step(question, most=60)


def test_chunks_are_the_least_of_each_length_of_the_longest() -> None:
    for ranks, layers, common in itertools.product((2, 3, 4, 7), (8, 13, 40, 82), (1, 8, 38)):
        found = chunk_counts(ranks, layers=layers, most_common=min(common, layers))
        assert all(2 <= chunks <= layers // ranks for chunks in found)
        for number in {layers, min(common, layers)}:
            reached = {-(-number // (ranks * chunks)) for chunks in found}
            assert reached >= {-(-number // (ranks * chunks)) for chunks in range(2, layers // ranks + 1)}
