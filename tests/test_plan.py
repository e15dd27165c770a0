"""Plan files: round trip, equal bytes, and one clear error that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import PlanFileError
from autoplan.plan import Coordinates, Plan, Strategy
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem


@pytest.fixture(scope="module")
def plan() -> Plan:
    layers = [Dense(elements=60_000_000)] * 8
    return search(problem(layers, cluster(4, memory_gib=8), forced={"pipeline": 2}))


def test_round_trip(plan: Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    loaded = Plan.load(path)
    assert loaded == plan
    assert loaded.to_json() == plan.to_json() == path.read_text(encoding="utf-8")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_file_holds_no_clock(plan: Plan) -> None:
    assert plan.seconds and "seconds" not in plan.to_dict()
    assert "seconds" in plan.to_dict(with_seconds=True)


def test_the_json_is_the_contract(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    assert data["schema"] == 1 and data["feasible"] is True
    assert {"gpus", "gpus_used", "strategy", "stages", "predicted", "certificate"} <= set(data)
    assert {"first_layer", "last_layer", "recompute", "peak_memory_bytes", "memory_terms"} <= set(data["stages"][0])
    assert {"status", "lower_bound_s", "gap"} <= set(data["certificate"])


def broken(plan: Plan, tmp_path: Path, *path: Any, value: Any) -> str:
    data = plan.to_dict()
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(PlanFileError) as caught:
        Plan.load(file)
    assert caught.value.exit_code == 2 and caught.value.attempt
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_a_missing_field_is_named(plan: Plan, tmp_path: Path) -> None:
    assert "`stages.1.last_layer`" in broken(plan, tmp_path, "stages", 1, "last_layer", value=None)


def test_a_wrong_type_is_named(plan: Plan, tmp_path: Path) -> None:
    assert "`strategy.tensor`" in broken(plan, tmp_path, "strategy", "tensor", value="two")


def test_an_unknown_field_is_named(plan: Plan, tmp_path: Path) -> None:
    assert "`predicted.luck`" in broken(plan, tmp_path, "predicted", "luck", value=1.0)


def test_another_schema_is_refused(plan: Plan, tmp_path: Path) -> None:
    assert "schema 1" in broken(plan, tmp_path, "schema", value=2)


def test_an_infeasible_answer_is_no_plan(plan: Plan, tmp_path: Path) -> None:
    assert "nothing fits" in broken(plan, tmp_path, "feasible", value=False)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"plan"', "\x00"])
def test_what_is_no_plan_at_all(text: str, tmp_path: Path) -> None:
    file = tmp_path / "nonsense.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(PlanFileError, match="nonsense"):
        Plan.load(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        Plan.load(tmp_path / "none.json")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match="not a text file"):
        Plan.load(tmp_path / "bytes.json")


def test_ranks_and_coordinates_are_inverse() -> None:
    """Tensor innermost, then data, then pipeline: rank = (pipeline x data + data index) x tensor + tensor index."""
    strategy = Strategy(data=3, tensor=2, pipeline=4)
    assert strategy.coordinates(0) == Coordinates(0, 0, 0)
    assert strategy.coordinates(1) == Coordinates(0, 0, 1)
    assert strategy.coordinates(2) == Coordinates(0, 1, 0)
    assert strategy.coordinates(6) == Coordinates(1, 0, 0)
    assert all(strategy.rank(strategy.coordinates(rank)) == rank for rank in range(strategy.gpus))


def test_axes_and_names() -> None:
    assert Strategy().axes == () and Strategy().describe() == "one GPU"
    strategy = Strategy(data=2, tensor=4, zero_stage=1)
    assert strategy.axes == ("data", "tensor", "zero")
    assert strategy.describe() == "data 2 x tensor 4, ZeRO-1"
    assert Strategy(data=2, micro_batch_size=3, micro_batches=4).global_batch == 24
