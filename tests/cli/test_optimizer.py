"""``--optimizer``: its state is what the plan counts, and an unknown one is refused before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import Invoke

TINY = {"model_type": "gpt2", "n_embd": 96, "n_layer": 2, "n_head": 6, "n_positions": 128, "vocab_size": 512}
PARAMETERS = 285_312  # 512 x 96 + 128 x 96 + 2 blocks of 111 840 + the last norm's 192, the head tied


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.mark.parametrize(("optimizer", "state"), [("sgd", 0), ("sgd-momentum", 4)])
def test_the_optimizer_decides_its_state(invoke: Invoke, tiny: str, optimizer: str, state: int) -> None:
    result = invoke("plan", tiny, "--gpus", "1xA100-80GB", "--precision", "bf16", "--optimizer", optimizer, "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["optimizer"] == optimizer
    assert plan["model"]["parameters"] == PARAMETERS
    assert plan["stages"][0]["memory_terms"].get("optimizer_state", 0) == state * PARAMETERS


@pytest.mark.parametrize("command", [("plan",), ("predict", "--strategy", "data=1")])
def test_an_unknown_optimizer_is_refused(invoke: Invoke, tiny: str, command: tuple[str, ...]) -> None:
    name, *options = command
    result = invoke(name, tiny, "--gpus", "1xA100-80GB", *options, "--optimizer", "adamw9bit")
    assert result.exit_code == 2
    assert "unknown optimizer: 'adamw9bit'" in result.stderr
    assert "did you mean 'adamw8bit'?" in result.stderr
