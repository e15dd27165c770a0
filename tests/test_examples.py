"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_quickstart_plans_a_model_that_no_machine_here_holds() -> None:
    said = run(str(EXAMPLES / "quickstart.py"))
    assert "On one L4 the answer is no" in said and "GiB" in said


def last_loss(output: str) -> float:
    return float(output.splitlines()[-1].split("loss")[1].split(",")[0])


def test_the_training_script_learns_the_same_alone_and_under_a_forced_plan() -> None:
    script = str(EXAMPLES / "train_gpt.py")
    alone = run(script, "--steps", "5")
    asked = ("--gpus", "4", "--device", "cpu", "--steps", "5", "--strategy", "pipeline=2,tensor=2")
    planned = run("-m", "autoplan.cli", "run", script, *asked)
    assert "4 processes: pipeline 2 x tensor 2" in planned
    assert abs(last_loss(alone) - last_loss(planned)) <= 1e-4


WIDE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8192, 32768), nn.Linear(32768, 8192)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make():
    with torch.device("meta"):
        blocks = nn.Sequential(*(Block() for _ in range(16)))
        return blocks, (torch.empty(64, 8192, dtype=torch.bfloat16),), lambda y: y.float().pow(2).mean()
"""


def test_the_cluster_of_two_kinds_gets_a_plan_that_uses_both(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    cluster, model, plan = EXAMPLES / "two_kinds.toml", f"{tmp_path / 'wide.py'}:make", tmp_path / "plan.json"
    asked = ("--gpus", str(cluster), "--global-batch", "65536", "--precision", "bf16", "-o", str(plan))
    said = run("-m", "autoplan.cli", "plan", model, *asked)
    assert "Layers are split over kinds by their pace" in said
    explained = run("-m", "autoplan.cli", "explain", str(plan))
    assert "on new" in explained and "on old" in explained
