"""``fit``, ``min-gpus`` and ``compare``: yes or no by exit code, the same answer as text and as JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from autoplan.errors import InfeasibleError
from autoplan.plan import Plan
from tests.support.cli import Invoke

TINY = {"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 128, "vocab_size": 512}
# 3.2 billion parameters in four layers: 16 bytes each is thrice what a T4 holds.
WIDE = TINY | {"n_embd": 8192, "n_layer": 4, "n_head": 64}


def config(folder: Path, values: dict[str, object]) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_yes_with_the_memory_to_spare(invoke: Invoke, tmp_path: Path) -> None:
    asked = ("fit", config(tmp_path, TINY), "--gpus", "2xA100-80GB", "--global-batch", "4")
    said = invoke(*asked)
    assert said.exit_code == 0 and said.stdout.startswith("yes: model fits 2xA100-80GB") and "to spare" in said.stdout
    found = json.loads(invoke(*asked, "--json").stdout)
    assert found["feasible"] is True and found["headroom_bytes"] > 0
    assert found["peak_memory_bytes"] + found["headroom_bytes"] == pytest.approx(found["memory_bytes"])


def test_no_with_what_is_missing_and_what_would_fit(invoke: Invoke, tmp_path: Path) -> None:
    asked = ("fit", config(tmp_path, WIDE), "--gpus", "1xT4", "--global-batch", "1", "--precision", "fp16")
    said = invoke(*asked)
    assert said.exit_code == 1 and said.stdout.startswith("no: ") and "try:" in said.stdout and "GiB" in said.stdout
    answered = invoke(*asked, "--json")
    found = json.loads(answered.stdout)
    assert answered.exit_code == 1 and found["feasible"] is False and found["suggestions"]


def test_the_fewest_gpus_of_a_kind(invoke: Invoke, tmp_path: Path) -> None:
    model = config(tmp_path, TINY)
    for named in (("--gpu", "H100"), ("--gpus", "8xH100")):
        found = json.loads(invoke("min-gpus", model, *named, "--json").stdout)
        assert (found["feasible"], found["gpus"], found["device"]) == (True, 1, "H100-80GB-SXM")
    assert invoke("min-gpus", model, "--gpu", "H100").stdout == "1 x H100-80GB-SXM\n"
    refused = invoke("min-gpus", model)
    assert refused.exit_code == 2 and "--gpu" in refused.stderr


def test_the_next_command_asks_the_same_question(invoke: Invoke, tmp_path: Path) -> None:
    asked = ("--seq", "64", "--global-batch", "6", "--headroom", "10%", "--strategy", "pipeline=2,data<=1")
    found = invoke("min-gpus", config(tmp_path, TINY), "--gpu", "H100", *asked)
    command = shlex.split(found.stderr.partition("next: autoplan ")[2])
    planned = invoke(*command, "-o", str(tmp_path / "plan.json"))
    assert planned.exit_code == 0, planned.stderr
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.gpus, plan.global_batch, plan.strategy.pipeline) == (2, 6, 2)
    assert plan.forced == {"pipeline": 2, "data": "<=1", "memory_headroom": "10%"}


def test_families_in_a_table(invoke: Invoke, tmp_path: Path) -> None:
    asked = ("compare", config(tmp_path, TINY), "--gpus", "2xA100-80GB", "--global-batch", "4")
    said = invoke(*asked)
    assert said.exit_code == 0 and max(map(len, said.stdout.splitlines())) <= 80
    found = json.loads(invoke(*asked, "--json").stdout)
    assert [row["chosen"] for row in found["families"]].count(True) == 1
    assert {"one GPU", "data", "pipeline", "tensor"} <= {row["family"] for row in found["families"]}


def test_headroom_is_an_option_and_a_key(invoke: Invoke, tmp_path: Path) -> None:
    asked = ("fit", config(tmp_path, TINY), "--gpus", "1xA100-80GB", "--global-batch", "4", "--json")
    for way in (("--headroom", "50%"), ("--strategy", "memory_headroom=50%")):
        found = json.loads(invoke(*asked, *way).stdout)
        assert found["headroom_bytes"] >= found["memory_bytes"] / 2
    refused = invoke(*asked, "--headroom", "150%")
    assert refused.exit_code == 2 and "memory_headroom" in refused.stderr


def test_no_number_of_gpus_holds_one_sample(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InfeasibleError("wide does not fit", short_by_bytes=2.0**30, term="saved_activations")

    monkeypatch.setattr("autoplan.min_gpus", refuse)
    said = invoke("min-gpus", "gpt2", "--gpu", "T4")
    assert said.exit_code == 1 and said.stderr.startswith("error: wide does not fit")
    answered = invoke("min-gpus", "gpt2", "--gpu", "T4", "--json")
    found = json.loads(answered.stdout)
    assert answered.exit_code == 1 and found["feasible"] is False and found["short_by_bytes"] == 2.0**30
