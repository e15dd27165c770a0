"""What every command prints with --json is what docs/answers.schema.json says of it, and nothing else is."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from autoplan.cli.application import SUMMARIES, application
from autoplan.cluster import Cluster
from autoplan.cost_models.calibration import TransferSample, fit
from autoplan.plan import Plan
from autoplan.report.answers import ANSWERS, answers_schema
from autoplan.request import AskedModel, Traced
from tests.support.cli import Invoke

DOCS = Path(__file__).parents[2] / "docs"
TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 128}
# 3.2 billion parameters in one block: 16 bytes each is thrice what a T4 holds.
WIDE = TINY | {"n_embd": 16384, "n_layer": 1, "n_head": 64}
DEEPSPEED = {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
OF = "--global-batch 16 --seq 64 --precision bf16"
ON = f"--gpus 4xA100-80GB {OF}"

# Each way that a command answers, and its exit code; the first two write the plans that the others read.
ASKED = {
    f"plan tiny.json {ON} -o plan.json": 0,
    f"predict tiny.json {ON} --strategy pipeline=2,data=2,micro_batch_size=2,schedule=1f1b -o pipeline.json": 0,
    "plan wide.json --gpus 1xT4 --global-batch 1 --precision fp16": 1,
    f"fit tiny.json {ON}": 0,
    "fit wide.json --gpus 1xT4 --global-batch 1 --precision fp16": 1,
    f"min-gpus tiny.json --gpu H100 {OF}": 0,
    f"compare tiny.json {ON}": 0,
    "explain plan.json": 0,
    "explain pipeline.json --operators --model tiny.json": 0,
    "explain pipeline.json --layer 1 --model tiny.json": 0,
    "show pipeline.json": 0,
    "show pipeline.json --timeline": 0,
    "simulate pipeline.json -o trace.json": 0,
    "simulate pipeline.json": 0,
    "report pipeline.json -o page.html": 0,
    "diff plan.json pipeline.json": 0,
    "verify tiny.json pipeline.json": 0,
    "emit tiny.json pipeline.json -o program": 0,
    "export pipeline.json --to megatron": 0,
    "import ds_config.json": 0,
    "run train.py --gpus 2 --device cpu": 3,
    "models": 0,
    "clusters": 0,
    "doctor": 0,
    "calibrate --device cpu --gpus 2 --quick": 0,
}
PLANS = {"plan", "predict", "show"}
MAY_BE_INFEASIBLE = {"plan", "predict", "fit", "min-gpus"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the commands print, by command line; only calibrate's measuring is left out."""
    folder = tmp_path_factory.mktemp("answers")
    for name, values in (("tiny", TINY), ("wide", WIDE), ("ds_config", DEEPSPEED)):
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "train.py").write_text("print('not mine')\nraise SystemExit(3)\n")
    sizes = (2.0**12, 2.0**24)
    measured = [TransferSample(collective="send", ranks=2, bytes=n, seconds=1e-4 + n / 1e9) for n in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(AskedModel, "trace", traced_once())
        patch.setattr("autoplan.calibration.calibrate", lambda **_: fit(Cluster.parse("2xcpu"), measured))
        found = {}
        for line, code in ASKED.items():
            done = CliRunner().invoke(application, [*shlex.split(line), "--json"])
            healthy = done.exit_code == code or line == "doctor"  # of which the machine decides
            assert healthy, f"{line}: {done.stderr}"
            found[line] = json.loads(done.stdout)
        yield found


def traced_once() -> Callable[[AskedModel, Cluster], Traced]:
    """``AskedModel.trace`` that traces no model twice: most of what the commands take, and no part of their answers."""
    trace, traced = AskedModel.trace, dict[tuple[Any, ...], Traced]()

    def once(asked: AskedModel, cluster: Cluster) -> Traced:
        key = (asked, cluster.device.is_cpu, asked.global_batch or cluster.gpus)
        if key not in traced:
            traced[key] = trace(asked, cluster)
        return traced[key]

    return once


@functools.cache
def published() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((DOCS / "answers.schema.json").read_text(encoding="utf-8"))
    return schema


def accepts(command: str, answer: Any) -> bool:
    """Whether the published schema takes ``answer`` for one of ``command``."""
    return Draft202012Validator({"$ref": f"#/$defs/{command}", "$defs": published()["$defs"]}).is_valid(answer)


def test_the_published_schema_is_the_codes() -> None:
    assert published() == answers_schema(), "run scripts/plan_schema.py"
    Draft202012Validator.check_schema(published())
    assert set(ANSWERS) == set(SUMMARIES) == {line.split()[0] for line in ASKED}


@pytest.mark.parametrize("line", ASKED)
def test_an_answer_is_its_commands(answers: dict[str, Any], line: str) -> None:
    command, answer = line.split()[0], answers[line]
    assert accepts(command, answer)
    assert Draft202012Validator(published()).is_valid(answer)
    shared = next((s for s in (PLANS, MAY_BE_INFEASIBLE) if command in s and _is_shared(answer, s)), {command})
    assert {other for other in ANSWERS if accepts(other, answer)} == shared


def _is_shared(answer: Any, among: set[str]) -> bool:
    if among is PLANS:
        return "certificate" in answer and "timeline" not in answer
    return answer.get("feasible") is False and "reason" in answer


@pytest.mark.parametrize("line", ASKED)
def test_an_answer_without_a_field_or_with_one_of_another_type_or_one_more_is_none(
    answers: dict[str, Any], line: str
) -> None:
    command, answer = line.split()[0], answers[line]
    # A plan is one without the seconds it took, and one without its timeline.
    for name in answer.keys() - {"seconds", "timeline"} if "certificate" in answer else answer:
        assert not accepts(command, {key: value for key, value in answer.items() if key != name}), name
    for name in answer:
        assert not accepts(command, answer | {name: [[]]}), name
    assert not accepts(command, answer | {"further": 1})


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (f"plan tiny.json {ON} -o plan.json", ("stages", 0, "send_s")),
        (f"plan tiny.json {ON} -o plan.json", ("predicted", "mfu")),
        (f"plan tiny.json {ON} -o plan.json", ("strategy", "zero_stage")),
        (f"compare tiny.json {ON}", ("families", 0, "family")),
        ("show pipeline.json --timeline", ("timeline", "ranks", 1, "actions", 2, "start_s")),
        ("verify tiny.json pipeline.json", ("static", 0, "where")),
        ("models", ("models", 0, "parameters")),
        ("clusters", ("devices", 0, "intra", "bytes_per_s")),
    ],
)
def test_nor_is_one_where_a_field_deeper_in_it_is_missing_or_mistyped(
    answers: dict[str, Any], line: str, at: tuple[Any, ...]
) -> None:
    answer = copy.deepcopy(answers[line])
    *way, last = at
    part = answer
    for key in way:
        part = part[key]
    part[last] = [[]]
    assert not accepts(line.split()[0], answer)
    del part[last]
    assert not accepts(line.split()[0], answer)


