"""The page: one file that loads nothing, runs no script but its own, says everything the plan says, and takes any text
as text."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.explain.text import seconds, size
from autoplan.plan import OtherAnswer, Plan, Strategy
from autoplan.report import machines, model_graph, scatter
from autoplan.report.machines import crosses_nodes
from autoplan.report.notebook import plan_html
from autoplan.report.page import page
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem
from tests.support.mixed import group, mixed

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
    assert not {tag for tag, _ in checker.tags} & {"link", "img", "iframe", "object", "base", "form"}
    names = {name for _, attributes in checker.tags for name in attributes}
    assert not names & {"src", "href", "xlink:href", "srcset"} and not [name for name in names if name.startswith("on")]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert html.count("<script") == len(scripts) == 1 and not re.search(r"fetch|http|import|eval", scripts[0])
    allowed = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in html
    assert "url(" not in html and "@import" not in html and "default-src 'none'" in html


def test_every_layer_and_gpu_is_drawn_once_coloured_by_its_stage(plan: Plan) -> None:
    html = page(plan)
    for layer, name in enumerate(plan.model.layers):
        stage = next(i for i, s in enumerate(plan.stages) if s.first_layer <= layer <= s.last_layer)
        assert html.count(f"<title>{name}: layer {layer}, stage {stage}") == 1
        assert f'<g class="box s{stage}"><title>{name}: layer {layer}, stage {stage}' in html
    for rank in range(plan.gpus):
        assert html.count(f"<title>rank {rank}: stage ") == 1
    assert html.count('<path class="cut"') == len(plan.stages) - 1
    assert html.count('<path class="edge"') == len(plan.model.layers) - len(plan.stages)


def branching(plan: Plan, edges: tuple[tuple[int, int], ...]) -> Plan:
    return dataclasses.replace(plan, model=dataclasses.replace(plan.model, edges=edges))


def test_branches_are_joined_as_the_model_joins_them(plan: Plan) -> None:
    edges = ((0, 1), (0, 2), (1, 5), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7))
    drawn = model_graph.picture(branching(plan, edges))
    assert sum(arrow.ends for arrow in drawn.arrows) == len(edges)
    stage_of = [box.stage for box in drawn.boxes]
    assert sum(a.ends for a in drawn.arrows if a.cut) == sum(stage_of[one] != stage_of[other] for one, other in edges)
    assert f"also read by {plan.model.layers[2]}" in drawn.boxes[0].title
    assert page(branching(plan, edges)).count("<path class=") >= len(drawn.arrows)


@settings(max_examples=100, deadline=None)
@given(
    edges=st.sets(
        st.tuples(st.integers(0, 39), st.integers(0, 39)).map(lambda pair: (min(pair), max(pair))), min_size=1
    )
)
def test_arrows_of_any_graph_go_around_boxes_and_end_at_those_that_read(edges: set[tuple[int, int]]) -> None:
    plan = forty_layers()
    drawn = model_graph.picture(branching(plan, tuple(sorted((a, b) for a, b in edges if a != b) or [(0, 1)])))
    for arrow in drawn.arrows:
        for (x, y), (to_x, to_y) in segments(arrow.path):
            for box in drawn.boxes:
                inside = box.x < max(x, to_x) and min(x, to_x) < box.x + box.width
                assert not (inside and box.y < max(y, to_y) - 0.2 and min(y, to_y) + 0.2 < box.y + box.height)
    wanted = {(a, b) for a, b in edges if b > a + 1}
    read = {one: {other for a, other in wanted if a == one} for one, _ in wanted}
    ends = sum(arrow.ends for arrow in drawn.arrows if arrow.path.count("L"))
    assert ends == sum(map(len, read.values()))
    assert sum(arrow.path.count("L") for arrow in drawn.arrows) == 2 * ends  # a head an end


@functools.cache
def forty_layers() -> Plan:
    return search(problem([Dense(elements=20_000_000)] * 40, cluster(4), forced={"pipeline": 4, "schedule": "1f1b"}))


def segments(path: str) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """The straight pieces of an SVG path of M, H, V and L."""
    at = (0.0, 0.0)
    for step, numbers in re.findall(r"([MHVL])([-\d. ]+)", path):
        values = [float(value) for value in numbers.split()]
        to = {"H": (values[0], at[1]), "V": (at[0], values[0])}.get(step) or (values[0], values[1])
        if step != "M":
            yield at, to
        at = to


@pytest.mark.parametrize(
    ("degrees", "between"),
    [
        ({"tensor": 8, "data": 2}, {"data"}),
        ({"tensor": 4, "data": 2, "pipeline": 2}, {"pipeline"}),
        ({"data": 16}, {"data"}),
        ({"tensor": 16}, {"tensor"}),
        ({"tensor": 2, "context": 4, "data": 2}, {"data"}),
        ({"context": 2, "data": 4, "expert": 4, "pipeline": 2}, {"pipeline"}),
    ],
)
def test_what_crosses_nodes_is_between_them(plan: Plan, degrees: dict[str, int], between: set[str]) -> None:
    strategy = Strategy(**degrees)
    machines = dataclasses.replace(plan.cluster, nodes=2, gpus_per_node=8)
    of_two = dataclasses.replace(plan, cluster=machines, strategy=strategy, gpus=16, gpus_used=16)
    assert {axis for axis in degrees if crosses_nodes(of_two, axis)} == between


def test_what_lost_is_a_point_of_its_time_and_memory(plan: Plan) -> None:
    points = scatter.picture(plan).points
    assert [point.number for point in points] == list(range(len(plan.alternatives) + 1))
    timed = [(a.step_time_s, a.peak_memory_bytes) for a in plan.alternatives]
    for (one, (step, peak)), (other, (later, more)) in itertools.combinations(zip(points[1:], timed, strict=True), 2):
        if step and later:
            assert (step < later) == (one.y > other.y) or step == later
            assert (peak < more) == (one.x < other.x) or peak == more
    ((limit, _),) = scatter.picture(plan).capacities
    assert all(point.x <= limit if point.fits else point.x > limit for point in points)


@settings(max_examples=100, deadline=None)
@given(
    step_s=st.floats(1e-5, 1e3),
    peak=st.floats(1e7, 80e9),
    others=st.lists(st.tuples(st.floats(1.0, 300.0), st.floats(1e7, 80e9)), max_size=8),
)
def test_the_axes_have_a_few_round_marks_inside_the_picture(
    step_s: float, peak: float, others: list[tuple[float, float]]
) -> None:
    plan = forty_layers()
    predicted = dataclasses.replace(plan.predicted, step_time_s=step_s, peak_memory_bytes=peak)
    (one, *_) = plan.alternatives
    lost = tuple(
        dataclasses.replace(one, step_time_s=step_s * times, peak_memory_bytes=held, short_by_bytes=0.0)
        for times, held in others
    )
    drawn = scatter.picture(dataclasses.replace(plan, predicted=predicted, alternatives=lost))
    assert 2 <= len(drawn.up) <= 7 and 3 <= len(drawn.across) <= 12
    assert all(scatter.TOP <= y <= scatter.HEIGHT - scatter.BOTTOM for y, _ in drawn.up)
    assert all(scatter.LEFT <= x <= scatter.WIDTH - scatter.RIGHT for x, _ in drawn.across)
    heights = sorted(y for y, _ in drawn.up)
    assert all(below - above > 20 for above, below in itertools.pairwise(heights))  # labels do not touch
    assert len({label for _, label in drawn.up}) == len(drawn.up)


def test_what_would_change_the_decision_is_said(plan: Plan) -> None:
    spare = plan.cluster.memory_bytes - plan.predicted.peak_memory_bytes
    assert f"with up to {size(spare)} less on each GPU: this plan still fits as it is" in page(plan)
    answer = OtherAnswer(
        condition="1.0 GiB more", quantity="memory_bytes", value=1.0, strategy=Strategy(data=4), step_time_s=9.0
    )
    said = page(dataclasses.replace(plan, other_answers=(answer,)))
    assert "What would change the decision" in said and "with 1.0 GiB more: data 4, 9.00 s a step" in said


def test_every_action_is_drawn_where_it_is(plan: Plan) -> None:
    rectangles = [a for tag, a in read(page(plan)).tags if tag == "rect" and a.get("class") in ("forward", "backward")]
    assert len(rectangles) == 2 * 4 * plan.strategy.micro_batches
    ends = [float(a["x"] or 0) + float(a["width"] or 0) for a in rectangles]
    assert 0 < max(ends) <= 1000.01


def test_a_row_of_several_stages_is_called_what_it_is_and_their_actions_are_told_apart() -> None:
    layers = [Dense(elements=4_000_000)] * 8
    forced = {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 1}
    plan = search(problem(layers, cluster(2), forced=forced))
    html = page(plan)
    text = " ".join(" ".join(read(html).text).split())
    assert "The step, rank by rank" in text and "A row is a stage" not in text
    assert (
        "A row is a pipeline rank, the GPUs that hold 2 stages together: rank 0 holds 0, 2; rank 1 holds 1, 3." in text
    )
    assert "rank 0: stages 0, 2" in text and "coloured by its pipeline rank" in text
    classes = [a.get("class") for tag, a in read(html).tags if tag == "rect"]
    assert classes.count("forward") == classes.count("forward later") == 2 * plan.strategy.micro_batches
    assert 'aria-label="The whole step, a row for each of 2 pipeline ranks; ' in html


def of_two_kinds() -> Plan:
    """A pipeline over two nodes of each of two kinds, whose nodes are joined by links of different names."""
    fast, slow = group(2, nodes=2, name="fast"), group(2, nodes=2, speed=0.5, memory_gib=12.0, name="slow")
    slow = dataclasses.replace(slow, inter=dataclasses.replace(slow.inter, name="old wires"))
    forced = {"pipeline": 2, "data": 4}
    layers = [Dense(flops=3e12, elements=20_000_000)] * 12
    return search(problem(layers, mixed([fast, slow]), global_batch=64, heads=1, forced=forced))


def test_links_of_kinds_have_a_row_each_with_what_travels_there() -> None:
    plan = of_two_kinds()
    data = {part.where: part for part in machines.picture(plan).between if part.axis == "data"}
    assert set(data) == {"between nodes of fast", "between nodes of slow"}
    assert data["between nodes of slow"].link == "old wires"
    (axis,) = (axis for axis in plan.axes if axis.name == "data")
    by_kind = {stage.device: stage for stage in plan.stages}
    longest = max(plan.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    for kind, stage in by_kind.items():
        part = data[f"between nodes of {kind}"]
        assert part.bytes_per_step == pytest.approx(axis.bytes_per_step * stage.parameters / longest.parameters)
        if stage is longest:
            assert (part.bytes_per_step, part.times) == (axis.bytes_per_step, axis.times_per_step)
            assert part.exposed_s == pytest.approx(axis.exposed_s)


def test_memory_is_that_of_the_kind_that_a_stage_stands_on() -> None:
    plan = of_two_kinds()
    fullest = max(plan.stages, key=lambda stage: stage.peak_memory_bytes)
    of = size(plan.cluster.memory_of(fullest))
    assert f"<dd>{size(fullest.peak_memory_bytes)}<small>of {of}</small></dd>" in page(plan)
    held = [label for _, label in scatter.picture(plan).capacities]
    assert held == [size(value) for value in sorted({group.memory_bytes for group in plan.cluster.groups})]
    for label in held:
        assert f"a GPU holds {label}" in page(plan)


def test_samples_without_tokens_are_counted_as_samples(plan: Plan) -> None:
    of_pictures = dataclasses.replace(plan, model=dataclasses.replace(plan.model, tokens_per_sample=1))
    assert "<small>samples/s</small>" in page(of_pictures) and "samples/s, MFU" in plan_html(of_pictures)
    of_text = dataclasses.replace(plan, model=dataclasses.replace(plan.model, tokens_per_sample=512))
    assert "<small>tokens/s</small>" in page(of_text) and "tokens/s, MFU" in plan_html(of_text)


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


def script(html: str) -> str:
    return html[html.index("<script>") : html.index("</script>")]


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
    assert not {tag for tag, _ in checker.tags} & {"img"}
    assert page(hostile).count("<script") == 1 and script(page(hostile)) == script(page(plan))
    assert evil in "".join(checker.text)


def test_a_schedule_that_is_not_known_is_said_not_drawn(plan: Plan) -> None:
    other = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, schedule="looped_bfs"))
    assert "not one that can be drawn" in page(other)
