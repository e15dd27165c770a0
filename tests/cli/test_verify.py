"""``autoplan verify MODEL PLAN.json``: exit codes, JSON, and what a person reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import autoplan
from autoplan.verification.text import report_text
from tests.support.cli import Invoke

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

NOISY = """import torch
from torch import nn
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        hidden = self.first(x)
        hidden = hidden + torch.randn_like(hidden)
        return self.second(hidden).square().mean()
def make():
    return Noisy(), torch.randn(8, 8)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def planned(config: Path) -> autoplan.Plan:
    strategy = {"data": 1, "tensor": 1, "pipeline": 2, "micro_batch_size": 2, "recompute": "none", "schedule": "1f1b"}
    return autoplan.plan(str(config), gpus="2xcpu", global_batch=8, seq=12, strategy=strategy)


def test_static_check_says_yes_with_exit_code_0(
    invoke: Invoke, config: Path, planned: autoplan.Plan, tmp_path: Path
) -> None:
    result = invoke("verify", str(config), str(planned.save(tmp_path / "plan.json")), "--static", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["equal"] is True
    assert [check["name"] for check in answer["static"]] == ["placements", "stages", "messages", "parameters", "memory"]
    assert answer["numeric"]["status"] == "not run"


def test_a_plan_that_counts_other_parameters_is_wrong_and_its_file_is_refused_when_it_is_read(
    invoke: Invoke, config: Path, planned: autoplan.Plan, tmp_path: Path
) -> None:
    first, second = planned.stages
    wrong = dataclasses.replace(planned, stages=(first, dataclasses.replace(second, parameters=second.parameters + 1)))
    report = autoplan.verify(str(config), wrong, static=True)
    assert report.exit_code == 1
    assert "WRONG parameters: stage 1 holds" in " ".join(report_text(report).split())
    result = invoke("verify", str(config), str(wrong.save(tmp_path / "plan.json")), "--static")
    assert result.exit_code == 2
    assert "field `stages.1.parameters`" in result.stderr


def test_what_is_not_shown_to_be_equal_ends_with_exit_code_1(invoke: Invoke, tmp_path: Path) -> None:
    model = tmp_path / "noisy.py"
    model.write_text(NOISY)
    path = tmp_path / "plan.json"
    plan = autoplan.plan(f"{model}:make", gpus="2xcpu", strategy={"pipeline": 2})
    plan.save(path)
    result = invoke("verify", f"{model}:make", str(path), "--json")
    assert result.exit_code == 1, result.stderr
    answer = json.loads(result.stdout)
    assert answer["equal"] is False and "noisy.py:9" in answer["numeric"]["reason"]


def test_a_plan_for_another_model_is_bad_input(
    invoke: Invoke, config: Path, planned: autoplan.Plan, tmp_path: Path
) -> None:
    other = dataclasses.replace(planned, model=dataclasses.replace(planned.model, fingerprint="0" * 64))
    result = invoke("verify", str(config), str(other.save(tmp_path / "plan.json")))
    assert result.exit_code == 2
    assert "another graph" in result.stderr


def test_a_model_that_cannot_take_the_plans_sequences_is_not_the_plans(
    invoke: Invoke, config: Path, planned: autoplan.Plan, tmp_path: Path
) -> None:
    longer = dataclasses.replace(planned.model, name="another-model", tokens_per_sample=2**20)
    tokens_per_s = planned.global_batch * 2**20 / planned.predicted.step_time_s
    predicted = dataclasses.replace(planned.predicted, tokens_per_s=tokens_per_s)
    other = dataclasses.replace(planned, model=longer, predicted=predicted)
    for command, *more in (("verify",), ("emit", "-o", str(tmp_path / "program"))):
        result = invoke(command, str(config), str(other.save(tmp_path / "plan.json")), *more)
        assert result.exit_code == 2
        assert "the plan was made for another-model" in " ".join(result.stderr.split())


def test_a_cluster_that_is_not_what_it_was_is_bad_input(
    invoke: Invoke, config: Path, planned: autoplan.Plan, tmp_path: Path
) -> None:
    described = tmp_path / "ours.toml"
    described.write_text('device = "cpu"\nnodes = 1\ngpus_per_node = 2\n')
    strategy = {"pipeline": 2, "schedule": "1f1b"}
    plan = autoplan.plan(str(config), gpus=described, global_batch=8, seq=12, strategy=strategy)
    path = str(plan.save(tmp_path / "plan.json"))
    assert invoke("verify", str(config), path, "--static").exit_code == 0
    described.write_text(described.read_text() + "[intra]\nbytes_per_s = 5e9\n")
    for command, *more in (("verify",), ("emit", "-o", str(tmp_path / "program"))):
        result = invoke(command, str(config), path, *more)
        assert result.exit_code == 2
        assert f"{described} is not what it was when the plan was made" in " ".join(result.stderr.split())


@pytest.mark.wide
def test_the_numbers_are_the_same(invoke: Invoke, config: Path, planned: autoplan.Plan, tmp_path: Path) -> None:
    result = invoke("verify", str(config), str(planned.save(tmp_path / "plan.json")))
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "the same numbers" in result.stdout
