"""The front door's own checks: what cannot be meant is refused at once, with what is legal."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.errors import PlanFileError, StrategyError


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def tiny() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 4), torch.randn(8, 4)


def test_a_strategy_that_is_no_mapping_is_refused() -> None:
    model, batch = tiny()
    with pytest.raises(StrategyError, match="strategy is a str"):
        autoplan.plan(model, gpus="4xH100", example_inputs=batch, loss_fn=mean_square, strategy="tensor=2")  # type: ignore[arg-type]


def test_a_device_that_programs_do_not_run_on_is_refused() -> None:
    model, batch = tiny()
    with pytest.raises(StrategyError, match="'tpu'") as refused:
        autoplan.compile(model, gpus=2, example_inputs=batch, loss_fn=mean_square, device="tpu")
    assert "cpu" in refused.value.legal and "cuda" in refused.value.legal


def test_a_precision_without_units_for_it_is_refused() -> None:
    model, batch = tiny()
    with pytest.raises(StrategyError, match="no fp8 units") as refused:
        autoplan.plan(model, gpus="4xA100-80GB", example_inputs=batch, loss_fn=mean_square, precision="fp8")
    assert "bf16" in refused.value.legal
    assert autoplan.plan(model, gpus="4xH100", example_inputs=batch, loss_fn=mean_square, precision="fp8").feasible


def test_gpus_that_stay_unused_are_said_out_loud(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny()
    with caplog.at_level(logging.WARNING):
        program = autoplan.compile(model, gpus=2, example_inputs=batch, loss_fn=mean_square, device="cpu")
    assert program.plan.gpus_used == 1
    assert "1 of the 2 GPUs stays unused" in caplog.text


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("2xA100-80GB", "H100-80GB-SXM there and A100-80GB-SXM here"),
        ("4xH100", "2 GPUs there and 4 here"),
        (4, "2 GPUs there and 4 here"),
        ("2x1xH100", "1 x 2 GPUs there and 2 x 1 here"),
    ],
)
def test_a_plan_for_another_cluster_is_not_compiled(gpus: int | str, said: str) -> None:
    model, batch = tiny()
    plan = autoplan.plan(model, gpus="2xH100", example_inputs=batch, loss_fn=mean_square)
    with pytest.raises(PlanFileError) as refused:
        autoplan.compile(model, gpus=gpus, example_inputs=batch, loss_fn=mean_square, plan=plan)
    assert said in refused.value.what and "the plan was made for 2xH100-80GB-SXM" in refused.value.what
    assert refused.value.legal.endswith("2 H100-80GB-SXM") and refused.value.attempt


@pytest.mark.parametrize(("gpus", "device"), [("2xH100", None), (2, None), (2, "cpu"), ("2xcpu", "cpu")])
def test_a_plan_is_compiled_for_its_own_cluster_and_cpu_processes_stand_in(gpus: int | str, device: str | None) -> None:
    model, batch = tiny()
    plan = autoplan.plan(model, gpus="2xH100", example_inputs=batch, loss_fn=mean_square)
    made = autoplan.compile(model, gpus=gpus, example_inputs=batch, loss_fn=mean_square, plan=plan, device=device)
    assert made.plan == plan


def test_only_public_names_are_listed() -> None:
    assert "launch" in dir(autoplan) and "Program" in dir(autoplan)
    assert "TYPE_CHECKING" not in dir(autoplan)
