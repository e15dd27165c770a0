"""Memory kept free and a maximum of GPUs: kept by every plan, and named where they are in the way."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.errors import InfeasibleError, StrategyError
from autoplan.search import search
from tests.support.layer_graphs import GIB, Dense, cluster, problem

# 1.6 G parameters: 24 GiB of state on cards of 16 GiB.
LARGE = [Dense(elements=100_000_000)] * 16


@pytest.mark.parametrize("headroom", [0.25, "0.25", "25%"])
def test_headroom_stays_free_on_every_gpu(headroom: Any) -> None:
    tight = search(problem(LARGE, cluster(4)))
    assert tight.predicted.peak_memory_bytes > 0.75 * 16 * GIB
    plan = search(problem(LARGE, cluster(4), forced={"memory_headroom": headroom}))
    assert plan.predicted.peak_memory_bytes <= 0.75 * 16 * GIB
    assert plan.cluster.memory_bytes == 16 * GIB
    assert plan.assumptions[0] == "25% of every GPU's memory is kept free, as asked"


def test_headroom_in_the_way_is_named() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(problem(LARGE, cluster(2), forced={"memory_headroom": "60%"}))
    assert "with 60% kept free" in caught.value.what
    assert any(text.startswith("without `memory_headroom` it fits") for text in caught.value.suggestions)


def test_no_more_gpus_than_allowed() -> None:
    small = [Dense(elements=5_000_000)] * 8
    assert search(problem(small, cluster(8))).gpus_used == 8
    plan = search(problem(small, cluster(8), forced={"max_gpus": 3}))
    assert plan.gpus_used == 2 and "6 of the 8 GPUs stay unused, as forced" in plan.case


def test_a_maximum_in_the_way_is_named() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(problem(LARGE, cluster(8), forced={"max_gpus": 1}))
    assert any(text.startswith("with more than `max_gpus` 1 it fits") for text in caught.value.suggestions)
    with pytest.raises(StrategyError, match="data 4 needs 4 GPUs, and `max_gpus` is 2"):
        search(problem(LARGE, cluster(8), forced={"data": 4, "max_gpus": 2}))


@pytest.mark.parametrize(("key", "value"), [("memory_headroom", "110%"), ("memory_headroom", "x"), ("max_gpus", 0)])
def test_what_is_no_limit_is_refused(key: str, value: Any) -> None:
    with pytest.raises(StrategyError, match=f"`{key}` cannot be"):
        search(problem(LARGE, cluster(4), forced={key: value}))
