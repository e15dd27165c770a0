"""How far a long answer is, for whoever listens: the command line draws it as a bar.

What works calls :func:`at`; a listener is there only inside :func:`heard_by`, and elsewhere nothing is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[float | None, str], None]

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


def at(share: float | None, what: str) -> None:
    """``share`` (0 to 1, None where nobody knows) of the work is done, and ``what`` comes next."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(share, what)


@contextlib.contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """``listener`` hears of all work in the body."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
