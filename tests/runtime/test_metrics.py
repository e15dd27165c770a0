"""Metrics of steps: measured on every rank, gathered, shown, and written as TensorBoard reads them."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.capture import capture
from autoplan.layers import build_layers
from autoplan.runtime import Program
from autoplan.runtime.events import EventFile, record
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
    logged = [scalars for _, scalars in read_events(path)[1:]]
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


# ------------------------------------------------------------------------------------------------------ the file format

# What tensorboard 2.21's RecordWriter writes of Event(wall_time=1.5, file_version="brain.Event:2") and of
# Event(wall_time=2.25, step=300, summary=[loss 0.5, waits/pipeline 0.25]).
VERSION = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
SUMMARY = (
    "3200000000000000241956ec09000000000000024010ac022a240a0b0a046c6f7373150000003f0a150a0e77616974732f706970656c696e65"
    "150000803e73910f11"
)


def test_a_file_is_byte_for_byte_what_tensorboard_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.5, 2.25])
    monkeypatch.setattr("autoplan.runtime.events.time.time", lambda: next(clock))
    file = EventFile(tmp_path)
    file.write(300, {"loss": 0.5, "waits/pipeline": 0.25})
    file.close()
    assert file.path.read_bytes().hex() == VERSION + SUMMARY
    assert read_events(file.path) == [(0, {}), (300, {"loss": 0.5, "waits/pipeline": 0.25})]


def read_events(path: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, scalars) of every event, checksums compared; a reader of its own for the few fields there are."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        message = data[12 : 12 + length]
        assert data.startswith(record(message))  # the checksums too
        data = data[len(record(message)) :]
        fields = dict(fields_of(message))
        values = [dict(fields_of(value)) for _, value in fields_of(fields.get(5, b""))]
        found.append((fields.get(2, 0), {value[1].decode(): value[2] for value in values}))
    return found


def fields_of(message: bytes) -> list[tuple[int, Any]]:
    found, at = [], 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 0:
            value, at = varint(message, at)
        elif key & 7 == 2:
            size, at = varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            form = "<d" if key & 7 == 1 else "<f"
            (value,) = struct.unpack_from(form, message, at)
            at += struct.calcsize(form)
        found.append((key >> 3, value))
    return found


def varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at
