"""State that a forward changes and reads again is refused wherever it is kept, at the line that changes it; state that
no number depends on is left out and said. Afterwards it is as before."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture, capture_folded
from autoplan.errors import CaptureError
from tests.support.captures import line_of

CALLS = 0
TABLE = {"by name": {"calls": 0}}


class Stateful(nn.Module):
    """Calls ``step``, which changes state somewhere and returns a number made of it."""

    made = 0

    def __init__(self, step: Callable[[Stateful], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.step = [step]
        self.settings = types.SimpleNamespace(calls=0)
        self.tables = {"a": {"b": [0]}}
        self.recent = collections.deque([1.0], maxlen=3)
        self.array = np.zeros(2)
        self.slotted = Slotted()
        self._private = 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.step[0](self)).sum()


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def of_an_object(model: Stateful) -> float:
    model.settings.calls += 1  # of an object
    return model.settings.calls


def of_slots(model: Stateful) -> float:
    model.slotted.calls += 1  # of slots
    return model.slotted.calls


def of_nested_containers(model: Stateful) -> float:
    model.tables["a"]["b"][0] += 1  # of nested containers
    return model.tables["a"]["b"][0]


def of_a_deque(model: Stateful) -> float:
    model.recent.append(model.recent[-1] / 2)  # of a deque
    return model.recent[-1]


def of_an_array(model: Stateful) -> float:
    model.array[0] += 1  # of an array
    return float(model.array[0])


def of_the_class(model: Stateful) -> float:
    type(model).made += 1  # of the class
    return type(model).made


def of_a_private_attribute(model: Stateful) -> float:
    model._private += 1  # of a private attribute
    return model._private


def of_a_global(model: Stateful) -> float:
    global CALLS
    CALLS += 1  # of a global
    return CALLS


def of_a_globals_table(model: Stateful) -> float:
    TABLE["by name"]["calls"] += 1  # of a table
    return TABLE["by name"]["calls"]


def of_a_default(model: Stateful, seen: list[int] = []) -> float:  # noqa: B006
    seen.append(0)  # of a default
    return len(seen)


def of_itself(model: Stateful) -> float:
    of_itself.calls += 1  # of the function itself
    return of_itself.calls  # type: ignore[attr-defined]


of_itself.calls = 0  # type: ignore[attr-defined]


def _of_a_closure() -> Callable[[Stateful], float]:
    seen = [0]

    def closure(model: Stateful) -> float:
        seen[0] += 1  # of a closure
        return seen[0]

    return closure


def _of_a_nonlocal() -> Callable[[Stateful], float]:
    calls = 0

    def closure(model: Stateful) -> float:
        nonlocal calls
        calls += 1  # of a nonlocal
        return calls

    return closure


def _counted(table: dict[str, int], model: Stateful) -> float:
    table["calls"] += 1  # of a partial
    return table["calls"]


@pytest.mark.parametrize("trace", [capture, capture_folded])
@pytest.mark.parametrize(
    ("step", "line", "name"),
    [
        (of_an_object, "of an object", "self.settings.calls"),
        (of_slots, "of slots", "self.slotted.calls"),
        (of_nested_containers, "of nested containers", "self.tables['a']['b']"),
        (of_a_deque, "of a deque", "self.recent"),
        (of_an_array, "of an array", "self.array"),
        (of_the_class, "of the class", "Stateful.made"),
        (of_a_private_attribute, "of a private attribute", "self._private"),
        (of_a_global, "of a global", "the global CALLS"),
        (of_a_globals_table, "of a table", "the global TABLE['by name']['calls']"),
        (of_a_default, "of a default", "a default of of_a_default"),
        (of_itself, "of the function itself", "of_itself.calls"),
        (_of_a_closure(), "of a closure", "seen, a variable outside of closure"),
        (_of_a_nonlocal(), "of a nonlocal", "calls, a variable outside of closure"),
        (functools.partial(_counted, {"calls": 0}), "of a partial", "self.step[0]['calls']"),
    ],
)
def test_state_that_the_next_call_reads_is_refused_at_the_line_that_changes_it(
    trace: Any, step: Callable[[Stateful], float], line: str, name: str
) -> None:
    model = Stateful(step)
    before = copy.deepcopy((vars(model.settings), model.tables, model.recent, TABLE, CALLS, Stateful.made))
    with pytest.raises(CaptureError, match="the next call computes something else") as refused:
        trace(model, torch.randn(4, 8))
    assert f"forward changes {name}" in refused.value.what
    assert refused.value.where.startswith(line_of(__file__, line))
    assert before == (vars(model.settings), model.tables, model.recent, TABLE, CALLS, Stateful.made)
    assert model._private == model.slotted.calls == model.array[0] == 0


def by_a_generator_of_its_own(model: Drawing) -> float:
    return model.random.random()  # Python's


def by_numpys_generator(model: Drawing) -> float:
    return float(model.numpy.normal())  # NumPy's


def by_an_iterator(model: Drawing) -> float:
    return next(model.cycle)  # an iterator


def by_a_counter(model: Drawing) -> float:
    return float(next(model.counter))  # a counter


def by_a_python_generator(model: Drawing) -> float:
    return next(model.falling)  # a generator


def falling() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value /= 2


class Drawing(Stateful):
    def __init__(self, step: Any) -> None:
        super().__init__(step)
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.cycle = itertools.cycle([1.0, 2.0])
        self.counter = itertools.count()
        self.falling = falling()


@pytest.mark.parametrize(
    ("step", "line", "name"),
    [
        (by_a_generator_of_its_own, "Python's", "self.random"),
        (by_numpys_generator, "NumPy's", "self.numpy"),
        (by_an_iterator, "an iterator", "self.cycle"),
        (by_a_counter, "a counter", "self.counter"),
        (by_a_python_generator, "a generator", "self.falling"),
    ],
)
def test_what_is_drawn_from_a_generator_or_an_iterator_of_the_models_is_refused(
    step: Any, line: str, name: str
) -> None:
    model = Drawing(step)
    state = model.random.getstate(), model.numpy.bit_generator.state
    with pytest.raises(CaptureError, match=f"draws from {name}: .* one draw for ever") as refused:
        capture(model, torch.randn(4, 8))
    assert refused.value.where.startswith(line_of(__file__, line))
    assert state == (model.random.getstate(), model.numpy.bit_generator.state)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.log: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # counted
        return self.used(self.linear(x)).sum()


class EveryHundredth(Counting):
    def used(self, y: Tensor) -> Tensor:
        return y * 2 if self.calls % 100 == 0 else y  # every hundredth


class Slowly(Counting):
    def used(self, y: Tensor) -> Tensor:
        return y * (1 + self.calls // 1000)  # slowly


class AfterAWhile(Counting):
    def used(self, y: Tensor) -> Tensor:
        late = self.calls > 10_000  # late
        return y.relu() if late else y


class Unrolled(Counting):
    def used(self, y: Tensor) -> Tensor:
        if not self.calls % 50:  # unrolled
            y = y + y.mean()
        return y


@pytest.mark.parametrize(
    ("kind", "reader"),
    [
        (EveryHundredth, "every hundredth"),
        (Slowly, "slowly"),
        (AfterAWhile, "late"),
        (Unrolled, "unrolled"),
    ],
)
def test_what_a_much_later_call_reads_is_refused_too(kind: type[Counting], reader: str) -> None:
    with pytest.raises(CaptureError, match=r"changes self\.calls, and a later call reads it at") as refused:
        capture(kind(), torch.randn(4, 8))
    assert line_of(__file__, reader).rpartition("/")[2] in refused.value.what
    assert refused.value.where.startswith(line_of(__file__, "counted"))


class Logs(Counting):
    def used(self, y: Tensor) -> Tensor:
        if self.calls % 100 == 0:
            self.log.append(f"{self.calls / 100:.1f} hundred calls")
            print(self.calls)
        return y


class Asserts(Counting):
    def used(self, y: Tensor) -> Tensor:
        assert self.calls < 10**9, "enough"
        return y


class Looks(Counting):
    """At values, in a log only."""

    def used(self, y: Tensor) -> Tensor:
        if self.calls % 10 == 0:
            self.log.append(float(y.mean()))
        return y


class KeepsAMovingAverage(Counting):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def used(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y - self.average


class Normalises(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def used(self, y: Tensor) -> Tensor:
        return self.norm(y).square()


@pytest.mark.parametrize("kind", [Logs, Asserts, Looks, KeepsAMovingAverage, Normalises])
def test_a_counter_that_is_only_logged_is_left_out_and_said(
    kind: type[Counting], capsys: pytest.CaptureFixture[str]
) -> None:
    notes = capture(kind(), torch.randn(4, 8)).notes
    assert notes == ("forward changes self.calls: a side effect that the captured program does not have",)
    assert capsys.readouterr().out == ""
