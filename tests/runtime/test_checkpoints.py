"""A run saved under one plan goes on under any other as if nothing had happened; what is damaged is never loaded."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.runtime import CheckpointError, Checkpoints, Program
from autoplan.runtime.checkpoint_files import checkpoints_in
from tests.support import models
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks
from tests.support.training import LEARNING_RATE, capture_double, program_of, written

AFTER = 3  # steps after the checkpoint that are compared

PLANS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 8},
    "dp2-pp2-zero1": {"data": 2, "pipeline": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 1},
    "tp2-pp2": {"tensor": 2, "pipeline": 2, "micro_batch_size": 4, "micro_batches": 2},
    "dp4-zero2": {"data": 4, "micro_batch_size": 2, "zero_stage": 2},
    "dp2-tp2-zero3": {"data": 2, "tensor": 2, "micro_batch_size": 4, "zero_stage": 3},
    "pp2v2": {
        "pipeline": 2,
        "virtual_stages": 2,
        "schedule": "interleaved",
        "micro_batch_size": 4,
        "micro_batches": 2,
    },
}


@functools.cache
def gpt() -> tuple[nn.Module, Any, Capture]:
    return capture_double(*models.nano_gpt(layers=2))


@functools.cache
def planned(name: str) -> Program:
    _, _, captured = gpt()
    layers = build_layers(captured)
    plan = hand_plan(layers, **PLANS[name])
    return written(Program(captured, plan, layers, cluster=Cluster.parse(f"{plan.gpus}xcpu"), device="cpu"))


def groups(program: Program) -> list[dict[str, Any]]:
    """Matrices decay, vectors don't and learn faster: a rank may hold none of either."""
    matrices = {name: p for name, p in program.named_parameters() if "weight" in name and "norm" not in name}
    others = [p for name, p in program.named_parameters() if name not in matrices]
    return [
        {"params": list(matrices.values()), "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 2 * LEARNING_RATE},
    ]


class Run:
    """A training loop's state: amsgrad keeps three tensors a parameter, the scheduler changes every step."""

    def __init__(self, program: Program, root: Path) -> None:
        self.program = program
        self.optimizer = torch.optim.AdamW(groups(program), lr=LEARNING_RATE, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10)
        self.checkpoints = Checkpoints(root, program, self.optimizer, scheduler=self.scheduler)

    def train(self, batch: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(self.program.step(batch))
            self.program.clip_grad_norm_(0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return losses


Outcome = tuple[list[float], dict[str, Tensor]]  # losses after the checkpoint, and the weights after those steps


def undisturbed(name: str, root: Path) -> Outcome:
    """Two steps, a checkpoint that is written while the run goes on, and three steps more."""
    program, batch = planned(name), gpt()[1]

    def body(rank: int, world: int) -> Outcome:
        run = Run(program, root)
        run.train(batch, 2)
        run.checkpoints.save(2, data={"seen": 16})
        losses = run.train(batch, AFTER)
        run.checkpoints.wait()
        return losses, program.state_dict()

    return run_ranks(body, program.plan.gpus)[0]


def resumed(name: str, roots: Sequence[Path]) -> list[Outcome]:
    """From each checkpoint three steps."""
    program, batch = planned(name), gpt()[1]

    def body(rank: int, world: int) -> list[Outcome]:
        outcomes = []
        for root in roots:
            run = Run(program, root)
            found = run.checkpoints.resume()
            assert found is not None
            assert (found.step, found.data) == (2, {"seen": 16})
            outcomes.append((run.train(batch, AFTER), program.state_dict()))
        return outcomes

    return run_ranks(body, program.plan.gpus)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Outcome]]:
    """By plan: where it saved, and how it went on."""

    @functools.cache
    def of(name: str) -> tuple[Path, Outcome]:
        root = tmp_path_factory.mktemp(name)
        return root, undisturbed(name, root)

    return of


@pytest.mark.parametrize(
    ("after", "befores"),
    [
        ("one", ["dp2-pp2-zero1"]),
        *(pytest.param(name, [n for n in PLANS if n != name], marks=pytest.mark.wide) for name in PLANS),
    ],
)
def test_the_next_steps_are_the_same_under_any_other_plan(saved: Any, after: str, befores: list[str]) -> None:
    outcomes = resumed(after, [saved(before)[0] for before in befores])
    for before, (losses, weights) in zip(befores, outcomes, strict=True):
        expected_losses, expected_weights = saved(before)[1]
        assert losses == pytest.approx(expected_losses, rel=1e-10), before
        for name, weight in expected_weights.items():
            bound = 1e-10 * (weight.norm().item() + LEARNING_RATE * weight.numel() ** 0.5)
            assert (weights[name] - weight).norm().item() <= bound, (before, name)


class Dropped(nn.Module):
    """Dropout, and a buffer that counts forwards where the batch is not split."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen.add_(1)
        return F.dropout(self.linear(x), 0.5, self.training).square().mean()


@pytest.mark.parametrize("data", [1, 2])
def test_random_numbers_and_buffers_go_on_from_where_they_were(tmp_path: Path, data: int) -> None:
    batch = {"x": torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))}
    program = program_of(capture(Dropped(counts=data == 1).train(), batch), data=data, micro_batch_size=4 // data)

    def body(rank: int, world: int) -> list[list[float]]:
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        checkpoints = Checkpoints(tmp_path, program, optimizer)

        def go_on() -> list[float]:
            numbers = []
            for _ in range(3):
                optimizer.zero_grad()
                numbers.append(program.step(batch))
                optimizer.step()
            return [*numbers, random.random(), torch.rand(()).item()]

        go_on()
        checkpoints.save(3)
        first = go_on()
        assert checkpoints.resume() is not None
        assert program.state_dict()["seen"] == (3 if data == 1 else 0)
        return [first, go_on()]

    for first, again in run_ranks(body, data) if data > 1 else [body(0, 1)]:
        assert first == again


# ------------------------------------------------------------------------------------------------------ files, and harm


def mlp_run(root: Path, **options: Any) -> tuple[Program, Checkpoints]:
    """A small program in this process whose weights tell the step: all are the step's number."""
    model, batch = models.mlp()
    program = program_of(capture(model, batch), micro_batch_size=8)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9)
    return program, Checkpoints(root, program, optimizer, **options)


