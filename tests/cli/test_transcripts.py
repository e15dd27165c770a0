"""docs/commands.md holds what the commands print today; every command is there."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoplan.cli import completions
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
        # Messages, what is copied and texts in JSON are not broken.
        whole = command.code or command.copied or "--json" in command.line
        assert said and max(map(len, said.splitlines())) <= (1000 if whole else 80), command.line


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
        ("autoplan plan gpt2 --gpus 8xH100+4xH2", {"8xH100+4xH200"}),
        ("autoplan explain plan.json --lay", {"--layer"}),
        ("autoplan export plan.json --to m", {"megatron"}),
        ("autoplan import run.sh --from deep", {"deepspeed"}),
        ("autoplan plan gpt2 --precision fp8", {"fp8"}),
        ("autoplan fit gpt2 --optimizer adaf", {"adafactor"}),
        ("autoplan plan gpt2 --like deepspeed-zero", {f"deepspeed-zero{stage}" for stage in (1, 2, 3)}),
        ("autoplan min-gpus gpt2 --gpu H2", {"H200"}),
        ("autoplan min-gpus gpt2 --gpus 2xH2", {"2xH200"}),
        ("autoplan run train.py --device cu", {"cuda"}),
        ("autoplan calibrate --device c", {"cpu", "cuda"}),
        ("autoplan compare gpt2 --inside-node tensor,d", {"tensor,data"}),
        ("autoplan predict gpt2 --strategy data=4,sch", {"data=4,schedule="}),
        ("autoplan predict gpt2 --strategy data=4,schedule=1", {"data=4,schedule=1f1b"}),
        ("autoplan plan gpt2 --strategy zero_stage=", {f"zero_stage={stage}" for stage in range(4)}),
        ("autoplan explain docs/plan.json --model llama3-8", {"llama3-8b"}),
        ("autoplan explain docs/plan.json --gpus 4xH2", {"4xH200"}),
        ("autoplan explain none.json --layer a", set()),
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


def test_a_shell_completes_the_plans_layers() -> None:
    plan = Plan.load(DOCS / "plan.json")
    context = SimpleNamespace(params={"path": DOCS / "plan.json"})
    name = plan.model.layers[1]
    assert completions.layers(context, name) == [each for each in plan.model.layers if each.startswith(name)]


FREE = {
    "--global-batch", "--seq", "--headroom", "--max-gpus", "--stages", "--time-limit", "--ranks", "--max-restarts",
    "--output", "--config",
}  # fmt: skip


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_option_of_known_values_completes(name: str) -> None:
    """All but numbers, shares, spans and files."""
    from autoplan.cli.application import command_called

    for option in command_called(name).params:
        long = max(option.opts, key=len)
        if option.param_type_name != "option" or option.is_flag or long in FREE:
            continue
        if (name, long) != ("calibrate", "--gpus"):  # a number
            assert option._custom_shell_complete is not None, f"{name} {long}"


def test_the_documents_plans_are_whole() -> None:
    for name in ("plan.json", "pipeline.json"):
        assert Plan.load(DOCS / name).to_json() == (DOCS / name).read_text()
