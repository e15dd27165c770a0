"""Memory kept free and a maximum of GPUs: kept by every plan, and named where they are in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autoplan.errors import InfeasibleError, StrategyError
from autoplan.plan import Plan, Strategy
from autoplan.search import search
from tests.support.layer_graphs import GIB, Dense, cluster, problem
from tests.support.mixed import group, mixed

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
    assert plan.gpus_used == 3 and "5 of the 8 GPUs stay unused, as forced" in plan.case


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


LAYERS = [Dense(elements=5_000_000)] * 8


def planned(**forced: Any) -> Plan:
    return search(problem(LAYERS, cluster(8), forced=forced))


@pytest.mark.parametrize(
    ("forced", "holds"),
    [
        ({"data": "<=4"}, lambda s: s.data <= 4),
        ({"data": "<= 2", "tensor": "!=2"}, lambda s: s.data <= 2 and s.tensor != 2),
        ({"pipeline": ">=2"}, lambda s: s.pipeline >= 2),
        ({"pipeline": ">=2 <=3", "tensor": 1}, lambda s: s.pipeline == 2 and s.tensor == 1),
        ({"tensor": "2|8"}, lambda s: s.tensor in (2, 8)),
        ({"tensor": "2|4|8 !=2"}, lambda s: s.tensor in (4, 8)),
        ({"micro_batch_size": "<=2", "zero_stage": ">=2"}, lambda s: s.micro_batch_size <= 2 and s.zero_stage >= 2),
    ],
)
def test_a_degree_stays_in_its_range(forced: dict[str, Any], holds: Callable[[Strategy], bool]) -> None:
    plan = planned(**forced)
    assert holds(plan.strategy)
    assert plan.forced == forced
    ranged = [key for key, value in forced.items() if isinstance(value, str)]
    assert all(
        text.startswith(key) and text.endswith(", as asked")
        for key, text in zip(ranged, plan.assumptions, strict=False)
    )


def test_a_range_that_the_best_plan_keeps_changes_nothing() -> None:
    free = planned()
    assert planned(data=f">={free.strategy.data}").strategy == free.strategy
    assert planned(pipeline="<=4", tensor="<=4").strategy == free.strategy


def test_the_range_s_best_is_the_best_of_its_values() -> None:
    each = [planned(pipeline=degree).predicted.step_time_s for degree in (2, 4)]
    assert planned(pipeline="2|4").predicted.step_time_s <= min(each) * 1.02


@pytest.mark.parametrize("value", ["<", "<=x", "2|", "<=2 or 3", "=<4"])
def test_what_is_no_range_is_refused(value: str) -> None:
    with pytest.raises(StrategyError, match="`pipeline` cannot be"):
        planned(pipeline=value)


def test_words_have_no_ranges() -> None:
    with pytest.raises(StrategyError, match="it has no range"):
        planned(schedule="1f1b|gpipe")


@pytest.mark.parametrize(
    "stages", ["0-4,5-7", "0-4|5-7", "5", "0,5", "layers.5", ["layers.5"], [5], [(0, 4), (5, 7)], [[0, 4], [5, 7]]]
)
def test_stages_are_cut_where_the_user_says(stages: Any) -> None:
    plan = planned(stages=stages)
    assert [(s.first_layer, s.last_layer) for s in plan.stages] == [(0, 4), (5, 7)]
    assert plan.strategy.pipeline == 2 and plan.certificate.status == "optimal"
    assert "layers 0-4, 5-7" in plan.assumptions[0]
    free = planned(pipeline=2)
    assert free.predicted.step_time_s <= plan.predicted.step_time_s
    assert Plan.from_json(plan.to_json()) == plan


def test_a_stage_of_one_layer_beside_spans() -> None:
    plan = planned(stages="0-4,5-5,6,7")
    assert [(s.first_layer, s.last_layer) for s in plan.stages] == [(0, 4), (5, 5), (6, 6), (7, 7)]


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ("0-3,5-7", "where layer 4 is next"),
        ("0-3,4-6", "hold layers 0 to 6"),
        ("4,2", "not in order"),
        ("9", "no layer 9"),
        ("layers.12", "no layer 'layers.12'"),
        ("", "`stages` cannot be"),
        (3.5, "`stages` cannot be"),
    ],
)
def test_stages_that_are_none_are_refused(stages: Any, what: str) -> None:
    with pytest.raises(StrategyError, match=what):
        planned(stages=stages)


def test_fixed_stages_that_do_not_fit_say_which() -> None:
    with pytest.raises(InfeasibleError) as caught:
        search(problem(LARGE, cluster(4), forced={"stages": "0-14,15", "tensor": 1, "zero_stage": 0}))
    assert "on stage 0" in caught.value.what
    assert any(text.startswith("leave `stages` free") for text in caught.value.suggestions)


def test_axes_stay_inside_a_node() -> None:
    """Two nodes of four with a slow link between them: what may not cross it is not split over it."""
    machines = cluster(4, nodes=2)
    for axis, width in (("tensor", lambda s: s.tensor), ("data", lambda s: s.tensor * s.data)):
        plan = search(problem(LARGE, machines, forced={"inside_node": axis, "zero_stage": "<=1"}))
        assert 4 % width(plan.strategy) == 0 and plan.forced["inside_node"] == axis
    with pytest.raises(StrategyError, match="`inside_node` cannot hold 'layers'"):
        search(problem(LARGE, machines, forced={"inside_node": "layers"}))


def test_a_conflict_is_named() -> None:
    with pytest.raises(StrategyError) as caught:
        planned(pipeline=">=4", max_gpus=2, tensor="<=8", memory_headroom="10%")
    assert "`pipeline` >=4 and `max_gpus` 2 contradict each other" in caught.value.what
    with pytest.raises(StrategyError) as caught:
        search(problem(LARGE, cluster(4, nodes=2), forced={"inside_node": "data", "data": 8, "zero_stage": 1}))
    assert "`inside_node` data and `data` 8 contradict each other" in caught.value.what
    with pytest.raises(StrategyError) as caught:
        planned(stages="0-4,5-7", pipeline="<=1")
    assert "`stages` 0-4,5-7 and `pipeline` <=1 contradict each other" in caught.value.what
    for given in ({"pipeline": 4}, {"virtual_stages": 4}):
        with pytest.raises(StrategyError, match=r"4 and `stages`, which are 2, contradict each other"):
            planned(stages="0-4,5-7", **given)


def test_a_conflict_with_the_batch_is_named() -> None:
    with pytest.raises(StrategyError) as caught:
        planned(micro_batch_size="3|5")
    assert "`micro_batch_size` 3|5" in caught.value.what


def test_a_conflict_over_memory_is_named() -> None:
    """Sharded state fits on two cards, and so does a pipeline; whole state without one does not."""
    with pytest.raises(InfeasibleError) as caught:
        search(problem(LARGE, cluster(2), forced={"zero_stage": 0, "pipeline": 1, "tensor": 1, "data": "<=8"}))
    assert "`zero_stage` 0" in caught.value.what and "contradict each other" in caught.value.what
    assert "data" not in caught.value.what.split(";")[-1]


@pytest.mark.parametrize(
    ("forced", "holds"),
    [
        ({"data": "<=1"}, lambda s: s.data == 1),
        ({"tensor": "!=1", "pipeline": ">=2"}, lambda s: s.tensor > 1 and s.pipeline > 1),
        ({"inside_node": "tensor,data"}, lambda s: s.data * s.tensor <= 2),
        ({"stages": "0-9,10-15"}, lambda s: s.pipeline == 2),
        ({"max_gpus": 2}, lambda s: s.gpus <= 2),
    ],
)
def test_limits_hold_on_clusters_of_several_kinds(forced: dict[str, Any], holds: Callable[[Strategy], bool]) -> None:
    machines = mixed([group(2, nodes=2, memory_gib=16), group(2, speed=0.5, memory_gib=16)], between=25e9)
    plan = search(problem(LARGE, machines, forced=forced))
    assert holds(plan.strategy) and plan.forced == forced


def test_a_range_of_chunks_holds_for_schedules_that_are_tried_last() -> None:
    """Two stages of few micro-batches: their bubble makes another schedule worth it, and chunks are not wanted."""
    chain = [Dense(elements=40_000_000, saved=4.0 * 2**20)] * 16
    deep = {"pipeline": 4, "tensor": 1, "data": 1, "micro_batch_size": 8}
    plan = search(problem(chain, cluster(4), forced=deep | {"virtual_stages": ">=2"}))
    assert plan.strategy.virtual_stages >= 2 and plan.strategy.schedule == "interleaved"
    assert search(problem(chain, cluster(4), forced=deep | {"virtual_stages": "<=1"})).strategy.virtual_stages == 1
