"""Standard streams that are closed, full or gone: the exit code is the answer's, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoplan.cli.streams import Closed
from autoplan.plan import Plan
from tests.support.plans import stored_file

AUTOPLAN = f"{sys.executable} -m autoplan.cli"
FULL = Path("/dev/full")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where ``plan.json`` is."""
    Plan.load(stored_file(5)).save(tmp_path / "plan.json")
    return tmp_path


def ends(folder: Path, command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a line of the shell."""
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["clusters", "--help", "show plan.json --json", "explain plan.json"])
def test_a_result_that_cannot_be_printed_is_bad_input(folder: Path, command: str) -> None:
    code, out, said = ends(folder, f"{AUTOPLAN} {command} >&-")
    assert (code, out) == (2, "")
    assert said.startswith("error: cannot print the result: standard output is closed\n") and "Traceback" not in said
    assert ends(folder, f"{AUTOPLAN} {command} <&- >&- 2>&-") == (2, "", "")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_nor_is_one_on_a_full_disk(folder: Path) -> None:
    code, _, said = ends(folder, f"{AUTOPLAN} clusters >/dev/full")
    assert code == 2 and said.startswith("error: cannot write: the disk is full\n  at:    standard output")


@pytest.mark.parametrize("streams", ["2>&-", "<&-", "2>&- <&-", *(["2>/dev/full"] if FULL.exists() else [])])
def test_messages_may_be_lost_and_the_answer_stays(folder: Path, streams: str) -> None:
    code, out, said = ends(folder, f"{AUTOPLAN} clusters {streams}")
    assert code == 0 and "H100" in out and "Traceback" not in said
    assert ends(folder, f"{AUTOPLAN} show missing.json {streams}")[0] == 2
    assert ends(folder, f"{AUTOPLAN} show {streams}")[0] == 2


def test_what_is_written_to_a_file_needs_no_output(folder: Path) -> None:
    """Nothing that is opened gets the number of a closed stream, where messages would land in it."""
    for line in ("report plan.json -o page.html", "simulate plan.json -o trace.json"):
        assert ends(folder, f"{AUTOPLAN} {line} <&- >&- 2>&-") == (0, "", "")
    assert (folder / "page.html").read_text().startswith("<!doctype html>")
    assert (folder / "trace.json").read_text().endswith("}\n")


def test_processes_that_are_started_find_the_null_device(folder: Path) -> None:
    (folder / "train.py").write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\nsys.stdin.read()\n")
    line = f"{AUTOPLAN} run train.py --gpus 1 --device cpu"
    assert ends(folder, f"{line} <&- >&- 2>&-") == (0, "", "")
    assert ends(folder, f"{line} >&-")[:2] == (0, "")


def test_a_closed_stream_says_which_it_is() -> None:
    with pytest.raises(OSError, match="standard output is closed"):
        Closed("output", 1).write("x")
    with pytest.raises(OSError, match="standard input is closed"):
        Closed("input", 0).read()
    assert Closed("output", 1).write("") == 0
