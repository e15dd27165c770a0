"""Plans of compiled stages: cheaper element-wise work and launches, told in the plan, executed as such."""

from __future__ import annotations

from typing import Any

import pytest

import autoplan
from autoplan.errors import StrategyError
from autoplan.plan import Plan
from tests.support.models import tiny_gpt2
from tests.support.plans import of_revision

CASES: list[tuple[str, dict[str, Any]]] = [
    ("8xH100", {"pipeline": 4, "data": 2, "schedule": "zero_bubble", "micro_batch_size": 1}),
    ("2x4xA100-40GB", {"data": 2, "tensor": 2, "pipeline": 2, "recompute": "full"}),
    ("4xH100+4xA100-80GB", {"data": 4, "pipeline": 2}),
]


def planned(spec: str, *, compiled: bool, **more: Any) -> Plan:
    model, batch = tiny_gpt2()
    return autoplan.plan(model, gpus=spec, example_inputs=batch, global_batch=32, compiled=compiled, **more)


@pytest.mark.parametrize(("spec", "strategy"), CASES, ids=str)
def test_the_same_strategy_takes_less_time_and_the_same_memory(spec: str, strategy: dict[str, Any]) -> None:
    eager, compiled = (planned(spec, compiled=each, strategy=strategy) for each in (False, True))
    assert compiled.strategy.describe() == eager.strategy.describe()
    assert compiled.predicted.step_time_s < eager.predicted.step_time_s
    for fast, slow in zip(compiled.stages, eager.stages, strict=True):
        assert (fast.forward_s, fast.backward_s) < (slow.forward_s, slow.backward_s)
        assert fast.memory_terms == slow.memory_terms
        assert fast.synchronise_s >= slow.synchronise_s  # there is less to hide behind


def test_the_mode_is_in_the_file_and_in_the_words() -> None:
    eager, compiled = (planned("8xH100", compiled=each) for each in (False, True))
    assert (eager.compiled, compiled.compiled) == (False, True)
    assert Plan.from_json(compiled.to_json()) == compiled
    assert "torch.compile" in compiled.explain()
    assert "torch.compile" not in eager.explain()
    assert compiled.predicted.step_time_s <= 1.02 * eager.predicted.step_time_s  # 2% may be the price of simplicity


def test_nothing_else_of_a_plan_changes() -> None:
    without = planned("8xH100", compiled=False).to_dict()
    model, batch = tiny_gpt2()
    assert autoplan.plan(model, gpus="8xH100", example_inputs=batch, global_batch=32).to_dict() == without
    del without["compiled"]  # a file from before there was the field
    assert Plan.from_json(of_revision(without, 3)).compiled is False


def test_eager_plans_are_not_taken_for_compiled_ones() -> None:
    model, batch = tiny_gpt2()
    plan = autoplan.plan(model, gpus="1xcpu", example_inputs=batch)
    with pytest.raises(StrategyError, match="compiled stages were asked for, and the plan is of eager ones"):
        autoplan.compile(model, gpus=1, example_inputs=batch, device="cpu", plan=plan, compiled=True)
