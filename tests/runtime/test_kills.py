"""A rank that raises, is killed, is stopped or hangs, wherever it is: all are gone, one message says who and where."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.errors import RuntimeFault
from autoplan.runtime import Checkpoints, Program, RankFault
from autoplan.runtime.interpreter import RankInterpreter
from tests.support.processes import run_ranks
from tests.support.training import program_of

PATIENCE_S = 30.0  # the promise: all ranks gone within this time
HANG_S = 12.0  # how long ranks wait for each other where one hangs

COUNTS = {"forward": 0, "backward": 0}
HARM: dict[str, Callable[[], None]] = {}  # what a rank does to itself, by where


def touched(where: str) -> None:
    """Called twice a step; the harm is done in the second step's second micro-batch."""
    COUNTS[where] += 1
    if COUNTS[where] == 4 and where in HARM:
        HARM[where]()


@torch.library.custom_op("kills::touch", mutates_args=())
def touch(x: Tensor) -> Tensor:
    touched("forward")
    return x.clone()


@touch.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def touch_backward(_: object, gradient: Tensor) -> Tensor:
    touched("backward")
    return gradient


touch.register_autograd(touch_backward)


class Touched(nn.Module):
    """Its second half, and with it the touch, is the second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.kills.touch(self.second(torch.tanh(self.first(x)))).square().mean()


def do_raise() -> None:
    raise ValueError("boom")


def do_kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def do_stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def do_hang() -> None:
    time.sleep(600)


HARMS = {"raise": do_raise, "kill": do_kill, "stop": do_stop, "hang": do_hang}
# what rank 1 is at, and what it says
PLACES = {
    "forward": "rank 1, step 1, stage 1, micro-batch 1, forward",
    "backward": "rank 1, step 1, stage 1, micro-batch 1, backward",
    "send": "rank 0, step 1, stage 0, micro-batch 1, forward",
    "checkpoint": "rank 1, step 1, checkpoint",
}


BATCH = {"x": torch.ones(4, 4)}


@functools.cache
def two_stages() -> Program:
    return program_of(capture(Touched(), BATCH), cuts=(2,), pipeline=2, micro_batch_size=2, micro_batches=2)


def train(root: Path, where: str, harm: str) -> None:
    program, rank = two_stages(), dist.get_rank()
    (root / f"pid{rank}").write_text(str(os.getpid()))
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    checkpoints = Checkpoints(root / "run", program, optimizer)
    if where in COUNTS:
        HARM[where] = HARMS[harm]  # the graph that is touched is rank 1's
    elif where == "send" and rank == 0:
        send, calls = RankInterpreter._send, []

        def harmed(self: RankInterpreter, *arguments: object) -> None:
            calls.append(1)
            if len(calls) == 4:
                HARMS[harm]()
            send(self, *arguments)  # type: ignore[arg-type]

        RankInterpreter._send = harmed  # type: ignore[assignment]
    for step in range(3):
        optimizer.zero_grad()
        program.step(BATCH)
        optimizer.step()
        if where == "checkpoint" and rank == 1 and step == 1:
            checkpoints.wait()
            checkpoints._measure = lambda directory: HARMS[harm]()  # type: ignore[method-assign]
        checkpoints.save(step)
    checkpoints.wait()


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


CASES = [(where, harm) for where in PLACES for harm in HARMS]
DEFAULT = [("forward", "kill"), ("checkpoint", "raise")]


@pytest.mark.parametrize(
    ("where", "harm"), [*DEFAULT, *(pytest.param(*c, marks=pytest.mark.wide) for c in CASES if c not in DEFAULT)]
)
def test_one_rank_fails_and_all_are_gone_with_one_message(tmp_path: Path, where: str, harm: str) -> None:
    two_stages()  # ranks are forked with it
    timeout_s = HANG_S if harm == "hang" else 50.0
    started = time.monotonic()
    with pytest.raises(RuntimeFault) as caught:
        run_ranks(lambda rank, world: train(tmp_path, where, harm), 2, timeout_s=timeout_s)
    seconds = time.monotonic() - started
    fault = caught.value
    text = str(fault)
    assert isinstance(fault, RankFault)
    assert fault.rank == (0 if where == "send" else 1)
    assert PLACES[where] in text
    if where == "forward" and harm in ("raise", "hang"):
        assert "operator `touch`" in text
        assert "torch.ops.kills.touch(" in fault.where
    says = {"raise": "boom", "kill": "was killed by SIGKILL", "stop": "is stopped", "hang": "no progress for"}
    assert says[harm] in text
    assert not any(alive(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))
    assert seconds < PATIENCE_S
    if where == "checkpoint":  # what was saved before is what is left
        assert [path.name for path in (tmp_path / "run").glob("step-????????")] == ["step-00000000"]
