"""The data axis for many stages at once, and what no split goes below."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.cost_models.data_parallel import data_parallel_time, exposed_times, least_exposed_times
from autoplan.cost_models.piecewise import at_values
from autoplan.plan import Strategy

CLUSTER = Cluster.parse("4x8xH100")

strategies = st.builds(
    lambda data, zero, micro: Strategy(data=data, zero_stage=zero, micro_batches=micro),
    st.sampled_from([1, 2, 8, 16, 32]),
    st.integers(0, 3),
    st.integers(1, 16),
).filter(lambda strategy: strategy.data > 1 or strategy.zero_stage == 0)
# Bytes of weights (and of gradients), layers, and seconds of backward of one stage.
stage = st.tuples(st.floats(1e5, 1e11), st.integers(1, 40), st.floats(1e-4, 2.0))


@settings(max_examples=200, deadline=None)
@given(strategies, st.lists(stage, min_size=1, max_size=12))
def test_many_stages_cost_what_each_costs_alone(strategy: Strategy, stages: list[tuple[float, int, float]]) -> None:
    weights, layers, backward = (np.array(column) for column in zip(*stages, strict=True))
    together = exposed_times(
        CLUSTER,
        strategy=strategy,
        weight_bytes=weights,
        gradient_bytes=weights / 2,
        layers=layers,
        backward_s=backward,
    )
    for index, (bytes_, count, seconds) in enumerate(stages):
        alone = data_parallel_time(
            CLUSTER,
            strategy=strategy,
            weight_bytes=bytes_,
            gradient_bytes=bytes_ / 2,
            layers=count,
            backward_s=seconds,
            prefetch=False,
        )
        found = [values[index] for values in together]
        assert found == pytest.approx([alone.forward_s, alone.backward_s, alone.step_s], rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(strategies, st.lists(stage, min_size=1, max_size=8))
def test_no_split_exposes_less_than_the_whole_at_best(
    strategy: Strategy, stages: list[tuple[float, int, float]]
) -> None:
    alone = [
        data_parallel_time(
            CLUSTER,
            strategy=strategy,
            weight_bytes=bytes_,
            gradient_bytes=bytes_ / 2,
            layers=count,
            backward_s=seconds,
            prefetch=False,
        )
        for bytes_, count, seconds in stages
    ]
    whole, backward = math.fsum(s[0] for s in stages), math.fsum(s[2] for s in stages)
    every, once = least_exposed_times(
        CLUSTER,
        strategy=strategy,
        weight_bytes=whole,
        gradient_bytes=whole / 2,
        backward_s=np.array([backward, math.inf]),
    )
    assert every[0] <= math.fsum(t.forward_s + t.backward_s for t in alone) * (1 + 1e-9)
    assert once[0] <= math.fsum(t.step_s for t in alone) * (1 + 1e-9)
    assert every[1] <= every[0] and once[1] <= once[0]


def test_weights_that_are_gathered_with_nothing_beside_show_whole() -> None:
    """ZeRO-3 without prefetch: two gathers show, and of the scatter one layer's and what contention costs."""
    strategy = Strategy(data=8, zero_stage=3, micro_batches=1)
    given_ = {"strategy": strategy, "weight_bytes": 8e9, "gradient_bytes": 8e9, "layers": 8}
    hidden = data_parallel_time(CLUSTER, **given_, backward_s=10.0, prefetch=False)
    bare = data_parallel_time(CLUSTER, **given_)
    assert hidden.forward_s == bare.forward_s
    scatter_s = bare.backward_s - bare.forward_s
    assert hidden.backward_s == pytest.approx(bare.forward_s + scatter_s * (1 / 8 + 7 / 8 * 0.15))


def cheaper_of_two(amount: float) -> float:
    """Two lines that cross at 1e6: a ring's latency and rate, and a tree's."""
    return min(1e-5 + 2e-9 * amount, 1e-3 + 1e-9 * amount + 1e-5) if amount else 0.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60))
def test_a_price_of_two_lines_is_told_at_every_value(values: list[float]) -> None:
    found = at_values(cheaper_of_two, np.array(values))
    assert found == pytest.approx([cheaper_of_two(value) for value in values], rel=1e-9)


def test_few_values_are_asked_for() -> None:
    asked = []

    def price(amount: float) -> float:
        asked.append(amount)
        return cheaper_of_two(amount)

    at_values(price, np.arange(0.0, 2e6, 1e3))
    assert len(asked) < 40
