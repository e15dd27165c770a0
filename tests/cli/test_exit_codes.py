"""Every command that reads a file, given one that is none: exit code 2, one message that says where, no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoplan.calibration.measure import most_processes
from autoplan.cli.application import application
from autoplan.cli.run import MOST_PROCESSES
from tests.support.cli import Invoke
from tests.support.plans import stored_file

PLAN = stored_file()
READERS = (
    "show FILE",
    "explain FILE",
    "explain FILE --what-if",
    "explain FILE --operators",
    "simulate FILE",
    "report FILE -o page.html",
    "diff FILE plan.json",
    "diff plan.json FILE",
    "export FILE --to megatron",
    "verify tiny.json FILE",
    "emit tiny.json FILE -o program",
)
NO_PLANS = {
    "missing.json": "cannot read the plan: No such file",
    "folder": "cannot read the plan: Is a directory",
    "bytes.json": "cannot read the plan: not a text file",
    "empty.json": "not JSON",
    "list.json": "no plan of schema 1",
    "tiny.json": "no plan of schema 1: it has no `schema`",
    "no.json": "this file says that nothing fits",
    "locked.json": "cannot read the plan: Permission denied",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(PLAN.read_text())
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "tiny.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    (tmp_path / "no.json").write_text(json.dumps({"schema": 1, "feasible": False, "suggestions": []}))
    (tmp_path / "locked.json").write_text("{}")
    (tmp_path / "locked.json").chmod(0)
    return tmp_path


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("file", NO_PLANS)
def test_a_file_that_is_no_plan(folder: Path, command: str, file: str) -> None:
    if file == "locked.json" and _may_read(folder / file):
        pytest.skip("nothing is locked for root")
    done = CliRunner().invoke(application, command.replace("FILE", file).split())
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and NO_PLANS[file] in done.stderr and file in done.stderr
    assert "try:" in done.stderr and "Traceback" not in done.stderr
    assert {path.name for path in folder.iterdir()} == {*NO_PLANS, "plan.json"} - {"missing.json"}


def _may_read(path: Path) -> bool:
    try:
        path.read_text()
    except PermissionError:
        return False
    return True


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import plan.json --from deepspeed", "a plan of autoplan's own, and no configuration of deepspeed"),
        ("import empty.json --from deepspeed", "empty.json, "),
        ("import empty.json --from nothing", "at:    --from"),
        ("import folder", "cannot read it: Is a directory"),
        (f"run tiny.json --device cpu --gpus {MOST_PROCESSES + 1}", f"legal: 1 to {MOST_PROCESSES}"),
        (f"calibrate --device cpu --gpus {most_processes() + 1}", f"legal: 1 to {most_processes()}"),
        ("min-gpus gpt2 --gpu=", "name the kind of GPU once"),
    ],
)
def test_other_bad_input(folder: Path, invoke: Invoke, line: str, said: str) -> None:
    """A hundred thousand processes are refused, and not started."""
    done = invoke(*line.split())
    assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr
