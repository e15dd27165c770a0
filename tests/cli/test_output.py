"""``-o``: a file or a folder that can be written, or ``-``, which is standard output, for every command that has it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import given as given_any
from hypothesis import strategies as st

from autoplan.cli import console
from autoplan.cli.application import SUMMARIES, command_called
from autoplan.cluster import Cluster
from autoplan.cost_models.calibration import TransferSample, fit
from autoplan.plan import Plan
from tests.support.cli import Invoke

DOCS = Path(__file__).parents[2] / "docs"
# Each command that has -o, up to it.
FILES = {
    "plan": ("gpt2", "--gpus", "8xA100-80GB-SXM"),
    "predict": ("gpt2", "--gpus", "8xA100-80GB-SXM", "--strategy", "data=2"),
    "explain": ("plan.json", "--what-if"),
    "simulate": ("plan.json",),
    "report": ("plan.json",),
    "calibrate": ("--device", "cpu"),
}
FOLDERS = {"export": ("plan.json", "--to", "slurm"), "emit": ("gpt2", "plan.json")}
TAKES_OUTPUT = FILES | FOLDERS


@pytest.fixture
def given(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan file; what would take long answers at once."""
    plan.save(tmp_path / "plan.json")
    samples = [TransferSample(collective="send", ranks=2, bytes=2.0**n, seconds=1e-4 + 2.0**n / 1e9) for n in (12, 24)]
    monkeypatch.chdir(tmp_path)
    for name in ("plan", "predict"):
        monkeypatch.setattr(f"autoplan.{name}", lambda *_, **__: plan)
    monkeypatch.setattr("autoplan.what_if.what_if", lambda plan, **_: plan)
    monkeypatch.setattr("autoplan.calibration.calibrate", lambda **_: fit(Cluster.parse("2xcpu"), samples))
    return tmp_path


def test_these_are_all() -> None:
    assert {name for name in SUMMARIES if "-o" in options_of(name)} == set(TAKES_OUTPUT)


def options_of(name: str) -> set[str]:
    return {option for param in command_called(name).params for option in param.opts}


@pytest.mark.parametrize("name", FILES)
def test_a_dash_prints_what_the_file_would_hold_and_nothing_else(name: str, invoke: Invoke, given: Path) -> None:
    printed = invoke(name, *FILES[name], "-o", "-")
    assert printed.exit_code == 0, printed.stderr
    assert invoke(name, *FILES[name], "-o", "file.toml").exit_code == 0
    assert printed.stdout == (given / "file.toml").read_text() != ""
    assert not (given / "-").exists()


def test_what_goes_into_a_folder_is_printed_file_by_file(invoke: Invoke, given: Path) -> None:
    assert invoke("export", *FOLDERS["export"], "-o", "-").stdout == invoke("export", *FOLDERS["export"]).stdout
    refused = invoke("emit", *FOLDERS["emit"], "-o", "-")
    assert refused.exit_code == 2 and "standard output" in refused.stderr
    assert sorted(path.name for path in given.iterdir()) == ["plan.json"]


@pytest.mark.parametrize("name", sorted(set(TAKES_OUTPUT) - {"emit"}))
def test_a_dash_and_json_are_one_too_many(name: str, invoke: Invoke, given: Path) -> None:
    refused = invoke(name, *TAKES_OUTPUT[name], "-o", "-", "--json")
    assert refused.exit_code == 2
    assert "to standard output, and --json prints there too" in json.loads(refused.stdout)["error"]["what"]


UNWRITABLE = {
    "missing/x": FILES,  # folders are made with the folders above them
    "folder": {**FILES, "emit": ()},  # export writes beside what is there
    "plan.json/x": TAKES_OUTPUT,
    "n" * 300: TAKES_OUTPUT,
    "full/x": {**FILES, "export": ()},  # emit knows when it has a program
}


@pytest.mark.parametrize(("target", "name"), [(target, name) for target, names in UNWRITABLE.items() for name in names])
def test_what_cannot_be_written_is_said_in_one_message(name: str, target: str, invoke: Invoke, given: Path) -> None:
    (given / "folder").mkdir()
    (given / "folder" / "x").touch()
    (given / "full").symlink_to("/proc")  # where not even root makes a file
    refused = invoke(name, *TAKES_OUTPUT[name], "-o", target)
    assert refused.exit_code == 2, refused.stderr
    # The plan is one of an older revision, which a line of its own says before.
    assert refused.stderr.startswith(("error: ", "plan.json: less checked")) and refused.stderr.count("error:") == 1
    assert "Traceback" not in refused.stderr and target in refused.stderr


SAYING_MUCH = ("", "--help", "--version", "plan --help", "models", f"explain {DOCS / 'plan.json'}", "show none.json")


@pytest.mark.parametrize("line", SAYING_MUCH)
def test_a_reader_that_has_enough_ends_any_command_quietly(line: str) -> None:
    """What `| head -1` does: 141 and not a word, of the help and of an error too, where both go there."""
    unread, closed = os.pipe()
    os.close(unread)
    ours = [sys.executable, "-m", "autoplan.cli", *line.split()]
    if "none" not in line:
        done = subprocess.run(ours, stdout=closed, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (141, "")
    assert subprocess.run(ours, stdout=closed, stderr=closed).returncode == 141
    os.close(closed)


def test_a_reader_that_has_enough_and_a_full_disk_are_no_faults() -> None:
    unread, closed = os.pipe()
    os.close(unread)
    with open("/dev/full", "w") as full:
        for into, code, said in ((closed, 141, ""), (full, 2, "error: cannot write: the disk is full")):
            done = subprocess.run(
                [sys.executable, "-m", "autoplan.cli", "clusters"], stdout=into, stderr=subprocess.PIPE, text=True
            )
            assert (done.returncode, done.stderr.split("\n")[0]) == (code, said)
    os.close(closed)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | st.text(),
    lambda parts: st.lists(parts) | st.tuples(parts, parts) | st.dictionaries(st.text(), parts),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given_any(answer=ANYTHING)
def test_json_has_no_figure_that_is_no_number(answer: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        console.result_json(answer)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(printed.getvalue(), parse_constant=refuse)
    assert json.dumps(read) == json.dumps(with_nulls(answer))


def with_nulls(value: Any) -> Any:
    """Through text: NaN and infinities are names there, and nothing else is."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_tables_are_as_wide_as_the_terminal_and_no_wider(
    width: int, plan: Plan, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(plan.save(tmp_path / "plan.json"))
    monkeypatch.setenv("COLUMNS", str(width))
    for asked in (("show", path), ("models",), ("clusters",)):
        longest = max(map(len, invoke(*asked).stdout.splitlines()))
        assert longest <= width
    assert max(map(len, invoke("models").stdout.splitlines())) > width - 10
