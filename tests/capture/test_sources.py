"""Clocks, entropy and the environment: a number that depends on one is refused; what only logs them is captured."""

from __future__ import annotations

import datetime
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture, capture_folded
from autoplan.errors import CaptureError
from tests.support.captures import line_of


class Asks(nn.Module):
    def __init__(self, ask: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.ask()).mean()  # asks


def of_the_system() -> float:
    return os.urandom(1)[0] / 255  # the system's


def of_secrets() -> float:
    return float(secrets.randbelow(2))  # a secret


def of_an_identifier() -> float:
    return float(uuid.uuid4().int % 7)  # an identifier


def of_an_unseeded_generator() -> float:
    return float(np.random.default_rng().random())  # unseeded


def of_the_clock() -> float:
    return time.time() % 60  # the clock


def of_a_clock_by_its_own_name() -> float:
    return perf_counter()  # by its own name


def of_a_deadline() -> float:
    return 0.5 if time.monotonic() > 1e12 else 1.0  # a deadline


def of_the_calendar() -> float:
    return float(datetime.datetime.now().microsecond)


def of_a_new_generator() -> float:
    return random.Random().random()


def of_the_environment() -> float:
    os.environ["AUTOPLAN_TEST_CALLS"] = str(int(os.environ.get("AUTOPLAN_TEST_CALLS", "0")) + 1)
    return float(os.environ["AUTOPLAN_TEST_CALLS"])


@pytest.mark.parametrize("trace", [capture, capture_folded])
@pytest.mark.parametrize(
    ("ask", "line", "what"),
    [
        (of_the_system, "the system's", "one draw for ever"),
        (of_secrets, "a secret", "one draw for ever"),
        (of_an_identifier, "an identifier", "one draw for ever"),
        (of_an_unseeded_generator, "unseeded", "one draw for ever"),
        (of_the_clock, "the clock", "forward reads time.time, and a number depends on it"),
        (of_a_clock_by_its_own_name, "by its own name", "forward reads time.perf_counter"),
        (of_a_deadline, "a deadline", "forward reads time.monotonic"),
    ],
)
def test_a_number_of_a_clock_or_of_entropy_is_refused_at_its_line(trace: Any, ask: Any, line: str, what: str) -> None:
    with pytest.raises(CaptureError) as refused:
        trace(Asks(ask), torch.randn(6, 4))
    assert what in refused.value.what
    assert refused.value.where.startswith(line_of(__file__, line))
    assert perf_counter is time.perf_counter and time.time.__module__ == "time"


@pytest.mark.parametrize("ask", [of_the_calendar, of_a_new_generator, of_the_environment])
def test_what_cannot_be_watched_is_refused_at_the_first_operator_that_differs(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPLAN_TEST_CALLS", "0")
    with pytest.raises(CaptureError, match="something else at its next call") as refused:
        capture(Asks(ask), torch.randn(6, 4))
    assert refused.value.where.startswith(line_of(__file__, "asks"))


class Times(nn.Module):
    """How long it takes, and under which name, for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.took: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        began = perf_counter()
        y = self.norm(self.linear(x))
        if perf_counter() - began > 1.0:
            self.took.append("slow")
        self.took.append((datetime.datetime.now(), time.time() - began))
        return y.square().mean()


def test_a_forward_that_only_logs_the_time_is_captured() -> None:
    captured = capture(Times(), torch.randn(6, 4))
    assert captured.notes == ("forward changes self.took: a side effect that the captured program does not have",)


def seeded_anew() -> float:
    return random.Random(3).random()


def test_a_generator_that_each_call_seeds_anew_gives_the_same_numbers_and_is_kept() -> None:
    model = Asks(seeded_anew)
    x = torch.randn(6, 4)
    assert torch.equal(capture(model, x).graph_module(x), model(x))
