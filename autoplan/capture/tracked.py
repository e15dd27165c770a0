"""Numbers that tell whether a computation depends on them: what is made of them is tracked too, a comparison of one is
noted by its line and may be answered the other way, and an operator that gets one has read it.

    self.calls += 1
    if self.calls % 100 == 0:      the comparison, answered the other way, shows whether the program would differ
        print(self.calls)          it would not: nothing is read
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from autoplan.capture.errors import current_line, is_model_file


@dataclass(slots=True)
class Reads:
    """``compared``: lines that compare a tracked number; ``given``: the first that hands one to an operator.
    ``otherwise``: the line whose first comparison is answered the other way."""

    otherwise: str = ""
    compared: dict[str, None] = field(default_factory=dict)
    given: str = ""


_READS: ContextVar[Reads | None] = ContextVar("autoplan_reads", default=None)


@contextmanager
def reading(reads: Reads) -> Iterator[None]:
    token = _READS.set(reads)
    try:
        yield
    finally:
        _READS.reset(token)


def is_reading() -> bool:
    return _READS.get() is not None


def note_operands(values: Iterable[Any]) -> None:
    """An operator gets ``values``."""
    reads = _READS.get()
    if reads is not None and not reads.given and any(map(_holds_tracked, values)):
        reads.given = current_line()


def _holds_tracked(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tracked, value))
    if isinstance(value, dict):
        return any(map(_holds_tracked, value.values()))
    return isinstance(value, (TrackedInt, TrackedFloat))


def tracked(value: Any) -> Any:
    """A number as a tracked one; numbers in lists and dictionaries too; all else as it is."""
    if type(value) is int:
        return TrackedInt(value)
    if type(value) is float:
        return TrackedFloat(value)
    if type(value) in (list, tuple):
        return type(value)(map(tracked, value))
    if type(value) is dict:
        return {key: tracked(item) for key, item in value.items()}
    return value


class TrackedInt(int):
    __hash__ = int.__hash__


class TrackedFloat(float):
    __hash__ = float.__hash__


def _calculates(name: str, base: type) -> Callable[..., Any]:
    plain = getattr(base, name)

    def calculate(self: Any, *others: Any) -> Any:
        return tracked(plain(self, *others))

    return calculate


def _compares(name: str, base: type) -> Callable[..., Any]:
    plain = getattr(base, name)

    def compare(self: Any, *others: Any) -> Any:
        answer = plain(self, *others)
        reads = _READS.get()
        if reads is None or answer is NotImplemented:
            return answer
        line = _line()
        if line in reads.compared or not line:
            return answer
        reads.compared[line] = None
        return not answer if line == reads.otherwise else answer

    return compare


def _line() -> str:
    """Where the model's code is, cheaply: file and number."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if is_model_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_BOTH = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
_OF_INTS = ("and", "or", "xor", "lshift", "rshift")
for _cls, _base, _names in ((TrackedInt, int, (*_BOTH, *_OF_INTS)), (TrackedFloat, float, _BOTH)):
    for _name in (*_names, *(f"r{name}" for name in _names), "neg", "pos", "abs", "round", "floor", "ceil", "trunc"):
        setattr(_cls, f"__{_name}__", _calculates(f"__{_name}__", _base))
    for _name in ("eq", "ne", "lt", "le", "gt", "ge", "bool"):
        setattr(_cls, f"__{_name}__", _compares(f"__{_name}__", _base))
