"""Containers of Python's that are neither dictionaries, lists nor sets: how each is read, and put back."""

from __future__ import annotations

import array
import contextvars
import queue
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

Read: TypeAlias = Callable[[], Any]
Write: TypeAlias = Callable[[Any], None] | None


def of_container(value: Any) -> tuple[Read, Write] | None:
    """How what ``value`` holds is copied, and how such a copy is put back (None where that cannot be done); None for
    what is no such container."""
    if isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return lambda: dict(value.items()), _refill(value)
    if isinstance(value, weakref.WeakSet):
        return lambda: set(value), _refill(value)
    if isinstance(value, weakref.ref):
        return lambda: [value()], None
    if isinstance(value, contextvars.ContextVar):
        return lambda: [value.get(None)], lambda content: _set(value, content[0])
    if isinstance(value, types.MappingProxyType):
        return lambda: dict(value), None
    if isinstance(value, bytearray):
        return lambda: bytes(value), _overwrite(value)
    if isinstance(value, array.array):
        return value.__copy__, _overwrite(value)
    if isinstance(value, queue.SimpleQueue):
        return value.qsize, None
    return None


def _refill(value: Any) -> Callable[[Any], None]:
    def write(content: Any) -> None:
        value.clear()
        value.update(content)

    return write


def _overwrite(value: Any) -> Callable[[Any], None]:
    def write(content: Any) -> None:
        value[:] = content

    return write


def _set(variable: contextvars.ContextVar[Any], content: Any) -> None:
    if content is not None:
        variable.set(content)
