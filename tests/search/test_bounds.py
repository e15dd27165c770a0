"""No candidate is faster, or needs less memory, than its bound says."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.bounds import fits_greedily, lower_bounds
from autoplan.search.decisions import solve_strategy
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.listed import is_listed
from autoplan.search.space import open_space
from tests.support.layer_graphs import Dense, cluster, problem

MIB = 2**20

layers_of = st.lists(
    st.builds(
        Dense,
        flops=st.sampled_from([1e10, 2e11, 1e12]),
        elements=st.sampled_from([0, 1_000_000, 30_000_000]),
        saved=st.sampled_from([1.0 * MIB, 40.0 * MIB, 200.0 * MIB]),
        core=st.sampled_from([0.0, 60.0 * MIB]),
        core_flops=st.just(1e10),
        shared=st.just(""),
        trainable=st.booleans(),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=40, deadline=None)
@given(
    layers_of,
    st.floats(0.2, 4.0),
    st.sampled_from([(4, 1), (2, 2)]),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_bounds_hold_on_random_candidates(
    layers: list[Dense], memory_gib: float, shape: tuple[int, int], random: object, tied: bool
) -> None:
    gpus, nodes = shape
    if tied:
        ends = Dense(flops=1e11, elements=5_000_000, shared="table")
        layers = [ends, *layers, ends]
    space = open_space(problem(layers, cluster(gpus, nodes=nodes, memory_gib=memory_gib), global_batch=16))
    candidates = space.candidates
    bounds = lower_bounds(space, candidates)
    for index in random.sample(range(len(candidates)), min(25, len(candidates))):  # type: ignore[attr-defined]
        strategy = candidates.strategy(index)
        solution = solve_strategy(space, strategy)
        value = solution.split.value_s if solution is not None and solution.split is not None else math.inf
        assert bounds.step_s[index] <= value * (1 + 1e-9), strategy
        if value < math.inf:
            assert bounds.short_bytes[index] <= 0, strategy
            assert solution is not None and solution.split is not None
            stages = strategy.pipeline * strategy.virtual_stages
            cuts = (0, *sorted(random.sample(range(1, len(layers)), stages - 1)), len(layers))  # type: ignore[attr-defined]
            # Interleaved and zero-bubble strategies have one split; the others are solved over all.
            for split in {solution.split.cuts} if is_listed(strategy) else {solution.split.cuts, cuts}:
                priced = evaluate_decision(space, strategy, split)
                assert bounds.simulated_s[index] <= priced.step_s * (1 + 1e-9), (strategy, split)
                if all(stage.peak_bytes <= space.problem.cluster.device.memory_bytes for stage in priced.stages):
                    assert solution.simulated_bound_s <= priced.step_s * (1 + 1e-9), (strategy, split)
            assert is_listed(strategy) or fits_greedily(space.tables(strategy)), strategy
