"""At which line of the user's something happens first, told by tracing the forward again, line by line."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from autoplan.capture.errors import describe, is_users_file, user_frame

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
