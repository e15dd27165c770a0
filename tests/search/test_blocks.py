"""The sharper bound is a bound: no split of a candidate costs less, whatever its layers recompute."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoplan.plan import Strategy
from autoplan.search.blocks import BlockBounds, _least_sum_s
from autoplan.search.decisions import solve_strategy
from autoplan.search.engine import Engine
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.space import Space, open_space
from tests.support.layer_graphs import Dense, cluster, problem

MIB = 2**20

models = st.builds(
    lambda block, blocks, ends: [ends, *[block] * blocks, ends],
    st.builds(
        Dense,
        flops=st.sampled_from([2e11, 1e12]),
        elements=st.sampled_from([1_000_000, 20_000_000]),
        saved=st.sampled_from([40.0 * MIB, 200.0 * MIB]),
        core=st.sampled_from([0.0, 60.0 * MIB]),
        core_flops=st.just(1e11),
        input=st.just(5.0 * MIB),
        shared=st.sampled_from(["", "tied"]),
    ),
    st.integers(1, 7),
    st.builds(Dense, flops=st.sampled_from([1e10, 1e12]), elements=st.just(3_000_000), saved=st.just(20.0 * MIB)),
)

_END = Dense(flops=1e10, elements=3_000_000, saved=20.0 * MIB)
ALL_TIED = [
    _END,
    *[Dense(flops=2e11, elements=20_000_000, saved=40.0 * MIB, core_flops=1e11, input=5.0 * MIB, shared="tied")] * 7,
    _END,
]


@settings(max_examples=60, deadline=None)
@given(models, st.floats(0.3, 3.0), st.integers(0, 2**32))
@example(ALL_TIED, 2.0, 9191)  # interleaved: each rank holds the one parameter of its four stages once
def test_no_candidate_costs_less_than_its_sharper_bound(layers: list[Dense], memory_gib: float, pick: int) -> None:
    engine = Engine(space=open_space(problem(layers, cluster(8, memory_gib=memory_gib), global_batch=16)), solver=None)
    candidates = engine.space.candidates
    for index in {pick % len(candidates), pick // 7 % len(candidates), pick // 91 % len(candidates)}:
        strategy = candidates.strategy(index)
        solution = solve_strategy(engine.space, strategy)
        value_s = solution.split.value_s if solution is not None and solution.split is not None else math.inf
        assert engine.sharper_s(index) <= value_s * (1 + 1e-9), strategy


def bounds_of(layers: list[Dense], memory_gib: float) -> tuple[BlockBounds, Space]:
    space = open_space(problem(layers, cluster(8, memory_gib=memory_gib), global_batch=32))
    return BlockBounds(space=space), space


BLOCKS = [Dense(saved=300.0 * MIB, elements=1_000_000, input=2.0 * MIB)] * 8
DEEP = Strategy(pipeline=4, micro_batches=32)


def test_with_memory_to_spare_it_is_an_even_share() -> None:
    blocks, space = bounds_of(BLOCKS, 64.0)
    assert blocks.bottleneck_s(DEEP) == pytest.approx(float(space.chain(1, 1).period[-1]) / 4)


def test_it_knows_that_early_stages_must_recompute() -> None:
    """1F1B holds 4 micro-batches on the first of four stages: 2 blocks there recompute, or others take a third."""
    blocks, space = bounds_of(BLOCKS, 2.0)
    longest_s, even_s = blocks.bottleneck_s(DEEP), float(space.chain(1, 1).period[-1]) / 4
    solution = solve_strategy(space, DEEP)
    assert solution is not None and solution.split is not None
    priced = evaluate_decision(space, DEEP, solution.split.cuts)
    assert even_s * 1.05 < longest_s <= priced.bottleneck.period_s * (1 + 1e-9)


def test_it_says_where_nothing_fits() -> None:
    blocks, space = bounds_of(BLOCKS, 0.12)
    assert blocks.bottleneck_s(DEEP) == math.inf
    solution = solve_strategy(space, DEEP)
    assert solution is None or solution.split is None


@given(
    extra=st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=1, max_size=2),
    each=st.integers(1, 2),
)
def test_no_way_to_share_out_blocks_recomputes_less_than_the_bound(extra: list[list[int]], each: int) -> None:
    table = np.array([[0.0, *row] for row in extra])
    stages = np.full(len(extra), each)
    rows = np.repeat(table, each, axis=0)
    ways = [way for way in itertools.product(range(5), repeat=len(rows)) if sum(way) == 4]
    least = min(sum(float(row[n]) for row, n in zip(rows, way, strict=True)) for way in ways)
    assert _least_sum_s(table, stages) <= least + 1e-9
