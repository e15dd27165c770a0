"""What the user forces or bounds, by option and by strategy key; the plan file keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autoplan
from autoplan.cli.options import parse_strategy, with_limits
from autoplan.errors import StrategyError
from autoplan.plan import Plan
from tests.support.cli import Invoke, too_wide

TINY = {"model_type": "gpt2", "n_embd": 96, "n_layer": 4, "n_head": 6, "n_positions": 128, "vocab_size": 512}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("data=4,tensor=2", {"data": 4, "tensor": 2}),
        ("pipeline<=4", {"pipeline": "<=4"}),
        ("pipeline <= 4, data>=2", {"pipeline": "<=4", "data": ">=2"}),
        ("pipeline>=2,pipeline<=4", {"pipeline": ">=2 <=4"}),
        ("tensor=1|2, tensor!=1", {"tensor": "1|2 !=1"}),
        ("zero_stage<3,schedule=1f1b", {"zero_stage": "<3", "schedule": "1f1b"}),
        ("stages=0-3|4-5,inside_node=tensor|data", {"stages": "0-3|4-5", "inside_node": "tensor|data"}),
    ],
)
def test_keys_are_forced_or_bounded(text: str, strategy: dict[str, object]) -> None:
    assert parse_strategy([text]) == strategy


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("data", "is not KEY=VALUE"),
        ("data==4", "is not KEY=VALUE"),
        ("data<=", "is not KEY=VALUE"),
        ("schedule<=2", "`schedule` has no range"),
        ("max_gpus<=4", "`max_gpus` has no range"),
        ("pipe<=4", "unknown key `pipe`"),
        ("data=4,data<=8", "`data` is given twice"),
        ("data=4,data=8", "`data` is given twice"),
    ],
)
def test_mistakes_say_what_is_legal(text: str, what: str) -> None:
    with pytest.raises(StrategyError, match=what):
        parse_strategy([text])


def test_an_option_and_its_key_are_one_thing() -> None:
    assert with_limits({"data": 2}, max_gpus=4, headroom="10%") == {"data": 2, "max_gpus": 4, "memory_headroom": "10%"}
    with pytest.raises(StrategyError, match="`stages` is given twice"):
        with_limits({"stages": "0,2"}, stages="0,3")


def test_limits_hold_and_are_kept_in_the_plan_file(invoke: Invoke, model: str, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    limits = ("--strategy", "tensor=1|2", "--max-gpus", "4", "--headroom", "10%", "--inside-node", "tensor,data")
    asked = ("plan", model, "--gpus", "2x4xA100-80GB", "--global-batch", "8", *limits, "--stages", "0-2,3-5")
    assert invoke(*asked, "-o", str(target)).exit_code == 0
    plan = Plan.load(target)
    assert plan.gpus_used <= 4 and plan.strategy.tensor <= 2 and plan.strategy.pipeline == 2
    assert [(stage.first_layer, stage.last_layer) for stage in plan.stages] == [(0, 2), (3, 5)]
    assert plan.forced == {
        "tensor": "1|2",
        "memory_headroom": "10%",
        "max_gpus": 4,
        "stages": "0-2,3-5",
        "inside_node": "tensor,data",
    }
    said = invoke("explain", str(target)).stdout
    assert not too_wide(said)
    assert "stage boundaries as asked: layers 0-2, 3-5" in " ".join(said.split())


def test_a_conflict_is_named(invoke: Invoke, model: str) -> None:
    refused = invoke("plan", model, "--gpus", "8xH100", "--max-gpus", "2", "--strategy", "pipeline>=4,tensor=1")
    assert refused.exit_code == 2
    assert "`pipeline` >=4 and `max_gpus` 2 contradict each other" in refused.stderr


def test_predict_takes_stages_too(invoke: Invoke, model: str) -> None:
    asked = ("predict", model, "--gpus", "2xA100-80GB", "--global-batch", "8", "--strategy", "micro_batch_size=1")
    found = json.loads(invoke(*asked, "--stages", "1", "--json").stdout)
    assert [stage["first_layer"] for stage in found["stages"]] == [0, 1]


def test_a_time_limit_leaves_a_plan_with_an_honest_proof(model: str, invoke: Invoke) -> None:
    plan = ["plan", model, "--gpus", "8xA100-80GB", "--global-batch", "16", "--json"]
    patient, hurried = (json.loads(invoke(*plan, *more).stdout) for more in ((), ("--time-limit", "0")))
    assert patient["certificate"]["status"] == "optimal" and patient["certificate"]["gap"] == 0
    assert hurried["predicted"]["step_time_s"] >= patient["certificate"]["lower_bound_s"]
    assert hurried["certificate"]["status"] == "optimal" or hurried["certificate"]["gap"] > 0


@pytest.mark.parametrize("limit", [-1, float("nan"), "soon"])
def test_a_time_limit_is_seconds(model: str, limit: object) -> None:
    with pytest.raises(StrategyError, match="time limit"):
        autoplan.plan(model, gpus="8xA100-80GB", global_batch=16, time_limit_s=limit)  # type: ignore[arg-type]
