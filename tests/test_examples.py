"""The examples run as they stand."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def attempt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command that may fail."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def run(*arguments: str) -> str:
    finished = attempt(*arguments)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_quickstart_plans_a_model_that_no_machine_here_holds() -> None:
    said = run(str(EXAMPLES / "quickstart.py"))
    assert "On one L4 the answer is no" in said and "GiB" in said


def test_an_operator_of_ones_own_is_verified_and_a_wrong_rule_found(tmp_path: Path) -> None:
    model, plan = f"{EXAMPLES / 'own_operator.py'}", str(tmp_path / "plan.json")
    run("-m", "autoplan.cli", "plan", f"{model}:build", "--gpus", "2xA100", "--strategy", "tensor=2", "-o", plan)
    assert "the same numbers" in run("-m", "autoplan.cli", "verify", f"{model}:build", plan)
    wrong = attempt("-m", "autoplan.cli", "verify", f"{model}:wrong", plan)
    assert wrong.returncode == 1
    assert "First: the value of `centre`, layer blocks.0" in " ".join(wrong.stdout.split())
    # An emitted program has nothing but torch.
    emitted = attempt("-m", "autoplan.cli", "emit", f"{model}:build", plan, "-o", str(tmp_path / "program"))
    assert emitted.returncode == 2 and "operator example::centre is not torch's" in emitted.stderr
    assert "own_operator.py:" in emitted.stderr and not (tmp_path / "program").exists()


def last_loss(output: str) -> float:
    return float(output.splitlines()[-1].split("loss")[1].split(",")[0])


def test_the_training_script_learns_the_same_alone_and_under_a_forced_plan(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_gpt.py")
    alone = run(script, "--steps", "5")
    asked = ("--gpus", "4", "--device", "cpu", "--steps", "5", "--strategy", "pipeline=2,tensor=2")
    asked += ("--metrics", str(tmp_path))
    planned = run("-m", "autoplan.cli", "run", script, *asked)
    assert "4 processes: pipeline 2 x tensor 2" in planned
    assert "predicted    measured" in planned and list(tmp_path.glob("events.out.tfevents.*"))
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


@pytest.mark.wide
def test_a_hugging_face_model_is_planned_trained_and_read_again() -> None:
    said = run(str(EXAMPLES / "hugging_face.py"))
    assert "llama3-8b on 8 H100: data 8" in said
    losses = [float(text) for text in said.split("processes:")[1].split("\n")[0].split()]
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    assert float(said.rsplit(None, 1)[1]) < losses[-1]  # after the last step it is lower still


@pytest.mark.wide
def test_a_model_file_is_planned_by_the_command_line_and_by_itself() -> None:
    itself = run(str(EXAMPLES / "own_model.py"))
    asked = (f"{EXAMPLES / 'own_model.py'}:build", "--gpus", "8xA100-80GB", "--global-batch", "512", "--json")
    found = json.loads(run("-m", "autoplan.cli", "plan", *asked))
    assert f"takes {found['predicted']['step_time_s'] * 1e3:.1f} ms" in " ".join(itself.split())


@pytest.mark.wide
def test_forced_strategies_are_no_faster_than_the_planners_own() -> None:
    rows = run(str(EXAMPLES / "forced_strategies.py")).splitlines()[1:]
    steps = [float(found[1]) for row in rows if (found := re.search(r"([\d.]+) ms", row))]
    assert len(rows) == 7 and rows[0].startswith("the planner's own")
    assert all(step >= steps[0] * 0.98 for step in steps)  # within 2% less parallelism wins


@pytest.mark.wide
def test_two_kinds_of_gpus_are_faster_than_the_new_one_alone() -> None:
    said = run(str(EXAMPLES / "heterogeneous.py"))
    assert "on new: layers 0 to" in said and "on old: layers" in said and "(+" in said


@pytest.mark.wide
def test_a_checkpoint_goes_on_elsewhere_as_if_nothing_had_happened() -> None:
    said = run(str(EXAMPLES / "resume_elsewhere.py"))
    assert "on 4 GPUs, pipeline 2 x tensor 2" in said and "on 2 GPUs, data 2, ZeRO-1" in said
    assert float(re.search(r"at most (\S+) apart", said)[1]) < 1e-4  # type: ignore[index]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


FAKE = {
    "scontrol": "echo localhost",
    "srun": 'exec "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.wide
def test_several_machines_by_torchrun_and_by_slurm(tmp_path: Path) -> None:
    """Two launchers on this machine stand for two machines; then a Slurm of one, whose commands are scripts here."""
    for name, text in FAKE.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    folder = EXAMPLES / "multi_node"
    common = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AUTOPLAN_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    environment = os.environ | common | {"NODES": "2", "GPUS": "1", "PORT": free_port(), "AUTOPLAN_GPUS": "2"}
    machines = [
        subprocess.Popen(
            [str(folder / "torchrun.sh")], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [machine.communicate(timeout=180) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    first = "".join(out for out, _ in said)
    slurm = {"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    environment = os.environ | common | slurm | {"SLURM_SUBMIT_DIR": str(folder), "PORT": free_port()}
    batch = subprocess.run(
        ["bash", str(folder / "train.sbatch")],
        env=environment | {"AUTOPLAN_GPUS": "2"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert batch.returncode == 0, batch.stderr
    losses = [re.findall(r"loss (\S+)", text) for text in (first, batch.stdout)]
    assert len(losses[0]) == 5 and losses[0] == losses[1]


def cells() -> list[str]:
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4 and not [cell for cell in book["cells"] if cell.get("outputs")]
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


@pytest.mark.wide
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell as a kernel runs it: in one namespace, the last expression shown."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    with redirect_stdout(io.StringIO()):
        for number, text in enumerate(cells()):
            tree = ast.parse(text)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"cell {number}", "exec"), names)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names))
    plan = shown[0]
    assert plan._repr_html_().startswith("<div") and plan.strategy.describe() in plan._repr_html_()
    assert "a program of 2 processes" in names["shown"]
    assert names["losses"] == sorted(names["losses"], reverse=True)
    assert (tmp_path / "plan.json").is_file()


def test_every_example_is_listed_and_tested() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in files:
        if path.name != "README.md":
            named = path.parent if path.parent != EXAMPLES else path
            assert f"({named.relative_to(EXAMPLES)})" in listed, path
    sources = [*Path(__file__).parent.rglob("test_*.py"), EXAMPLES.parent / "Makefile"]
    tested = "".join(path.read_text(encoding="utf-8") for path in sources)
    assert not [path.name for path in files if path.stem not in tested]
