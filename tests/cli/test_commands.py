"""Commands that need no model: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoplan.cli import answer, options
from autoplan.cli.application import application
from autoplan.errors import InfeasibleError, StrategyError
from autoplan.plan import Plan
from tests.support.cli import Invoke
from tests.support.plans import stored_file


def test_help_lists_every_command_without_loading_torch() -> None:
    code = (
        "import sys\nfrom autoplan.cli.application import application\n"
        "try: application(['--help'])\nexcept SystemExit as done: print(done.code, 'torch' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert finished.stdout.strip().endswith("0 False")
    for command in ("plan", "predict", "explain", "show", "run", "models", "clusters"):
        assert f" {command} " in finished.stdout


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == "autoplan 0.1.0\n"


def test_models_lists_the_presets(invoke: Invoke) -> None:
    listed = {row["name"]: row["parameters"] for row in json.loads(invoke("models", "--json").stdout)["models"]}
    assert listed["llama3.1-405b"] == 405_853_388_800
    needed = {"gpt2", "gpt3-175b", "llama3-8b", "llama3-70b", "mixtral-8x7b", "bert-large", "t5-large", "vit-large"}
    assert needed <= set(listed)
    assert "gpt3-175b" in invoke("models").stdout


def test_clusters_lists_the_kinds(invoke: Invoke) -> None:
    listed = json.loads(invoke("clusters", "--json").stdout)["devices"]
    assert "H100-80GB-SXM" in {row["name"] for row in listed}
    assert all(row["memory_bytes"] > 0 and row["peak_flops"] for row in listed)
    assert "H100-80GB-SXM" in invoke("clusters").stdout


@pytest.mark.parametrize(
    ("arguments", "message", "advice"),
    [
        (("plann",), "No such command 'plann'. Did you mean 'plan'", "autoplan --help"),
        (("plan", "gpt2"), "Missing option '--gpus'", "autoplan plan --help"),
        (
            ("plan", "gpt2", "--gpus", "8", "--global-batch", "many"),
            "Invalid value for '--global-batch'",
            "autoplan plan --help",
        ),
        (("predict", "gpt2", "--gpus", "8"), "predict needs a strategy", "--strategy data=4"),
        (("plan", "gpt2", "--gpus", "8", "--strategy", "tenser=2"), "unknown key `tenser`", "did you mean `tensor`?"),
        (("plan", "gpt2", "--gpus", "8", "--strategy", "tensor"), "'tensor' is not KEY=VALUE", "--strategy data=4"),
        (("plan", "gpt2", "--gpus", "8", "--strategy", "data=two"), "`data` is 'two'", "--strategy data=1"),
        (("plan", "gpt2", "--gpus", "8", "-o", "/no/such/folder/p.json"), "there is no folder /no/such/folder", ""),
        (("explain", "/no/such/plan.json"), "cannot read the plan: No such file", "autoplan plan MODEL"),
    ],
)
def test_bad_usage_is_one_error_on_stderr_and_exit_2(
    invoke: Invoke, arguments: tuple[str, ...], message: str, advice: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr and advice in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("error:") == 1


def test_a_strategy_is_text_of_keys_and_values() -> None:
    assert options.parse_strategy(["data=4, tensor=2", "schedule=gpipe,sequence_parallel=True,recompute=full"]) == {
        "data": 4,
        "tensor": 2,
        "schedule": "gpipe",
        "sequence_parallel": True,
        "recompute": "full",
    }
    assert options.parse_strategy(None) == {}
    with pytest.raises(StrategyError, match="`data` is given twice"):
        options.parse_strategy(["data=4,data=2"])


def test_the_strategy_keys_are_the_planners() -> None:
    from autoplan.search.forced import KEYS, LIMITS

    assert set(options.STRATEGY_KEYS) == {*KEYS, *LIMITS}


def test_a_plan_prints_its_decision_within_80_columns(
    invoke: Invoke, plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer.give(lambda: plan, what="Planning", output=tmp_path / "plan.json", json=False)
    printed = capsys.readouterr()
    assert max(map(len, printed.out.splitlines())) <= 80
    for text in (
        "124 M parameters, bf16, 1024 tokens a sample",
        "uses 4 of 8 GPUs",
        "data 2 x pipeline 2",
        "global batch 16: 8 micro-batches of 1 on each data rank, 1f1b",
        "312.0 ms, 52.5 k tokens/s",
        "optimal, gap 0.0%: 212 plans considered, 10 did not fit, 14 solved",
        "sequence length 1024 (none was given)",
    ):
        assert text in " ".join(printed.out.split())
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["0", "0-1", "0-6", "62", "M", "10.0", "ms", "20.0", "ms", "6.0", "GiB", "none"] in rows
    assert ["1", "2-3", "7-13", "62", "M", "10.0", "ms", "20.0", "ms", "6.0", "GiB", "none"] in rows
    assert "capture 700.0 ms, search 50.0 ms" in printed.err
    assert f"next: autoplan explain {tmp_path / 'plan.json'}" in printed.err
    assert Plan.load(tmp_path / "plan.json") == plan

    shown = invoke("show", str(tmp_path / "plan.json"))
    assert shown.exit_code == 0 and shown.stdout == printed.out


def test_json_is_the_plan_with_its_seconds(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    answer.give(lambda: plan, what="Planning", output=None, json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == plan.to_dict(with_seconds=True)
    assert printed["schema"] == 1 and printed["feasible"] is True and printed["seconds"]["capture"] == 0.7


def nothing_fits() -> Plan:
    raise InfeasibleError(
        "nothing fits: 3.0 GiB short", short_by_bytes=3 * 2.0**30, term="weights", suggestions=("8xH200",)
    )


def test_infeasible_is_an_answer_on_stdout_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as caught:
        answer.give(nothing_fits, what="Planning", output=None, json=True)
    assert caught.value.exit_code == 1
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "feasible": False,
        "reason": "nothing fits: 3.0 GiB short",
        "short_by_bytes": 3 * 2**30,
        "term": "weights",
        "suggestions": ["8xH200"],
    }


def test_infeasible_without_json_goes_the_way_of_all_errors() -> None:
    with pytest.raises(InfeasibleError):
        answer.give(nothing_fits, what="Planning", output=None, json=False)


def test_a_plan_file_in_the_models_place_is_said_to_be_one(invoke: Invoke, plan: Plan, tmp_path: Path) -> None:
    path = str(plan.save(tmp_path / "plan.json"))
    for asked in (("plan", path, "--gpus", "8xH100"), ("fit", path, "--gpus", "8xH100")):
        result = invoke(*asked)
        assert result.exit_code == 2 and "is a plan file, and MODEL is the model that it is for" in result.stderr


def test_a_malformed_plan_file_names_the_field(invoke: Invoke, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json().replace('"pipeline": 2', '"pipeline": "two"'))
    result = invoke("explain", str(path))
    assert result.exit_code == 2
    assert "field `strategy.pipeline`" in result.stderr


def test_a_fault_of_ours_is_short_and_says_how_to_see_more(
    invoke: Invoke, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(path: Path) -> Plan:
        raise KeyError("stages")

    monkeypatch.setattr(Plan, "load", break_down)
    monkeypatch.setenv("AUTOPLAN_TRACEBACK", "0")
    quiet = invoke("show", "plan.json")
    assert quiet.exit_code == 3
    assert quiet.stderr.startswith("error: internal fault: KeyError: 'stages'")
    assert "--verbose" in quiet.stderr and "Traceback" not in quiet.stderr
    assert "Traceback" in invoke("--verbose", "show", "plan.json").stderr


# ------------------------------------------------------------------------------------------------- which plan is read


READERS = ("show", "explain", "simulate", "report -o page.html", "export --to megatron", "diff plan.json")
OLD, NEW = stored_file(4), stored_file()


def with_plan(command: str, plan: str) -> list[str]:
    """The command's words with ``plan`` as its last argument before the options."""
    name, *rest = command.split()
    return [name, *(word for word in rest if word == "plan.json"), plan, *(w for w in rest if w != "plan.json")]


