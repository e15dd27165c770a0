"""The text of plan files: one line a range of layers, older revisions brought up, and a plan for another model refused
with what differs."""

from __future__ import annotations

import dataclasses
import json
from difflib import unified_diff
from pathlib import Path

import pytest

from autoplan import plan_file
from autoplan.consistency import other_model
from autoplan.errors import PlanFileError
from autoplan.layers import LayerGraph
from autoplan.plan import OtherAnswer, Plan, Strategy
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, graph, problem

OLD = sorted((Path(__file__).parent / "report" / "data").glob("plan-revision-*.json"))


def planned(pipeline: int = 2, **forced: object) -> Plan:
    layers = [Dense(elements=20_000_000)] * 8
    return search(problem(layers, cluster(4), forced={"pipeline": pipeline, "schedule": "1f1b", **forced}))


def test_there_is_a_file_of_every_revision() -> None:
    assert [path.stem for path in OLD] == [f"plan-revision-{n}" for n in range(1, plan_file.REVISION + 1)]


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_files_of_every_revision_are_read_and_written_as_the_newest(path: Path, tmp_path: Path) -> None:
    plan = Plan.load(path)
    assert plan.revision == plan_file.REVISION
    assert plan.strategy.pipeline == 2 and plan.model.parameters == 508_992
    assert Plan.load(plan.save(tmp_path / "new.json")) == plan
    assert "data 2 x pipeline 2" in plan.explain()


def test_the_first_files_said_only_what_all_sends_take() -> None:
    old = json.loads(OLD[0].read_text())
    assert "revision" not in old and "send_s" not in old["stages"][0]
    sends_s = old["predicted"]["time_terms"]["sends"]
    assert sends_s > 0
    assert [stage.send_s for stage in Plan.load(OLD[0]).stages] == [
        sends_s / 2,
        0.0,
    ]  # there and back over one boundary
    del old["predicted"]["time_terms"]["sends"]
    old["predicted"]["time_terms"]["bubble"] += sends_s
    assert [stage.send_s for stage in Plan.from_json(json.dumps(old)).stages] == [0.0, 0.0]


@pytest.mark.parametrize("revision", [plan_file.REVISION + 1, 0, -1, "2", None, True, 1.5])
def test_a_revision_that_is_not_known_is_refused(revision: object) -> None:
    data = planned().to_dict() | {"revision": revision}
    with pytest.raises(PlanFileError, match=r"revision is .*\n.*\n.*revisions 1 to") as caught:
        Plan.from_json(json.dumps(data), where="new.json")
    assert "new.json" in str(caught.value)


def test_a_stage_that_moves_one_layer_is_two_lines_and_its_figures() -> None:
    plan = planned()
    first, second = plan.stages
    moved = dataclasses.replace(
        plan,
        stages=(
            dataclasses.replace(first, last_layer=first.last_layer - 1, recompute={"none": 3}, layer_recompute=()),
            dataclasses.replace(second, first_layer=second.first_layer - 1, recompute={"none": 5}, layer_recompute=()),
        ),
    )
    lines = list(unified_diff(plan.to_json().splitlines(), moved.to_json().splitlines(), lineterm="", n=0))
    assert '+      "first_layer": 0, "last_layer": 2, "recompute": {"none": 3},' in lines
    assert '-      "first_layer": 0, "last_layer": 3, "recompute": {"none": 4},' in lines
    assert sum("first_layer" in line for line in lines) == 4 and len(lines) <= 14


def test_the_text_is_the_data() -> None:
    plan = planned()
    edges = (*((layer, layer + 1) for layer in range(7)), (0, 5))
    answer = OtherAnswer(condition="1 GiB more", quantity="memory_bytes", value=1.0, strategy=None, step_time_s=None)
    more = dataclasses.replace(
        plan, model=dataclasses.replace(plan.model, edges=edges), other_answers=(answer,), axes=(), forced={}
    )
    assert json.loads(more.to_json()) == more.to_dict()
    assert "      [0, 5]\n" in more.to_json()
    assert Plan.from_json(more.to_json()) == more


def test_edges_that_are_none_are_refused() -> None:
    data = planned().to_dict()
    for pair in ([3, 3], [4, 2], [0, 8]):
        data["model"]["edges"] = [pair]
        with pytest.raises(PlanFileError, match=r"`model.edges.0`: \(\d, \d\) is no pair"):
            Plan.from_json(json.dumps(data))


def test_another_answers_degrees_are_checked_too() -> None:
    answer = OtherAnswer(
        condition="1 GiB more", quantity="memory_bytes", value=1.0, strategy=Strategy(data=0), step_time_s=1.0
    )
    data = dataclasses.replace(planned(), other_answers=(answer,)).to_dict()
    with pytest.raises(PlanFileError, match=r"`other_answers.0.strategy.data`"):
        Plan.from_json(json.dumps(data))


def model(**changes: object) -> LayerGraph:
    made = graph([Dense(elements=20_000_000)] * 8)
    return dataclasses.replace(made, fingerprint="another", **changes)  # type: ignore[arg-type]


def test_what_differs_from_the_plans_model_is_said() -> None:
    plan = planned()
    assert other_model(plan, dataclasses.replace(model(), fingerprint=plan.model.fingerprint)) == ""
    assert other_model(plan, model()) == "operators or shapes of the same layers"
    assert "tokens per sample" in other_model(plan, model(tokens_per_sample=77))
    fewer = other_model(plan, graph([Dense(elements=10_000_000)] * 4))
    assert "parameters 160,000,000 there and 40,000,000 here" in fewer and "layers 8 there and 4 here" in fewer


def test_a_clusters_fingerprint_is_of_its_figures() -> None:
    from autoplan.cluster import Cluster

    one = Cluster.parse("8xH100")
    assert one.fingerprint == Cluster.parse("1x8xH100").fingerprint
    renamed = dataclasses.replace(one, spec="elsewhere.toml", name="mine", assumptions=("x",))
    assert renamed.fingerprint == one.fingerprint
    slower = dataclasses.replace(one, inter=dataclasses.replace(one.inter, bytes_per_s=1.0))
    others = ("16xH100", "8xA100-80GB", "8xH100+8xA100")
    found = {one.fingerprint, slower.fingerprint, *(Cluster.parse(spec).fingerprint for spec in others)}
    assert len(found) == 5
    assert planned().cluster.fingerprint == cluster(4).fingerprint