@torch.no_grad()
def save_step(program: Program, checkpoints: Checkpoints, step: int) -> Path:
    for parameter in program.parameters():
        parameter.fill_(step)
    directory = checkpoints.save(step)
    for parameter in program.parameters():
        parameter.fill_(-1)  # what is saved is what was there when it was
    return directory


def step_in(program: Program) -> set[float]:
    return {value for tensor in program.state_dict().values() for value in tensor.unique().tolist()}


def test_the_latest_are_kept_and_each_holds_what_was_there_when_it_was_saved(tmp_path: Path) -> None:
    program, checkpoints = mlp_run(tmp_path / "run", keep=2)
    assert checkpoints.resume() is None
    for step in (1, 2, 3):
        save_step(program, checkpoints, step)
    checkpoints.wait()
    assert [step for step, _ in checkpoints_in(tmp_path / "run")] == [3, 2]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00000002", "step-00000003"]
    resumed = checkpoints.resume()
    assert resumed is not None and resumed.step == 3 and step_in(program) == {3.0}
    checkpoints.load(tmp_path / "run" / "step-00000002")
    assert step_in(program) == {2.0}
    program.load(tmp_path / "run" / "step-00000003")  # the weights alone
    assert step_in(program) == {3.0}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("__0_0.distcp", cut),
        ("__0_0.distcp", flip),
        (".metadata", Path.unlink),
        ("training.pt", flip),
        ("checkpoint.json", cut),
        ("checkpoint.json", flip),
    ],
)
def test_a_harmed_file_is_named_and_the_checkpoint_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, harm: Callable[[Path], None]
) -> None:
    program, checkpoints = mlp_run(tmp_path)
    save_step(program, checkpoints, 1)
    latest = save_step(program, checkpoints, 2)
    checkpoints.wait()
    harm(latest / name)
    with pytest.raises(CheckpointError) as refused:
        checkpoints.load(latest)
    assert str(latest / name) in refused.value.what
    with caplog.at_level(logging.WARNING):
        resumed = checkpoints.resume()
    assert resumed is not None and resumed.step == 1 and step_in(program) == {1.0}
    assert str(latest / name) in caplog.text
    harm(resumed.directory / name)
    with pytest.raises(CheckpointError, match="none of 2 checkpoints can be read"):
        checkpoints.resume()