@pytest.mark.parametrize("command", READERS)
def test_a_plan_is_read_from_standard_input(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(NEW.read_text())
    from_file, piped = (
        CliRunner().invoke(application, [*with_plan(command, name), "--json"], input=given)
        for name, given in (("plan.json", None), ("-", NEW.read_text()))
    )
    assert piped.exit_code == from_file.exit_code == 0 and piped.stdout == from_file.stdout
    for given, said in (("", "not JSON"), ("{}", "no plan of schema"), (b"\xff\xfe", "not a text")):
        refused = CliRunner().invoke(application, with_plan(command, "-"), input=given)
        assert refused.exit_code == 2 and said in refused.stderr and "standard input" in refused.stderr


@pytest.mark.parametrize("command", READERS)
def test_of_an_older_file_it_is_said_that_less_of_it_was_checked(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(NEW.read_text())
    for path, older in ((OLD, True), (NEW, False)):
        done = CliRunner().invoke(application, [*with_plan(command, str(path)), "--json"])
        line = f"{path}: less checked than a plan of today: it was written as revision 4, before"
        assert (line in done.stderr) == older
        answer = json.loads(done.stdout)
        if command == "show":
            assert answer["first_revision"] == (4 if older else 7)
        elif command.startswith("diff"):
            assert list(answer["unchecked"]) == ([str(path)] if older else [])
        else:
            assert answer["unchecked"].startswith("it was written as revision 4") == older


def test_standard_input_holds_one_plan(invoke: Invoke) -> None:
    done = invoke("diff", "-", "-")
    assert done.exit_code == 2 and "standard input holds one plan" in done.stderr
