"""Random numbers that a forward draws past torch, from Python's ``random`` or from NumPy.

A trace would keep the one draw that it saw as a number in the program. Whether anything was drawn is told by the
generators' states; where, by tracing again and looking at every call of a generator.
"""

from __future__ import annotations

import contextlib
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from autoplan.capture.errors import describe, forward_line, in_forward, user_frame
from autoplan.errors import CaptureError

_PYTHONS = getattr(random.random, "__self__", None)


@contextlib.contextmanager
def noticed(drawn: list[bool]) -> Iterator[None]:
    """Around a forward: ``drawn`` gets an entry if it draws."""
    before = _states()
    yield
    if _states() != before:
        drawn.append(True)


def _states() -> tuple[Any, ...]:
    """Of Python's generator, and of NumPy's where NumPy is there; equal as long as nobody draws."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *place = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), *place


def refusal(model: nn.Module, trace: Callable[[], Any]) -> CaptureError:
    """The error of a model that draws; ``trace`` traces it again."""
    return CaptureError(
        "forward draws from Python's or NumPy's random numbers: the traced program would repeat one draw for ever",
        where=_first_draw(trace) or forward_line(model),
        legal="torch's own random operators (torch.rand, torch.randperm, dropout), or none",
        attempt="draw with torch.rand(()) and choose with torch.where, or draw outside and pass the value as an input",
    )


def _first_draw(trace: Callable[[], Any]) -> str:
    found: list[str] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        # NumPy's calls are not shown to a profiler: the forward's first line stands for theirs
        if event == "c_call" and not found and getattr(called, "__self__", None) is _PYTHONS:
            place = user_frame(in_forward(traceback.extract_stack(frame)))
            if place is not None:
                found.append(describe(place))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with contextlib.suppress(Exception):
            trace()
    finally:
        sys.setprofile(before)
    return next(iter(found), "")
