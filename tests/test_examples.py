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
