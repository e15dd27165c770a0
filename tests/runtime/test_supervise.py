"""``autoplan run``'s ranks: who failed, who goes on, and that what they train is what an undisturbed run trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autoplan.errors import RuntimeFault
from autoplan.runtime.supervise import Job, supervise
from tests.support.training import LEARNING_RATE, train_alone

# Each rank notes what it was told; then some do themselves harm, in each attempt others.
PLAIN = """
import os, pathlib, signal, sys, time
folder, *harms = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), int(os.environ["AUTOPLAN_RESTARTS"])
told = " ".join(os.environ[name] for name in ("WORLD_SIZE", "AUTOPLAN_GPUS"))
pathlib.Path(folder, f"{attempt}.{rank}").write_text(told)
pathlib.Path(folder, f"pid.{attempt}.{rank}").write_text(str(os.getpid()))
harm = harms[attempt].split(":") if attempt < len(harms) else ["0", "none"]
if str(rank) in harm[0].split(",") and harm[1] != "none":
    while len(list(pathlib.Path(folder).glob(f"pid.{attempt}.*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)  # the others are there
    if harm[1] == "exit":
        sys.exit(7)
    os.kill(os.getpid(), getattr(signal, harm[1]))
    time.sleep(600)
elif harm[1] != "none":
    time.sleep(600)  # waits for the others
"""


def run(folder: Path, *harms: str, ranks: int = 3, max_restarts: int = 0) -> int:
    script = folder / "script.py"
    script.write_text(PLAIN)
    command = (str(script), str(folder), *harms)
    return supervise(Job(command=command, device="cpu", kind="xH100", max_restarts=max_restarts), ranks)


def attempts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("[0-9].*"))}


def assert_all_gone(folder: Path) -> None:
    for file in folder.glob("pid.*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_those_that_did_not_fail_start_again_and_know_how_many_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "1:SIGKILL", "0:exit", max_restarts=2) == 0
    assert attempts(tmp_path) == {
        **dict.fromkeys(("0.0", "0.1", "0.2"), "3 3xH100"),
        **dict.fromkeys(("1.0", "1.1"), "2 2xH100"),
        "2.0": "1 1xH100",
    }
    assert_all_gone(tmp_path)
    said = capfd.readouterr().err
    assert "rank 1 was killed by SIGKILL" in said
    assert "restart 1 of 2, on 2 of 3 ranks" in said
    assert "rank 0 left with exit code 7" in said
    assert "restart 2 of 2, on 1 of 2 ranks" in said


def test_a_stopped_rank_is_left_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "0:SIGSTOP", ranks=2, max_restarts=1) == 0
    assert "rank 0 is stopped" in capfd.readouterr().err
    assert attempts(tmp_path)["1.0"] == "1 1xH100"
    assert_all_gone(tmp_path)


def test_without_restarts_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "2:exit") == 7
    with pytest.raises(RuntimeFault, match="rank 1 was killed by SIGKILL"):
        run(tmp_path, "1:SIGKILL")
    assert_all_gone(tmp_path)


def test_where_all_fail_by_themselves_nothing_starts_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "0,1:exit", ranks=2, max_restarts=3) == 7
    assert "a restart would fail alike" in capfd.readouterr().err
    assert set(attempts(tmp_path)) == {"0.0", "0.1"}


SHARED = """
import torch
from torch import nn

STEPS, SAMPLES, WIDTH = 8, 12, 16

def model():
    torch.manual_seed(0)
    return Model().double()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)

def batches():
    torch.manual_seed(1)
    return [{name: torch.randn(SAMPLES, WIDTH, dtype=torch.float64) for name in "xy"} for _ in range(STEPS)]
"""

TRAINING = """
import os, pathlib, signal, sys
import autoplan
from shared import *

folder = pathlib.Path(sys.argv[1])
world = int(os.environ["WORLD_SIZE"])
strategy = {"data": world, "zero_stage": 1}
program = autoplan.compile(model(), gpus=3, example_inputs=batches()[0], strategy=strategy)
optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
checkpoints = autoplan.Checkpoints(folder / "run", program, optimizer)
start = checkpoints.resume()
first = start.step if start else 0
for step in range(first, STEPS):
    if step == 5 and world == 3 and os.environ["RANK"] == "1":
        checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    program.step(batches()[step])
    program.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    if step % 2:
        checkpoints.save(step + 1)
checkpoints.wait()
state = program.state_dict()
if os.environ["RANK"] == "0":
    torch.save({"first": first, "world": world, "state": state}, folder / "final.pt")
"""


@pytest.mark.wide
def test_a_run_that_lost_a_rank_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "autoplan.cli", "run", str(tmp_path / "train.py"), str(tmp_path)]
    finished = subprocess.run(
        [*command, "--gpus", "3", "--device", "cpu", "--max-restarts", "1"],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    assert "rank 1 was killed by SIGKILL" in finished.stderr
    assert "restart 1 of 1, on 2 of 3 ranks" in finished.stderr
    assert "Traceback" not in finished.stderr
    found = torch.load(tmp_path / "final.pt")
    assert (found["first"], found["world"]) == (4, 2)

    names: dict[str, object] = {}
    exec(SHARED, names)
    alone = names["model"]()  # type: ignore[operator]
    assert isinstance(alone, nn.Module)
    expected = train_alone(alone, names["batches"]())  # type: ignore[operator]
    for name, weight in expected.weights.items():
        bound = 1e-10 * (weight.norm().item() + LEARNING_RATE * weight.numel() ** 0.5)
        assert (found["state"][name] - weight).norm().item() <= bound, name
