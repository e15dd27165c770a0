"""The user's strategy keys: each mistake gets one error that states what is legal."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.errors import AutoplanError, StrategyError
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem

LAYERS = [Dense(elements=1_000_000)] * 6


def refused(forced: dict[str, Any], *, gpus: int = 8, global_batch: int = 32, **more: Any) -> StrategyError:
    with pytest.raises(StrategyError) as caught:
        search(problem(LAYERS, cluster(gpus), global_batch=global_batch, forced=forced, **more))
    assert caught.value.exit_code == 2
    return caught.value


def test_unknown_key() -> None:
    error = refused({"tensors": 2})
    assert "tensors" in error.what and "tensor, pipeline" in error.legal


@pytest.mark.parametrize("key", ["offload", "hybrid"])
def test_what_plans_do_not_have_is_no_key(key: str) -> None:
    error = refused({key: True})
    assert f"`{key}`" in error.what and "zero_stage" in error.legal


@pytest.mark.parametrize("schedule", ["zbv", "forward"])
def test_a_schedule_that_programs_do_not_run_is_refused(schedule: str) -> None:
    assert refused({"schedule": schedule}).legal == "gpipe, 1f1b, interleaved, zero_bubble"


@pytest.mark.parametrize("value", ["two", 1.5, True, None, 0, -2])
def test_degrees_are_whole_numbers_from_one(value: Any) -> None:
    error = refused({"tensor": value})
    assert "`tensor`" in error.what and "whole number" in error.legal


@pytest.mark.parametrize("value", [4, -1, "high"])
def test_zero_stage_is_0_to_3(value: Any) -> None:
    assert refused({"zero_stage": value}).legal == "0, 1, 2, 3"


@pytest.mark.parametrize(
    "forced",
    [
        {"context": 3},
        {"expert": 4},
    ],
)
def test_an_axis_that_the_model_has_nothing_for_says_so(forced: dict[str, Any]) -> None:
    error = refused(forced)
    assert next(iter(forced)) in error.what and error.legal


@pytest.mark.parametrize(
    "forced",
    [
        {"virtual_stages": 2, "schedule": "1f1b"},
        {"virtual_stages": 2, "schedule": "zero_bubble"},
        {"virtual_stages": 2, "pipeline": 1},
        {"virtual_stages": 99},
        {"virtual_stages": 2, "pipeline": 4, "schedule": "interleaved"},  # 8 stages of fewer layers
        {"schedule": "looped_bfs"},
    ],
)
def test_stages_that_no_gpu_can_hold_are_refused(forced: dict[str, Any]) -> None:
    error = refused(forced)
    assert error.legal and ("virtual_stages" in error.what or "schedule" in error.what)


def test_a_schedule_that_needs_a_pipeline_is_refused_on_one_gpu() -> None:
    with pytest.raises(StrategyError, match="needs a pipeline"):
        search(problem(LAYERS, cluster(1), forced={"schedule": "interleaved"}))


def test_keys_at_their_only_value_are_fine() -> None:
    forced = {"virtual_stages": 1, "context": 1, "expert": 1, "sequence_parallel": False}
    assert search(problem(LAYERS, cluster(2), forced=forced)).forced == forced


def test_numbers_as_text_are_read() -> None:
    assert search(problem(LAYERS, cluster(4), forced={"tensor": "2"})).strategy.tensor == 2


def test_seven_gpus_with_tensor_two_leave_one_idle() -> None:
    plan = search(problem(LAYERS, cluster(7), global_batch=48, forced={"tensor": 2}))
    assert plan.strategy.tensor == 2 and plan.gpus_used == 6


def test_degrees_that_part_of_a_node_would_have_to_hold() -> None:
    with pytest.raises(StrategyError) as caught:
        search(problem(LAYERS, cluster(4, nodes=2), forced={"pipeline": 6}))
    error = caught.value
    assert "pipeline 6 leaves part of a node idle among the 8 GPUs" in error.what
    assert "at most 4, or that 2 whole nodes of 4 hold" in error.legal and "12 GPUs" in error.attempt


def test_product_above_the_gpus() -> None:
    error = refused({"tensor": 4, "pipeline": 4})
    assert "tensor 4 x pipeline 4 = 16 needs more than the 8 GPUs" in error.what


def test_batch_not_divisible() -> None:
    error = refused({"data": 4, "micro_batch_size": 3}, global_batch=32)
    assert "global batch 32 is not divisible by data 4 x micro_batch_size 3 = 12" in error.what
    assert "1, 2, 4, 8, 16, 32" in error.legal and "24" in error.attempt and "36" in error.attempt


def test_pipeline_above_the_layers() -> None:
    error = refused({"pipeline": 8})
    assert "pipeline 8" in error.what and "has 6" in error.what and error.legal == "1 to 6"


def test_illegal_tensor_degree_gives_the_model_s_reason() -> None:
    error = refused({"tensor": 4}, heads=6)
    assert "6 heads are not divisible by tensor 4" in error.what


def test_coupled_batch() -> None:
    coupling = "batch_norm at net.py:7: batch statistics"
    error = refused({"data": 2}, batch_coupling=coupling)
    assert "splits the batch" in error.what and coupling in error.what and error.legal == "1"
    error = refused({"micro_batch_size": 4}, batch_coupling=coupling)
    assert error.legal == "32"


def test_static_graph() -> None:
    error = refused({"micro_batch_size": 4}, fixed_micro_batch=8)
    assert "traced at batch 8 only" in error.what and error.legal == "8"
    error = refused({}, fixed_micro_batch=5)
    assert "no multiple" in error.what


def test_sharded_state_needs_a_data_axis() -> None:
    assert "data 1 was forced" in refused({"zero_stage": 2, "data": 1}).what
    assert "leave it no GPUs" in refused({"zero_stage": 1, "pipeline": 2, "tensor": 4}).what


def test_what_the_runtime_does_not_execute() -> None:
    error = refused({"zero_stage": 3}, zero_stages=(0, 1, 2))
    assert "does not execute it yet" in error.what and error.legal == "0, 1, 2"
    error = refused({"recompute": "full"}, recompute_policies=("none",))
    assert error.legal == "none"


def test_values_that_are_legal_alone_but_not_together() -> None:
    """A micro-batch that is the whole batch leaves one data rank, and ZeRO needs two."""
    error = refused({"zero_stage": 2, "micro_batch_size": 32})
    assert "zero_stage 2, micro_batch_size 32" in error.what
    assert "leave `zero_stage` free" in error.attempt and "leave `micro_batch_size` free" in error.attempt


def test_batch_below_one_and_unknown_precision() -> None:
    refused({}, global_batch=0)
    with pytest.raises(AutoplanError, match="unknown precision"):
        search(problem(LAYERS, cluster(2)).__class__(**_fields(precision="int3")))


def _fields(**changed: Any) -> dict[str, Any]:
    question = problem(LAYERS, cluster(2))
    return {name: getattr(question, name) for name in question.__dataclass_fields__} | changed
