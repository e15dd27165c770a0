"""Where this rank is: for the messages of those who watch it, and for a thread of its own that notices when it hangs.

A rank that hangs says nothing, and the others only that they waited in vain. So each marks what it does: in memory, and
in a file of 64 bytes that the launching process reads when the rank was killed or stopped. A watching thread looks at
what has gone on for most of the group's timeout: where Python's frames say that the rank waits for others, it leaves
the word to them; where it computes, reads or sleeps, it is the one that hangs, and says so before the others give up.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch.fx import GraphModule

from autoplan.errors import AutoplanError
from autoplan.runtime.faults import RankFault, frames_of, hang_fault

DIRECTORY_VARIABLE = "AUTOPLAN_PROGRESS"  # where the launching process wants the ranks' files
LAUNCHER_VARIABLE = "AUTOPLAN_LAUNCHER"  # the process of `autoplan run`, which reads faults from files there
FAULT_SUFFIX = ".fault"
ACTIONS = ("", "forward", "backward", "weight gradients", "send", "gradient synchronisation", "checkpoint")
PATIENCE = 0.8  # of the group's timeout: a rank that hangs speaks before those who wait for it
_FORM = struct.Struct("<qqqq")  # action, step, stage, micro-batch; -1 for none
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


def place(rank: int, step: int, stage: int | None, micro_batch: int | None, action: str) -> str:
    """In words, for messages."""
    words = [f"rank {rank}", f"step {step}"]
    words += [f"stage {stage}"] if stage is not None else []
    words += [f"micro-batch {micro_batch}"] if micro_batch is not None else []
    return ", ".join(words) + (f", {action}" if action else "")


class Activity:
    """What one thread of a rank does: ``action`` "" is nothing that is watched. ``graph``: what runs in it."""

    def __init__(self) -> None:
        self.step, self.action, self.count = 0, "", 0
        self.stage: int | None = None
        self.micro_batch: int | None = None
        self.graph: GraphModule | None = None
        self.thread = 0
        self.memory: mmap.mmap | bytearray = bytearray(2 * _FORM.size)
        self.place = 0  # in the memory

    def mark(
        self,
        action: str,
        *,
        step: int | None = None,
        stage: int | None = None,
        micro_batch: int | None = None,
        graph: GraphModule | None = None,
    ) -> None:
        """From now on this is what the calling thread does."""
        self.step = self.step if step is None else step
        self.action, self.stage, self.micro_batch, self.graph = action, stage, micro_batch, graph
        self.count += 1
        self.thread = threading.get_ident()
        numbers = (self.step, -1 if stage is None else stage, -1 if micro_batch is None else micro_batch)
        _FORM.pack_into(self.memory, self.place, ACTIONS.index(action), *numbers)

    @contextmanager
    def during(self, action: str, *, step: int | None = None) -> Iterator[None]:
        """Mark an action, and its end."""
        self.mark(action, step=step)
        try:
            yield
        finally:
            self.mark("")


def last_place(directory: Path, rank: int) -> str:
    """Where ``rank`` was, from its file; "" where it had not begun a step."""
    try:
        content = (directory / str(rank)).read_bytes()
        main, writer = _FORM.unpack_from(content), _FORM.unpack_from(content, _FORM.size)
    except (OSError, struct.error):
        return ""
    words = [_in_words(rank, *numbers) for numbers in (main, writer) if numbers[0]]
    if words:
        return " and ".join(words)
    return f"after step {main[1]}" if main[1] >= 0 else ""


def _in_words(rank: int, action: int, step: int, stage: int, micro_batch: int) -> str:
    word = ACTIONS[action] if 0 <= action < len(ACTIONS) else ""
    return place(rank, step, stage if stage >= 0 else None, micro_batch if micro_batch >= 0 else None, word)


def tell(fault: AutoplanError, rank: int) -> None:
    """Leave a fault for `autoplan run`, which shows the one that came first; on stderr where that did not start us."""
    if LAUNCHER_VARIABLE not in os.environ:
        sys.stderr.write(f"{fault}\n")
        sys.stderr.flush()
        return
    path = Path(os.environ[DIRECTORY_VARIABLE]) / f"{rank}{FAULT_SUFFIX}"
    try:
        beside = path.with_suffix(".part")
        beside.write_bytes(pickle.dumps(fault))
        os.replace(beside, path)
    except OSError:  # it is gone already
        sys.stderr.write(f"{fault}\n")


def _exit_saying(fault: RankFault) -> None:
    tell(fault, fault.rank or 0)
    os._exit(3)


class Watch:
    """This process's activities, and the thread that watches them. ``report``: what a hang is told to; it ends the
    process."""

    def __init__(self) -> None:
        self.main, self.writer = Activity(), Activity()
        self.report: Callable[[RankFault], None] = _exit_saying
        self._process = 0

    def start(self, rank: int, timeout_s: float) -> None:
        """Publish and watch; once a process, however many programs it has."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self.main, self.writer = Activity(), Activity()
        directory = os.environ.get(DIRECTORY_VARIABLE)
        if directory and Path(directory).is_dir():
            path = Path(directory) / str(rank)
            path.write_bytes(_FORM.pack(0, -1, -1, -1) * 2)
            with path.open("r+b") as file:
                self.main.memory = self.writer.memory = mmap.mmap(file.fileno(), 2 * _FORM.size)
            self.writer.place = _FORM.size
        threading.Thread(
            target=self._watch, args=(rank, timeout_s * PATIENCE), name="autoplan-watch", daemon=True
        ).start()

    def _watch(self, rank: int, patience_s: float) -> None:
        since = {id(activity): (0, time.monotonic()) for activity in (self.main, self.writer)}
        while True:
            time.sleep(min(1.0, patience_s / 10))
            for activity in (self.main, self.writer):
                count, start = since[id(activity)]
                if activity.count != count:
                    since[id(activity)] = (activity.count, time.monotonic())
                elif activity.action and time.monotonic() - start > patience_s:
                    frame = sys._current_frames().get(activity.thread)
                    if frame is not None and not waits(frame) and activity.count == count:
                        self.report(_hang(rank, activity, frame, time.monotonic() - start))


WATCH = Watch()


def waits(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is waits for other ranks: in torch's collectives, or for a send, a
    receive or a sum that our runtime has started."""
    innermost = frame
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_TORCH):
        if at.f_code.co_filename.endswith("distributed_c10d.py"):
            return True
        at = at.f_back
    return at is innermost and at.f_code.co_filename.startswith(_HERE)


def _hang(rank: int, activity: Activity, frame: FrameType, seconds: float) -> RankFault:
    where = place(rank, activity.step, activity.stage, activity.micro_batch, activity.action)
    return hang_fault(
        f"{where}{{operator}}: no progress for {seconds:.0f} s",
        frames=frames_of(frame),
        rank=rank,
        step=activity.step,
        stage=activity.stage,
        micro_batch=activity.micro_batch,
        action=activity.action,
        graph_module=activity.graph,
    )
