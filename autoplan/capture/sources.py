"""Clocks and the system's entropy, as a forward asks for them: what a trace would keep as the one number that it saw.

While a forward is under trace, the functions of Python that give them are watched: those of ``time``, and
``os.urandom``, on which ``uuid``, ``secrets`` and NumPy's unseeded generators rest. A clock may be read to log how long
something took; whether a number of the program depends on it is told elsewhere (:mod:`.second_call`).
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from autoplan.capture.errors import current_line, frame_behind, is_model_file, is_users_file

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
# What reads a clock or entropy and cannot be watched: where a user's code has such a name, the forward is called twice.
UNWATCHED = frozenset({"now", "utcnow", "today", "Random", "getpid", "environ", "getenv", "getrandom", "open", "ctime"})


class Sources:
    """What a forward asked for, as (what, line), while :attr:`counting`."""

    def __init__(self) -> None:
        self.counting = False
        self.clocks: list[tuple[str, str]] = []
        self.entropy: list[tuple[str, str]] = []
        self.of_clock: Callable[[float | int], Any] = lambda value: value

    @contextlib.contextmanager
    def watched(self, named: list[tuple[dict[str, Any], str]]) -> Iterator[None]:
        """Watch while inside. ``named``: globals by their module's dictionary, which may be such functions too."""
        instead: dict[Any, Any] = {os.urandom: self._entropy(os.urandom)}
        for name in (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS)):
            instead[getattr(time, name)] = self._clock(name, getattr(time, name))
        own = [(vars(time), name) for name in list(vars(time))]
        places = [*own, (vars(os), "urandom"), (vars(random), "_urandom"), *named]
        saved = [(known, name, known[name]) for known, name in places if _is_in(known.get(name), instead)]
        try:
            for known, name, value in saved:
                known[name] = instead[value]
            yield
        finally:
            for known, name, value in saved:
                known[name] = value

    def _clock(self, name: str, original: Callable[[], Any]) -> Callable[[], Any]:
        def clock() -> Any:
            value = original()
            if self.counting and is_model_file(sys._getframe(1).f_code.co_filename):
                self.clocks.append((f"time.{name}", current_line()))
                return self.of_clock(value)
            return value

        return clock

    def _entropy(self, original: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def urandom(size: int) -> bytes:
            if self.counting and _asked_by_model(sys._getframe(1)):
                self.entropy.append(("os.urandom", current_line()))
            return original(size)

        return urandom


def _is_in(value: Any, instead: dict[Any, Any]) -> bool:
    return (
        callable(value) and getattr(value, "__hash__", None) is not None and type(value) in _KINDS and value in instead
    )


_KINDS = (type(time.time), type(lambda: None))


def _asked_by_model(frame: FrameType | None) -> bool:
    """Whether the first frame that is not of Python or NumPy is the model's."""
    frame = frame_behind(frame, _is_pythons_or_numpys)
    return frame is not None and is_model_file(frame.f_code.co_filename) and not _has_numpy(frame.f_code.co_filename)


def _is_pythons_or_numpys(name: str) -> bool:
    if is_model_file(name):
        return _has_numpy(name) and not is_users_file(name)
    return f"{os.sep}torch{os.sep}" not in name


def _has_numpy(name: str) -> bool:
    return f"{os.sep}numpy{os.sep}" in name
