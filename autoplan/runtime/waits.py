"""How long this rank stands still for others, by what it waits for; asked for by :class:`autoplan.Metrics`.

What waits enters :meth:`Waits.during` around it, which does nothing until somebody listens. On a CPU the process waits,
and its clock is read. On CUDA the process goes on and its stream waits, so events are recorded on the stream before and
after, and read once the step is done. A wait for the other end of a pipeline holds the bubble too: nothing tells a
message that is late from one whose sender had to wait itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

REASONS = ("pipeline", "data", "tensor", "context", "expert", "loss")  # axes, and the sum of the loss over all ranks

_NOTHING: AbstractContextManager[None] = nullcontext()


class Waits:
    """Seconds by :data:`REASONS` since they were last taken."""

    def __init__(self) -> None:
        self._listening = False
        self._seconds = dict.fromkeys(REASONS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Count from now, from nothing."""
        self.take()
        self._listening = True

    def stop(self) -> None:
        self._listening = False

    def during(self, reason: str) -> AbstractContextManager[None]:
        """Around a wait."""
        return self._timed(reason) if self._listening else _NOTHING

    def take(self) -> dict[str, float]:
        """What was waited since the last time, all of it over; counting begins anew."""
        for reason, start, end in self._events:
            end.synchronize()
            self._seconds[reason] += start.elapsed_time(end) / 1e3
        taken, self._seconds, self._events = self._seconds, dict.fromkeys(REASONS, 0.0), []
        return taken

    @contextmanager
    def _timed(self, reason: str) -> Iterator[None]:
        if torch.cuda.is_initialized():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((reason, start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds[reason] += time.perf_counter() - started


WAITS = Waits()
