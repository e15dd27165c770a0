"""The page: one file that loads nothing, says everything the plan says, and takes any text as text."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from autoplan.explain.text import seconds, size
from autoplan.plan import Plan
from autoplan.report.page import page
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Collects tags, attributes and text, and refuses tags that are closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> out of turn"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    return checker


def planned(stages: int, *, micro_batch: int | None = None) -> Plan:
    layers = [Dense(elements=4_000_000 + 100_000 * i, saved=64 * 2**20) for i in range(2 * stages)]
    nodes = max(1, stages // 8)
    forced = {"pipeline": stages} | ({"micro_batch_size": micro_batch} if micro_batch else {})
    keys = {"schedule": "1f1b", **forced}
    return search(problem(layers, cluster(stages // nodes, nodes=nodes), forced=keys, assumptions=("a guess",)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(4)


def test_it_says_what_the_plan_says(plan: Plan) -> None:
    text = " ".join(" ".join(read(page(plan)).text).split())
    assert plan.strategy.describe() in text and plan.case in text and "a guess" in text
    assert seconds(plan.predicted.step_time_s) in text and size(plan.cluster.memory_bytes) in text
    for axis in plan.axes:
        assert axis.collective in text and axis.link in text
    for other in plan.alternatives:
        assert other.family in text and other.why_not in text
    for heading in ("The decision", "What is split", "Stages", "Where the step goes", "The step, stage by stage"):
        assert heading in text
    assert json.dumps(dataclasses.asdict(plan.strategy), indent=2) in "".join(read(page(plan)).text)


def test_it_loads_nothing(plan: Plan) -> None:
    html = page(plan)
    checker = read(html)
    assert not {tag for tag, _ in checker.tags} & {"script", "link", "img", "iframe", "object", "base", "form"}
    names = {name for _, attributes in checker.tags for name in attributes}
    assert not names & {"src", "href", "xlink:href", "srcset"} and not [name for name in names if name.startswith("on")]
    assert "url(" not in html and "@import" not in html and "default-src 'none'" in html


def test_every_action_is_drawn_where_it_is(plan: Plan) -> None:
    rectangles = [a for tag, a in read(page(plan)).tags if tag == "rect" and a.get("class") in ("forward", "backward")]
    assert len(rectangles) == 2 * 4 * plan.strategy.micro_batches
    ends = [float(a["x"] or 0) + float(a["width"] or 0) for a in rectangles]
    assert 0 < max(ends) <= 1000.01


def test_sixteen_stages_and_a_long_step_stay_small() -> None:
    plan = planned(16, micro_batch=1)
    long = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, micro_batches=512))
    html = page(long)
    assert "Its beginning" in html and "Its end" in html
    assert len(html) < 2_000_000
    assert len(re.findall(r'aria-label="[^"]* of [^"]*GiB"', html)) == 16


def test_one_gpu_splits_nothing() -> None:
    plan = search(problem([Dense(elements=1000)] * 2, cluster(1)))
    assert "Nothing: one GPU holds the whole model" in page(plan)


def test_text_stays_text(plan: Plan) -> None:
    evil = "</title><script>alert('1')</script>\"><img src=x onerror=y>"
    model = dataclasses.replace(plan.model, name=evil, layers=tuple(evil for _ in plan.model.layers), fingerprint=evil)
    hostile = dataclasses.replace(
        plan,
        model=model,
        cluster=dataclasses.replace(plan.cluster, spec=evil, device=evil),
        assumptions=(evil,),
        case=evil,
        axes=tuple(dataclasses.replace(axis, link=evil, splits=evil) for axis in plan.axes),
        alternatives=tuple(dataclasses.replace(other, family=evil, why_not=evil) for other in plan.alternatives),
        stages=tuple(dataclasses.replace(s, memory_terms={evil: s.peak_memory_bytes}) for s in plan.stages),
    )
    checker = read(page(hostile))
    assert not {tag for tag, _ in checker.tags} & {"script", "img"}
    assert evil in "".join(checker.text)


def test_a_schedule_that_is_not_known_is_said_not_drawn(plan: Plan) -> None:
    other = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, schedule="looped_bfs"))
    assert "not one that can be drawn" in page(other)