def test_what_a_dead_writer_left_is_passed_over_and_cleared_away(tmp_path: Path) -> None:
    program, checkpoints = mlp_run(tmp_path)
    save_step(program, checkpoints, 1)
    checkpoints.wait()
    (tmp_path / "step-00000002.part").mkdir()
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.old")  # died between two renames
    resumed = checkpoints.resume()
    assert resumed is not None and resumed.step == 1
    save_step(program, checkpoints, 3)
    checkpoints.wait()
    assert not (tmp_path / "step-00000002.part").exists()


def test_a_checkpoint_that_cannot_be_written_is_said_at_the_next_and_training_goes_on(tmp_path: Path) -> None:
    _, checkpoints = mlp_run(tmp_path / "file" / "run")
    (tmp_path / "file").write_text("no directory")
    checkpoints.save(1)
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write the checkpoint: .*file"):
        checkpoints.save(2)
    (tmp_path / "file").unlink()
    checkpoints.save(3)
    checkpoints.wait()
    assert [step for step, _ in checkpoints_in(tmp_path / "file" / "run")] == [3]


def test_what_does_not_belong_to_the_run_is_refused(tmp_path: Path) -> None:
    program, checkpoints = mlp_run(tmp_path)
    checkpoints.save(1)
    checkpoints.wait()
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(CheckpointError, match="not this program's, the first of shape"):
        Checkpoints(tmp_path, program, foreign).save(2)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(CheckpointError, match="the checkpoint has no scheduler"):
        Checkpoints(tmp_path, program, optimizer, scheduler=scheduler).resume()
    other, batch = models.nano_gpt(layers=2)
    with pytest.raises(CheckpointError, match=r"does not have: layers\.0\.weight"):
        Checkpoints(tmp_path, program_of(capture(other, batch), micro_batch_size=8)).resume()


@pytest.mark.wide
def test_killed_in_mid_save_the_last_good_one_loads(tmp_path: Path) -> None:
    """20 runs of two ranks that save all the time, each killed at a moment of its own and followed by the next."""
    model, batch = models.mlp()
    captured = capture(model, batch)
    twice = program_of(captured, data=2, micro_batch_size=4, zero_stage=1)

    def save_for_ever(rank: int, world: int) -> None:
        optimizer = torch.optim.SGD(twice.parameters(), lr=0.1, momentum=0.9)
        checkpoints = Checkpoints(tmp_path, twice, optimizer)
        found = checkpoints.resume()
        for step in itertools.count(found.step + 1 if found else 1):
            save_step(twice, checkpoints, step)

    moments = random.Random(0)
    program, checkpoints = mlp_run(tmp_path)
    steps = [0]
    for _ in range(20):
        launcher = os.fork()
        if launcher == 0:
            run_ranks(save_for_ever, 2)
            os._exit(0)
        before = steps[-1]
        until = time.monotonic() + 60.0
        while not any(step > before for step, _ in checkpoints_in(tmp_path)) and time.monotonic() < until:
            time.sleep(0.02)  # until this run has saved something, then at any moment of a save or two
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(launcher, signal.SIGKILL)  # its ranks die with it
        os.waitpid(launcher, 0)
        resumed = checkpoints.resume()
        assert resumed is not None and resumed.step > before
        assert step_in(program) == {float(resumed.step)}
        steps.append(resumed.step)
