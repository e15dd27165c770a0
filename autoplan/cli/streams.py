"""Standard streams that the shell closed (``>&-``): in their places stand some that say so when they are used.

Without them Python has ``None`` for a stream, which most code does not expect, and the next file that is opened gets
the number 0, 1 or 2: what is printed would land in it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

_CLOSED = "standard {} is closed"


class Closed(io.TextIOBase):
    """A text stream that is closed: each use is an ``OSError`` that says which it is."""

    encoding = "utf-8"
    errors = "strict"
    newlines = None

    def __init__(self, what: str, number: int) -> None:
        self._what, self._number = what, number

    def fileno(self) -> int:
        return self._number

    def readable(self) -> bool:
        return self._number == 0

    def writable(self) -> bool:
        return self._number > 0

    def read(self, size: int | None = -1, /) -> str:
        self._refuse()

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        self._refuse()

    def write(self, text: str, /) -> int:
        if not text:
            return 0
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OSError(errno.EBADF, _CLOSED.format(self._what))


def open_closed_streams() -> None:
    """Give each standard stream that is closed a number of its own and a stream that says so.

    What this process starts finds the null device there. Messages are lost, as is asked for by ``2>&-``; a result that
    cannot be printed is an error.
    """
    for number, name, what in ((0, "stdin", "input"), (1, "stdout", "output"), (2, "stderr", "error")):
        if getattr(sys, name) is not None:
            continue
        _occupy(number)
        stream: Any = Closed(what, number) if number < 2 else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _occupy(number: int) -> None:
    try:
        os.fstat(number)  # taken meanwhile by a file of somebody's: it stays
    except OSError:
        null = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
        if null != number:
            os.dup2(null, number, inheritable=True)
            os.close(null)
        with contextlib.suppress(OSError):
            os.set_inheritable(number, True)


@contextlib.contextmanager
def that_may_fail() -> Iterator[None]:
    """A message that cannot be printed is lost, and changes no exit code; a reader that has gone is no such thing."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # what is left in the stream would fail once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def reason(error: OSError) -> str:
    """Why nothing more could be read from or printed to a standard stream."""
    said = error.strerror or type(error).__name__
    return said if said.startswith(_CLOSED.split("{", maxsplit=1)[0]) else f"standard output: {said}"
