"""What a notebook shows of a plan: well-formed, whole, and any text as text."""

from __future__ import annotations

import dataclasses

from autoplan.plan import Plan
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem


def planned() -> Plan:
    layers = [Dense(elements=20_000_000 + 100_000 * i) for i in range(8)]
    return search(problem(layers, cluster(4), forced={"pipeline": 2, "schedule": "1f1b"}))


def test_it_says_the_decision_its_figures_and_the_reasons() -> None:
    plan = planned()
    html = plan._repr_html_()
    assert html.startswith("<div") and html.rstrip().endswith("</div>")
    assert plan.strategy.describe() in html and plan.case in html and "What is split" in html
    assert html.count("<tr>") == 1 + len(plan.stages)
    assert "<script" not in html and "src=" not in html
    assert html.count(">50.0%</td>") == 2  # each stage's half of the FLOPs


def test_text_stays_text() -> None:
    plan = planned()
    evil = "<script>alert(1)</script>"
    names = tuple(evil for _ in plan.model.layers)
    hostile = dataclasses.replace(
        plan, case=evil, model=dataclasses.replace(plan.model, name=evil, layers=names), assumptions=(evil,)
    )
    assert "<script" not in hostile._repr_html_()
