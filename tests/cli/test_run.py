"""``autoplan run`` in real processes: what the script sees, and whose exit code comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AUTOPLAN = (sys.executable, "-m", "autoplan.cli")

SCRIPT = """
import os, pathlib, sys
rank = os.environ["RANK"]
names = ("WORLD_SIZE", "AUTOPLAN_GPUS", "AUTOPLAN_DEVICE", "OMP_NUM_THREADS")
pathlib.Path(sys.argv[1], rank).write_text(" ".join(os.environ[name] for name in names) + " " + " ".join(sys.argv[2:]))
sys.exit(int(os.environ.get("FAIL_WITH", 0)) if rank == "1" else 0)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return subprocess.run(
        [*AUTOPLAN, "run", *arguments], capture_output=True, text=True, timeout=60, env=clean | environment
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_each_rank_sees_gpus_device_and_the_scripts_own_arguments(script: str, tmp_path: Path) -> None:
    finished = run(script, str(tmp_path), "--steps", "3", "--gpus", "2", "--device", "cpu", "--", "--gpus", "9")
    assert finished.returncode == 0, finished.stderr
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text() == "2 2 cpu 1 --steps 3 --gpus 9"


def test_the_exit_code_is_the_failed_ranks(script: str, tmp_path: Path) -> None:
    assert run(script, str(tmp_path), "--gpus", "2", "--device", "cpu", FAIL_WITH="7").returncode == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.py", "--gpus", "2", "--device", "cpu"), "no such script: none.py"),
        (("SCRIPT", "--gpus", "0", "--device", "cpu"), "number of GPUs: 0"),
        (("SCRIPT", "--gpus", "2x8xH100"), "run starts the processes of one machine"),
        (("SCRIPT", "--gpus", "2", "--device", "tpu"), "unknown device 'tpu'"),
        (("SCRIPT", "--gpus", "4096"), "4096 GPUs were asked for and this machine has"),
        (("SCRIPT",), "Missing option '--gpus'"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(script: str, arguments: tuple[str, ...], message: str) -> None:
    finished = run(*(script if argument == "SCRIPT" else argument for argument in arguments))
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: ") and message in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("code", [0, 7])
def test_json_is_alone_on_stdout(tmp_path: Path, code: int) -> None:
    """What the script prints goes to stderr; a --json after -- is the script's."""
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    name = str(tmp_path / "train.py")
    finished = run(name, "--gpus", "2", "--device", "cpu", "--json", "--", str(code), "--json")
    ended = {"schema": 1, "exit_code": code, "script": name, "device": "cpu", "processes": 2}
    assert finished.returncode == code and json.loads(finished.stdout) == ended
    assert finished.stderr.count(f"['{code}', '--json']") >= 1
    plain = run(name, "--gpus", "1", "--device", "cpu", "--", "0", "--json")
    assert plain.stdout == "['0', '--json']\n"
