"""The front door's own checks: what cannot be meant is refused at once, with what is legal."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.errors import StrategyError


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
    assert "stay unused" in caplog.text


def test_only_public_names_are_listed() -> None:
    assert "launch" in dir(autoplan) and "Program" in dir(autoplan)
    assert "TYPE_CHECKING" not in dir(autoplan)
