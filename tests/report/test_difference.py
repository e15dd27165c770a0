"""What differs between two plans: nothing else, with its sign, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from autoplan.plan import Plan
from autoplan.report.difference import as_text, difference
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem


def planned(**forced: object) -> Plan:
    layers = [Dense(elements=20_000_000, saved=64 * 2**20)] * 12
    return search(problem(layers, cluster(8), forced={"schedule": "1f1b", **forced}))


@pytest.fixture(scope="module")
def one() -> Plan:
    return planned(pipeline=2, data=2, tensor=1, zero_stage=0)


@pytest.fixture(scope="module")
def two() -> Plan:
    return planned(pipeline=2, data=4, tensor=1, zero_stage=1)


def test_a_plan_does_not_differ_from_itself(one: Plan) -> None:
    found = difference(one, Plan.from_json(one.to_json()))
    assert found.same and "the same" in as_text(one, one, ("a", "b"))


def test_what_was_forced_is_told(one: Plan) -> None:
    freed = dataclasses.replace(one, forced={"schedule": "1f1b", "pipeline": "<=2"})
    found = difference(one, freed)
    forced = {change.name: (change.before, change.after) for change in found.forced}
    assert forced == {"pipeline": (2, "<=2"), "data": (2, None), "tensor": (1, None), "zero_stage": (0, None)}
    assert not found.same and not found.strategy and not found.inputs
    said = [line.split() for line in as_text(one, freed, ("a", "b")).splitlines()]
    assert ["data", "2", "->", "planned"] in said and ["pipeline", "2", "->", "<=2"] in said


def test_what_changed_and_nothing_else(one: Plan, two: Plan) -> None:
    found = difference(one, two)
    strategy = {change.name: (change.before, change.after) for change in found.strategy}
    assert strategy["data"] == (2, 4) and strategy["zero_stage"] == (0, 1) and strategy["gpus_used"] == (4, 8)
    assert "pipeline" not in strategy and "tensor" not in strategy and not found.inputs
    step = next(change for change in found.predicted if change.name == "step_time_s")
    assert step.relative == pytest.approx(two.predicted.step_time_s / one.predicted.step_time_s - 1)
    assert step.relative < 0
    terms = {change.name: change.after - change.before for change in found.memory_terms}
    assert sum(terms.values()) == pytest.approx(two.predicted.peak_memory_bytes - one.predicted.peak_memory_bytes)
    json.dumps(found.to_dict(), allow_nan=False)


def test_there_and_back_is_the_same_with_sides_exchanged(one: Plan, two: Plan) -> None:
    there, back = difference(one, two), difference(two, one)
    assert [(c.name, c.before, c.after) for c in there.strategy] == [(c.name, c.after, c.before) for c in back.strategy]
    assert {c.name for c in there.time_terms} == {c.name for c in back.time_terms}


def test_other_numbers_of_stages_are_not_compared_stage_by_stage(one: Plan) -> None:
    found = difference(one, planned(pipeline=4))
    assert [(c.name, c.before, c.after) for c in found.stages] == [("number", 2, 4)]


def test_another_question_is_said(one: Plan) -> None:
    other = dataclasses.replace(one, model=dataclasses.replace(one.model, fingerprint="1" * 16))
    assert [change.name for change in difference(one, other).inputs] == ["model.fingerprint"]
    assert "The questions differ" in " ".join(as_text(one, other, ("a", "b")).split())


def test_the_text_keeps_80_columns_and_says_the_cost(one: Plan, two: Plan) -> None:
    text = as_text(one, two, ("one.json", "two.json"))
    assert max(map(len, text.splitlines())) <= 80 and text.isascii()
    assert "A step takes" in text and "GPU time a sample" in " ".join(text.split())
    rows = [line.split() for line in text.splitlines()]
    assert ["data", "2", "->", "4"] in rows


def test_plans_of_different_models_are_said_to_be_so(one: Plan) -> None:
    """And what is many times as much is said in times: 4207369.4% is no figure to read."""
    slow = dataclasses.replace(one.predicted, step_time_s=one.predicted.step_time_s * 42_074.694)
    other = dataclasses.replace(one, model=dataclasses.replace(one.model, name="gpt", fingerprint="x"), predicted=slow)
    text = " ".join(as_text(one, other, ("a", "b")).split())
    assert f"These are plans of different models, {one.model.name} and gpt." in text
    assert "(42,075 times)" in text and not re.search(r"\d{5}\.\d%", text)
    renamed = dataclasses.replace(one, model=dataclasses.replace(one.model, fingerprint="x"))
    assert f"different models, both called {one.model.name}." in " ".join(as_text(one, renamed, ("a", "b")).split())
