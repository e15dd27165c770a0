"""Metrics of steps: measured on every rank, gathered, shown, and written as TensorBoard reads them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import autoplan
from autoplan.capture import capture
from autoplan.layers import build_layers
from autoplan.runtime import Program
from autoplan.runtime.metrics import Metrics, StepMetrics
from autoplan.runtime.waits import WAITS
from tests.support import models
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks
from tests.support.training import program_forced

AXES = {
    "data": {"data": 2, "pipeline": 1, "zero_stage": 1, "micro_batch_size": 2},
    "data-gathered": {"data": 2, "pipeline": 1, "zero_stage": 3, "micro_batch_size": 2},
    "pipeline": {"data": 1, "pipeline": 2, "micro_batch_size": 2},
    "tensor": {"data": 1, "pipeline": 1, "tensor": 2, "micro_batch_size": 4},
}
WAITED = {
    "data": {"data", "loss"},
    "data-gathered": {"data", "loss"},
    "pipeline": {"pipeline", "loss"},
    "tensor": {"tensor"},  # whose ranks compute one loss, all of them
}


@functools.cache
def one_gpu() -> tuple[Any, Program]:
    model, batch = models.nano_gpt(layers=1)
    layers = build_layers(captured := capture(model, batch))
    plan = hand_plan(layers, micro_batch_size=8)
    return batch, Program(captured, plan, layers, device="cpu")


@pytest.mark.parametrize("axis", AXES)
def test_every_rank_reads_the_same_and_waits_are_of_the_axes_in_use(axis: str, tmp_path: Path) -> None:
    model, batch = models.nano_gpt(layers=1)
    program = program_forced(model, batch, AXES[axis], gpus=2)
    samples = len(batch["input_ids"])

    def train(rank: int, world: int) -> tuple[list[float], list[StepMetrics], str]:
        metrics = Metrics(program, log_dir=tmp_path)
        losses = [program.step(each) for each in metrics.track([batch] * 3)]
        return losses, metrics.history, metrics.report()

    (losses, first, report), (_, second, _) = run_ranks(train, 2)
    assert first == second
    assert [reading.loss for reading in first] == losses and [reading.step for reading in first] == [1, 2, 3]
    plan = program.plan
    for reading in first:
        assert reading.samples == samples
        assert reading.tokens_per_s == pytest.approx(samples * plan.model.tokens_per_sample / reading.step_s)
        assert reading.mfu == pytest.approx(plan.predicted.mfu * plan.predicted.step_time_s / reading.step_s)
        assert {reason for reason, seconds in reading.waits_s.items() if seconds} == WAITED[axis]
        assert 0 < reading.exposed_communication_s < reading.step_s
        assert reading.memory_bytes > 50 * 2**20  # a process that has imported torch
    assert [line.split("  ")[0] for line in report.splitlines()[1:]] == [
        *("step", "tokens/s", "MFU", "memory", "waits and bubble", "wait for data")
    ]
    (path,) = tmp_path.iterdir()
    by_step = read_events(path)
    assert list(by_step) == [1, 2, 3]
    logged = list(by_step.values())
    assert [scalars["loss"] for scalars in logged] == pytest.approx(losses)
    assert [scalars[f"waits_s/{axis.split('-')[0]}"] > 0 for scalars in logged] == [True] * 3


def test_a_reading_may_be_of_several_steps_and_a_turn_of_several_batches() -> None:
    batch, program = one_gpu()
    before, metrics = program.steps, Metrics(program, every=2)
    for each in metrics.track([batch] * 9, steps=5):
        program.step(each)
        program.step(each)
    assert [reading.step - before for reading in metrics.history] == [4, 8]
    assert {reading.samples for reading in metrics.history} == {2 * len(batch["input_ids"])}
    assert metrics.latest is not None and metrics.latest.loss == program.loss


def test_a_loop_of_its_own_ends_its_steps() -> None:
    batch, program = one_gpu()
    metrics = Metrics(program)
    assert metrics.report() == "no step was measured"
    program.step(batch)
    assert metrics.end_step() is metrics.latest


def test_a_bar_shows_the_latest_step(capsys: pytest.CaptureFixture[str]) -> None:
    batch, program = one_gpu()
    metrics = Metrics(program, progress=True)
    for each in metrics.track([batch] * 3):
        program.step(each)
    shown = capsys.readouterr().err
    assert "3/3" in shown and f"loss {program.loss:.4g}" in shown


def test_nothing_is_measured_unless_asked_for() -> None:
    batch, program = one_gpu()
    for each in Metrics(program).track([batch]):
        program.step(each)
    assert WAITS.during("data") is WAITS.during("tensor")  # one object that does nothing
    program.step(batch)
    assert not any(WAITS.take().values())


def test_readings_of_no_steps_and_logs_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    _, program = one_gpu()
    with pytest.raises(autoplan.StrategyError, match="every = 0"):
        Metrics(program, every=0)
    (tmp_path / "file").touch()
    with pytest.raises(autoplan.AutoplanError, match="cannot write the metrics"):
        Metrics(program, log_dir=tmp_path / "file")


def test_more_steps_than_batches_end_with_the_batches() -> None:
    batch, program = one_gpu()
    metrics = Metrics(program)
    for each in metrics.track(iter([batch, batch]), steps=5):
        program.step(each)
    assert len(metrics.history) == 2


def read_events(path: Path) -> dict[int, dict[str, float]]:
    """By step, as TensorBoard reads them."""
    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            found.setdefault(event.step, {})[tag] = event.value
    return found


def test_without_tensorboard_a_log_is_refused_and_all_else_works(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, program = one_gpu()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(autoplan.AutoplanError, match="not installed") as caught:
        Metrics(program, log_dir="log")
    assert "autoplan[tensorboard]" in caught.value.attempt
    metrics = Metrics(program)
    for each in metrics.track([batch]):
        program.step(each)
    assert metrics.latest is not None
