"""autoplan emit: a folder to read and run, or one message."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from autoplan.cli.application import application

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def planned(folder: Path, *extra: str) -> tuple[str, str]:
    """A config and a plan for it."""
    config, plan = folder / "config.json", folder / "plan.json"
    config.write_text(json.dumps(CONFIG))
    command = ["plan", str(config), "--gpus", "4xA100-80GB", "--global-batch", "8", "--seq", "32", "-o", str(plan)]
    result = CliRunner().invoke(application, [*command, *extra])
    assert result.exit_code == 0, result.output
    return str(config), str(plan)


def test_a_config_on_meta_gets_a_program_with_the_values_of_its_buffers(tmp_path: Path) -> None:
    config, plan = planned(tmp_path, "--strategy", "tensor=2,pipeline=2")

    result = CliRunner().invoke(application, ["emit", config, plan, "-o", str(tmp_path / "program"), "--json"])

    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert {"model.py", "train.py", "parallel.py", "buffers.pt"} <= set(written["files"])
    buffers = torch.load(tmp_path / "program" / "buffers.pt", weights_only=True)
    frequencies = buffers["model.rotary_emb.inv_freq"]
    assert torch.allclose(frequencies, 10000.0 ** -(torch.arange(0, 16, 2) / 16))


def test_the_program_is_started_with_as_many_ranks_as_the_plan_uses(tmp_path: Path) -> None:
    config, plan = planned(tmp_path, "--max-gpus", "1")

    result = CliRunner().invoke(application, ["emit", config, plan, "-o", str(tmp_path / "program")])

    assert result.exit_code == 0, result.output
    assert "torchrun --nproc-per-node 1 train.py" in result.stdout


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    config, plan = planned(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")

    result = CliRunner().invoke(application, ["emit", config, plan, "-o", str(tmp_path / "kept")])

    assert result.exit_code == 2
    assert "nothing is overwritten" in result.stderr
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    _, plan = planned(tmp_path)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}))

    result = CliRunner().invoke(application, ["emit", str(other), plan, "-o", str(tmp_path / "program")])

    assert result.exit_code == 2
    assert "the plan was made for" in result.stderr
    assert not (tmp_path / "program").exists()