def test_the_timeline_is_the_plans_step(answers: dict[str, Any]) -> None:
    plan = answers["show pipeline.json"]
    drawn = dict(answers["show pipeline.json --timeline"])
    timeline = drawn.pop("timeline")
    assert drawn == plan
    assert timeline["end_s"] == pytest.approx(plan["predicted"]["step_time_s"])
    for rank, lane in enumerate(timeline["ranks"]):
        assert lane["rank"] == rank
        done = [(span["kind"], span["stage"], span["micro_batch"]) for span in lane["actions"]]
        assert sorted(done) == sorted((kind, rank, index) for kind in "FB" for index in range(4))
        spans = [*lane["actions"], *lane["tails"]]
        assert all(one["end_s"] <= two["start_s"] * (1 + 1e-9) for one, two in itertools.pairwise(spans))
        busy = sum(span["end_s"] - span["start_s"] for span in spans)
        assert busy + lane["idle_share"] * timeline["end_s"] == pytest.approx(timeline["end_s"])


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("show missing.json --json", "missing.json"),
        ("plan gpt3 --gpus 8xH100 --json", "gpt3"),
        ("plan gpt2 --gpus 8xnone --json", "none"),
        ("plan gpt2 --gpus 8xH100 --json --no-such-option", "--no-such-option"),
        ("diff plan.json --json", "B.json"),
        ("plann gpt2 --json", "plann"),
    ],
)
def test_bad_input_is_said_on_stderr_and_as_json(invoke: Invoke, line: str, what: str) -> None:
    done = invoke(*line.split())
    assert done.exit_code == 2
    answer = json.loads(done.stdout)
    error = answer["error"]
    assert error["exit_code"] == 2 and what in " ".join(map(str, error.values()))
    assert done.stderr.startswith(f"error: {error['what']}")
    assert all(error[name] in done.stderr for name in ("where", "legal", "attempt"))
    assert all(accepts(command, answer) for command in ANSWERS)
    assert not accepts("show", {"schema": 1, "error": {"what": "an error of no exit code"}})


def test_a_fault_is_said_so_too(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Plan:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Plan, "load", broken)
    done = invoke("show", "plan.json", "--json")
    error = json.loads(done.stdout)["error"]
    assert done.exit_code == error["exit_code"] == 3 and "internal fault: ZeroDivisionError" in error["what"]


def test_without_json_an_error_is_on_stderr_alone(invoke: Invoke) -> None:
    assert invoke("show", "missing.json").stdout == ""
    assert invoke("run", "missing.py", "--gpus", "1", "--", "--json").stdout == ""
