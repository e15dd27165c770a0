"""Does it fit, on how few GPUs, and how do the families compare."""

from __future__ import annotations

import dataclasses

import pytest

from autoplan.errors import InfeasibleError
from autoplan.search import search
from autoplan.search.questions import compare, fit, min_gpus
from tests.support.layer_graphs import GIB, Dense, cluster, problem

SMALL = [Dense(elements=5_000_000)] * 8
# 2.4 G parameters: 16 bytes of state each and 4 of the step's temporary, 44.7 GiB.
LARGE = [Dense(elements=150_000_000)] * 16


def test_headroom_is_what_the_plan_leaves() -> None:
    question = problem(SMALL, cluster(4))
    found, plan = fit(question), search(question)
    assert found.plan.strategy == plan.strategy
    assert found.headroom_bytes == 16 * GIB - plan.predicted.peak_memory_bytes > 0
    assert found.most_headroom_bytes >= found.headroom_bytes


def test_what_does_not_fit_raises_with_changes_that_do() -> None:
    with pytest.raises(InfeasibleError) as caught:
        fit(problem(LARGE, cluster(2, memory_gib=12), zero_stages=(0,)))
    assert caught.value.short_by_bytes > 0 and caught.value.suggestions


def test_one_gpu_is_enough_for_a_small_model() -> None:
    assert min_gpus(problem(SMALL, cluster(8))).gpus == 1


def test_the_fewest_gpus_fit_and_fewer_do_not() -> None:
    """44.7 GiB on cards of 12 GiB: four hold 48 GiB less what is fixed, three do not."""
    question = problem(LARGE, cluster(8, memory_gib=12), zero_stages=(0,), recompute_policies=("none",))
    found = min_gpus(question)
    assert found.gpus == 4
    search(dataclasses.replace(question, cluster=found.cluster))
    for fewer in range(1, 4):
        machines = dataclasses.replace(question.cluster, gpus_per_node=fewer)
        with pytest.raises(InfeasibleError):
            search(dataclasses.replace(question, cluster=machines))


def test_the_batch_grows_with_the_count() -> None:
    found = min_gpus(problem(LARGE, cluster(8, memory_gib=12)), batch_of=lambda count: 8 * count)
    assert found.global_batch == 8 * found.gpus


def test_no_number_of_gpus_splits_one_sample_s_activations() -> None:
    layers = [Dense(elements=1_000_000, saved=40.0 * GIB)] * 2
    with pytest.raises(InfeasibleError) as caught:
        min_gpus(problem(layers, cluster(2), global_batch=2, heads=1))
    assert caught.value.term == "saved_activations" or caught.value.term == "recompute_window"


def test_families_side_by_side() -> None:
    question = problem(LARGE, cluster(4))
    families = {contender.family: contender for contender in compare(question)}
    plan = search(question)
    (chosen,) = (contender for contender in families.values() if contender.chosen)
    assert chosen.strategy == plan.strategy and chosen.step_time_s == plan.predicted.step_time_s
    one = families["one GPU"]
    assert one.step_time_s is None and one.short_by_bytes > 0
    for contender in families.values():
        assert (contender.step_time_s is None) == (contender.short_by_bytes > 0)
    assert {"data with sharded state", "pipeline", "tensor"} <= set(families)


def test_fully_sharded_state_has_a_row_of_its_own() -> None:
    """The best of sharded state is a lower stage here: ZeRO-3 gathers weights for nothing."""
    rows = compare(problem(SMALL, cluster(4)))
    names = [contender.family for contender in rows]
    place = names.index("data with ZeRO-3")
    best, full = rows[place - 1], rows[place]
    assert best.family == "data with sharded state" and best.strategy.zero_stage < 3
    assert full.strategy.zero_stage == 3 and full.strategy.axes == ("data", "zero")
    assert best.step_time_s is not None and full.step_time_s is not None and full.step_time_s >= best.step_time_s
    forced = compare(problem(SMALL, cluster(4), forced={"zero_stage": 1}))
    assert "data with ZeRO-3" not in [contender.family for contender in forced]


def test_forced_values_that_do_not_fit_get_the_nearest_that_do() -> None:
    layers = [Dense(elements=10_000_000, saved=float(GIB))] * 4
    question = problem(layers, cluster(2, memory_gib=12), forced={"micro_batch_size": 16, "recompute": "none"})
    with pytest.raises(InfeasibleError) as caught:
        search(question)
    assert any(text.startswith("micro_batch_size=") for text in caught.value.suggestions)
