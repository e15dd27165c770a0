"""docs/commands.md holds what the commands print today; every command is there."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from autoplan.cli.application import SUMMARIES
from autoplan.plan import Plan
from tests.support.cli import Invoke

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TRANSCRIPTS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "transcripts.py"))
COMMANDS = TRANSCRIPTS["COMMANDS"]


def text() -> str:
    return (DOCS / "commands.md").read_text(encoding="utf-8")


def test_every_command_has_a_transcript_of_80_columns() -> None:
    assert {command.line.split()[0] for command in COMMANDS} == set(SUMMARIES)
    for command in COMMANDS:
        said = TRANSCRIPTS["written"](text(), command.line)
        assert said and max(map(len, said.splitlines())) <= (1000 if command.code or command.copied else 80), (
            command.line
        )


def folder_with_plans(folder: Path) -> Path:
    TRANSCRIPTS["prepare"](folder)
    for name in ("plan.json", "pipeline.json"):
        shutil.copy(DOCS / name, folder)
    return folder


def test_transcripts_of_commands_that_need_no_model(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_with_plans(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    for command in COMMANDS:
        if command.quick:
            done = invoke(*command.line.split())
            said = "".join(f"{line.rstrip()}\n" for line in (done.stdout or done.stderr).splitlines())
            assert said == TRANSCRIPTS["written"](text(), command.line), "run scripts/transcripts.py"


@pytest.mark.wide
def test_all_transcripts(tmp_path: Path) -> None:
    TRANSCRIPTS["prepare"](tmp_path)
    stale = TRANSCRIPTS["differences"](text(), tmp_path, COMMANDS)
    assert not stale, "run scripts/transcripts.py:\n" + "\n\n".join(stale)
    for name in ("plan.json", "pipeline.json"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), "run scripts/transcripts.py"


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_help_has_an_example(invoke: Invoke, name: str) -> None:
    said = " ".join(invoke(name, "--help").stdout.split())
    assert f"Example: autoplan {name}" in said
    assert max(map(len, invoke(name, "--help").stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("autoplan pl", {"plan"}),
        ("autoplan plan llama3-", {"llama3-8b", "llama3-70b"}),
        ("autoplan plan gpt2 --gpus 4xH2", {"4xH200"}),
        ("autoplan explain plan.json --lay", {"--layer"}),
    ],
)
def test_a_shell_completes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, offered: set[str]
) -> None:
    from autoplan.cli.application import application

    monkeypatch.setenv("_AUTOPLAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        application(prog_name="autoplan")
    assert ended.value.code == 0
    assert set(capfd.readouterr().out.split()) == offered


def test_the_documents_plans_are_whole() -> None:
    for name in ("plan.json", "pipeline.json"):
        assert Plan.load(DOCS / name).to_json() == (DOCS / name).read_text()
