"""The examples of the bridges run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BRIDGES = Path(__file__).parents[2] / "examples/bridges"


def run(*arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def torchrun(ranks: int, script: str) -> str:
    return run("-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(BRIDGES / script))


def losses(said: str) -> list[float]:
    line = next(line for line in said.splitlines() if ": loss " in line)
    return [float(number) for number in line.partition(": loss ")[2].split()]


@pytest.mark.wide
def test_an_emitted_program_runs_under_torchrun() -> None:
    said = run(str(BRIDGES / "emit.py"))
    assert "model.py" in said
    assert "step 2: loss" in said


@pytest.mark.bridges
@pytest.mark.parametrize(("script", "ranks"), [("trainer.py", 4), ("lightning_fit.py", 2)])
def test_other_peoples_loops_learn(script: str, ranks: int) -> None:
    found = losses(torchrun(ranks, script))
    assert found[-1] < found[0]


@pytest.mark.bridges
def test_every_tool_reads_what_is_exported_for_it() -> None:
    said = run(str(BRIDGES / "exports.py"))
    for tool in ("torchtitan", "megatron", "deepspeed", "accelerate", "fsdp2", "transformers"):
        assert f"\n{tool} reads: " in said
    assert "is not installed" not in said
