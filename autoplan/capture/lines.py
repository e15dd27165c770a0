"""The user's lines: of every operator that is traced, and the one at which something happens first, told by tracing the
forward again, line by line."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

from torch.fx.proxy import TracerBase

from autoplan.capture.errors import describe, in_forward, is_users_file, user_frame


@contextlib.contextmanager
def of_operators() -> Iterator[None]:
    """While inside, what is traced knows the lines of all functions of the user's that led to it. Of libraries it knows
    those of functions named forward, as torch has it: their helpers stand far from the model."""
    of_torch = TracerBase._filter_traceback_frames

    def kept(self: TracerBase, stack: traceback.StackSummary) -> traceback.StackSummary:
        known = {id(frame) for frame in of_torch(self, stack)}
        users = {id(frame) for frame in in_forward(list(stack)) if is_users_file(frame.filename)}
        return traceback.StackSummary.from_list([frame for frame in stack if id(frame) in known | users])

    with mock.patch.object(TracerBase, "_filter_traceback_frames", kept):
        yield


_Local = Callable[[FrameType, str, Any], Any]


class LineOf:
    """A tracer for ``sys.settrace``: ``found`` is the line after which ``happened()`` is true for the first time."""

    def __init__(self, happened: Callable[[], bool]) -> None:
        self.found = ""
        self._happened = happened
        self._last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> _Local | None:
        if self.found or not is_users_file(frame.f_code.co_filename):
            return None
        if event == "call":
            return self
        if self._last and self._happened():
            self.found = self._last
            return None
        # After a call has returned, the line that made it goes on.
        running = frame.f_back if event == "return" else frame
        place = user_frame(traceback.extract_stack(running, limit=30)) if running is not None else None
        self._last = describe(place) if place is not None else ""
        return self


def first_line(happened: Callable[[], bool], trace: Callable[[], Any]) -> str:
    """The line at which ``trace()``, which traces the forward, makes ``happened()`` true; "" where none does."""
    tracer, before = LineOf(happened), sys.gettrace()
    sys.settrace(tracer)
    try:
        with contextlib.suppress(Exception):
            trace()
    finally:
        sys.settrace(before)
    return tracer.found
