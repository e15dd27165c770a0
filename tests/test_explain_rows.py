"""Stages that share a row of explain, what is said of waiting, and figures as people read them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.explain import tables, text
from autoplan.plan import Plan
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem


def many(stages: int, peaks: list[float]) -> Plan:
    """A plan whose stages are alike but for their memory, ``peaks`` in turn."""
    layers = [Dense(elements=20_000_000)] * stages
    plan = search(problem(layers, cluster(stages), forced={"pipeline": stages, "schedule": "1f1b"}))
    first = plan.stages[1]
    return dataclasses.replace(
        plan,
        stages=tuple(
            dataclasses.replace(first, first_layer=i, last_layer=i, peak_memory_bytes=peaks[i % len(peaks)])
            for i in range(stages)
        ),
    )


def test_stages_that_share_a_row_say_how_full_each_is() -> None:
    told = many(20, [67.6 * 2**30, 78.1 * 2**30]).explain()
    assert "0-19 20 stages x 1 layer " in told and "memory from 67.6 GiB to 78.1 GiB a stage; the bar is the" in told
    alike = many(20, [67.6 * 2**30]).explain()
    assert "20 stages x 1 layer " in alike and "memory from" not in alike
    assert all(len(line) <= 80 for line in told.splitlines())


def test_stages_whose_rows_would_differ_share_none() -> None:
    plan = many(20, [2.0**30])
    stages = [dataclasses.replace(s, forward_s=s.forward_s * (2 if i == 7 else 1)) for i, s in enumerate(plan.stages)]
    rows = re.findall(
        r"(?m)^ +(\d+-?\d*) (?:\d+ stages|layers)", dataclasses.replace(plan, stages=tuple(stages)).explain()
    )
    assert rows == ["0-6", "7", "8-19"]


def test_both_shares_of_waiting_are_of_one_kind() -> None:
    """Of one GPU's work: on average as ``bubble_fraction`` is, and of the one with the most to do."""
    plan = search(problem([Dense(elements=20_000_000)] * 7, cluster(4), forced={"pipeline": 2, "schedule": "1f1b"}))
    step_s, micro = plan.predicted.step_time_s, plan.strategy.micro_batches
    works = [micro * (s.forward_s + s.backward_s) + s.synchronise_s + s.optimizer_s for s in plan.stages]
    assert tables.least_wait(plan) == pytest.approx(1 - max(works) / step_s)
    assert plan.predicted.bubble_fraction == pytest.approx(1 - sum(works) / (2 * step_s))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (text.rate(1.05e12), "1,050 GB/s"),
        (text.rate(25e9), "25 GB/s"),
        (text.rate(2.5e9), "2.5 GB/s"),
        (text.rate(999.9e9), "1,000 GB/s"),
        (text.count(999_600_000), "1 B"),
        (text.count(999_400_000), "999 M"),
        (text.count(2.5e15), "2,500 T"),
        (text.ratio(1.5), "1.5"),
        (text.ratio(1234.0), "1,234"),
        (text.change(1.0, 1.123), "+12.3%"),
        (text.change(1.0, 0.5), "-50.0%"),
        (text.change(1.0, 42_074.694), "42,075 times"),
    ],
)
def test_no_figure_is_a_power_of_ten(said: str, expected: str) -> None:
    assert said == expected


@given(st.floats(1e-12, 1e24), st.sampled_from([text.rate, text.count, text.ratio, text.size, text.seconds]))
def test_of_any_figure(value: float, shown: Callable[[float], str]) -> None:
    assert not re.search(r"\de[+-]?\d", shown(value))
