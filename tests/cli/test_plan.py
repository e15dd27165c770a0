"""``plan``, ``predict`` and ``explain`` through the whole chain: the JSON contract, bad input, and the answer no."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autoplan.plan import Plan
from tests.support.cli import Invoke, too_wide

TINY = {
    "model_type": "gpt2",
    "n_embd": 96,
    "n_layer": 4,
    "n_head": 6,
    "n_positions": 128,
    "vocab_size": 512,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

BRANCH = """import torch
from torch import nn


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:
            y = -y
        return y.mean()


def build():
    return Branching(), {"x": torch.zeros(4, 8)}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def autoplan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what a solver's library prints past Python would show."""
    command = [sys.executable, "-m", "autoplan.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_json_object_is_the_contract(tiny: str) -> None:
    result = autoplan("plan", tiny, "--gpus", "4xA100-80GB", "--global-batch", "16", "--seq", "64", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["schema"] == 1 and found["feasible"] is True and found["gpus"] == 4
    assert set(found["strategy"]) >= {
        "data",
        "tensor",
        "pipeline",
        "virtual_stages",
        "context",
        "expert",
        "zero_stage",
        "micro_batch_size",
        "micro_batches",
        "schedule",
        "sequence_parallel",
    }
    assert set(found["predicted"]) >= {
        "step_time_s",
        "tokens_per_s",
        "model_tflops_per_gpu",
        "mfu",
        "peak_memory_bytes",
        "bubble_fraction",
        "exposed_communication_s",
        "host_load_bytes",
    }
    assert set(found["certificate"]) >= {"status", "lower_bound_s", "gap"}
    assert set(found["seconds"]) == {"capture", "search"}
    for stage in found["stages"]:
        assert sum(stage["memory_terms"].values()) == pytest.approx(stage["peak_memory_bytes"])
    strategy = found["strategy"]
    assert strategy["data"] * strategy["micro_batch_size"] * strategy["micro_batches"] == 16


def test_forced_keys_are_obeyed_and_the_rest_is_planned(invoke: Invoke, tiny: str) -> None:
    asked = ("--gpus", "4xA100-80GB", "--global-batch", "16", "--strategy", "tensor=2,pipeline=2", "--json")
    for command in ("plan", "predict"):
        found = json.loads(invoke(command, tiny, *asked).stdout)
        assert (found["strategy"]["tensor"], found["strategy"]["pipeline"]) == (2, 2)
        assert found["forced"] == {"tensor": 2, "pipeline": 2}


def test_compiled_stages_are_priced_told_and_asked_again(invoke: Invoke, tiny: str, tmp_path: Path) -> None:
    found = {}
    for command, options in (("predict", ()), ("plan", ("--compiled",))):
        file = str(tmp_path / command)
        asked = ("--gpus", "4xA100-80GB", "--global-batch", "16", "--strategy", "data=4", "-o", file)
        assert invoke(command, tiny, *asked, *options).exit_code == 0
        rows = json.loads(invoke("explain", file, "--operators", "--model", tiny, "--json").stdout)["operators"]
        plan = Plan.load(file)
        found[plan.compiled] = plan.predicted.step_time_s, sum(row["forward_s"] + row["backward_s"] for row in rows)
    assert found[True][0] < found[False][0]
    assert found[True][1] < found[False][1]


def test_a_plan_is_written_shown_and_explained(invoke: Invoke, tiny: str, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    planned = invoke("plan", tiny, "--gpus", "2xA100-80GB", "--global-batch", "16", "-o", file)
    assert planned.exit_code == 0, planned.stderr
    assert (Plan.load(file).model.name, Plan.load(file).gpus) == ("tiny", 2)
    assert invoke("show", file).stdout == planned.stdout
    explained = invoke("explain", file)
    assert explained.exit_code == 0
    assert Plan.load(file).strategy.describe() in explained.stdout
    assert not too_wide(explained.stdout)


def test_equal_questions_give_equal_bytes(invoke: Invoke, tiny: str, tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        invoke("plan", tiny, "--gpus", "4xH100", "--global-batch", "16", "-o", str(file))
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (("lama3-8b", "--gpus", "8xH100"), ("unknown model 'lama3-8b'", "llama3-8b")),
        (("TINY", "--gpus", "0"), ("0", "legal")),
        (("TINY", "--gpus", "8xH1000"), ("unknown GPU kind", "H100")),
        (("TINY", "--gpus", "7xA100-80GB", "--strategy", "tensor=8", "--global-batch", "14"), ("heads", "6", "8")),
        (("TINY", "--gpus", "7xA100-80GB", "--strategy", "data=14", "--global-batch", "14"), ("7", "data 14")),
        (("TINY", "--gpus", "4xA100-80GB", "--strategy", "data=4", "--global-batch", "6"), ("6", "4")),
        (("TINY", "--gpus", "4xA100-80GB", "--strategy", "tensor=4", "--global-batch", "8"), ("heads", "6", "4")),
        (("TINY", "--gpus", "2xA100-80GB", "--global-batch", "0"), ("global batch 0", "legal")),
        (("TINY", "--gpus", "2xA100-80GB", "--seq", "129"), ("learned positions for 128",)),
        (("TINY", "--gpus", "2xA100-80GB", "--precision", "bf61"), ("unknown precision 'bf61'", "bf16")),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_2(
    invoke: Invoke, tiny: str, arguments: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    result = invoke("plan", *(tiny if argument == "TINY" else argument for argument in arguments))
    assert result.exit_code == 2, result.stdout + result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("error:") == 1
    assert result.stdout == "" and "Traceback" not in result.stderr
    for message in messages:
        assert message in result.stderr


def test_a_malformed_config_names_its_line(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n"model_type": "gpt2",\n"n_embd": \n}')
    result = invoke("plan", str(path), "--gpus", "8xH100")
    assert result.exit_code == 2
    assert f"{path}:4" in result.stderr and "Traceback" not in result.stderr


def test_a_branch_on_data_names_the_users_line(tmp_path: Path) -> None:
    path = tmp_path / "branching.py"
    path.write_text(BRANCH)
    finished = autoplan("plan", f"{path}:build", "--gpus", "2xH100")
    assert finished.returncode == 2
    assert f"{path}:12" in finished.stderr
    assert finished.stderr.startswith("error: ") and "Traceback" not in finished.stderr
    assert finished.stdout == ""


def test_what_fits_nowhere_is_the_answer_no_with_the_reason(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "wide.json"  # 3.2 billion parameters in four layers: 16 bytes each is thrice what a T4 holds
    path.write_text(json.dumps(TINY | {"n_embd": 8192, "n_head": 64}))
    asked = ("plan", str(path), "--gpus", "1xT4", "--global-batch", "1", "--precision", "fp16")
    said = invoke(*asked)
    assert said.exit_code == 1 and said.stdout == ""
    assert "GiB" in said.stderr and "Traceback" not in said.stderr
    found = json.loads(invoke(*asked, "--json").stdout)
    assert found["feasible"] is False and found["short_by_bytes"] > 30 * 2**30
    assert found["reason"] and found["suggestions"] and found["term"]
