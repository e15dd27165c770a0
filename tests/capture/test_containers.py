"""State in Python's less common containers is seen as state in any other is, and put back where that can be done."""

from __future__ import annotations

import array
import collections
import contextvars
import queue
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.errors import CaptureError
from tests.support.captures import line_of


class Key:
    """Something that weak references may be to."""


class Mixed(Key):
    """Attributes in slots and in a dictionary."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0
        self.other = 0


KEY = Key()


def _weak() -> weakref.WeakKeyDictionary[Key, int]:
    return weakref.WeakKeyDictionary({KEY: 0})


def _named() -> weakref.WeakValueDictionary[str, Key]:
    return weakref.WeakValueDictionary({"a": KEY})


def _local() -> threading.local:
    found = threading.local()
    found.calls = 0
    return found


def _queue() -> queue.Queue[int]:
    found: queue.Queue[int] = queue.Queue()
    found.put(0)
    return found


class Counts(nn.Module):
    def __init__(self, held: Any, step: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held, self.step = held, [step]

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.step[0](self.held)).sum()


def in_a_weak_dictionary(held: Any) -> float:
    held[KEY] = held[KEY] + 1  # weak keys
    return held[KEY]


def in_weak_values(held: Any) -> float:
    held["b"] = KEY  # weak values
    held["c" * len(held)] = KEY
    return len(held)


def in_a_weak_set(held: Any) -> float:
    OTHERS.append(Key())  # a weak set
    held.add(OTHERS[-1])
    return len(held)


def in_a_local(held: Any) -> float:
    held.calls += 1  # a local of the thread
    return held.calls


def in_a_variable(held: Any) -> float:
    held.set(held.get(0) + 1)  # a context variable
    return held.get()


def in_a_chain(held: Any) -> float:
    held["calls"] = held["calls"] + 1  # a chain
    return held["calls"]


def in_a_queue(held: Any) -> float:
    held.put(held.qsize())  # a queue
    return held.qsize()


def in_bytes(held: Any) -> float:
    held[0] += 1  # bytes
    return held[0]


def in_slots_beside_a_dictionary(held: Any) -> float:
    held.calls += 1  # slots
    return held.calls


OTHERS: list[Key] = []


@pytest.mark.parametrize(
    ("held", "step", "line"),
    [
        (_weak(), in_a_weak_dictionary, "weak keys"),
        (_named(), in_weak_values, "weak values"),
        (weakref.WeakSet([KEY]), in_a_weak_set, "a weak set"),
        (_local(), in_a_local, "a local of the thread"),
        (contextvars.ContextVar("calls", default=0), in_a_variable, "a context variable"),
        (collections.ChainMap({"calls": 0}), in_a_chain, "a chain"),
        (_queue(), in_a_queue, "a queue"),
        (bytearray(2), in_bytes, "bytes"),
        (array.array("d", [0.0]), in_bytes, "bytes"),
        (Mixed(), in_slots_beside_a_dictionary, "slots"),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else None,
)
def test_what_the_next_call_reads_is_refused(held: Any, step: Callable[[Any], float], line: str) -> None:
    with pytest.raises(CaptureError, match="the next call computes something else") as refused:
        capture(Counts(held, step), torch.randn(2, 4))
    assert refused.value.where.startswith(line_of(__file__, line))


def test_a_view_of_a_dictionary_shows_what_changed_in_it() -> None:
    under = {"calls": 0}

    def count(held: Any) -> float:
        under["calls"] += 1
        return held["calls"]

    with pytest.raises(CaptureError, match="the next call computes something else"):
        capture(Counts(types.MappingProxyType(under), count), torch.randn(2, 4))


def test_all_is_as_before() -> None:
    held, named = _local(), bytearray(b"ab")
    for value, step in ((held, in_a_local), (named, in_bytes)):
        with pytest.raises(CaptureError):
            capture(Counts(value, step), torch.randn(2, 4))
    assert held.calls == 0 and named == b"ab"
