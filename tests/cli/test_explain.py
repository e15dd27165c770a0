"""``autoplan explain``: what a plan file can't hold is found by tracing the model again, and what would change the
decision by searching again."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoplan.cli.application import application
from autoplan.cluster import Cluster
from autoplan.explain.text import size
from autoplan.plan import Plan
from tests.support.cli import Invoke
from tests.support.plans import stored_file

MODEL = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make(width=2048, blocks=6):
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        return model, (torch.empty(64, width, dtype=torch.bfloat16),), lambda y: y.float().pow(2).mean()


def other():
    return make(blocks=4)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain")
    (path / "model.py").write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    import autoplan

    made = autoplan.plan(f"{folder / 'model.py'}:make", gpus="2x2xA10G", precision="bf16", strategy={"tensor": 2})
    return made.save(folder / "plan.json")


def test_operators_are_those_of_one_gpu_the_longest_first(invoke: Invoke, file: Path, folder: Path) -> None:
    asked = ("explain", str(file), "--operators", "--model", f"{folder / 'model.py'}:make")
    rows = json.loads(invoke(*asked, "--json").stdout)["operators"]
    linear = [row for row in rows if row["kind"] == "gemm"]
    samples = Plan.load(file).strategy.micro_batch_size
    # 6 blocks of two products of 2048 x 8192, half of each on either GPU of the tensor axis.
    assert sum(row["times"] for row in linear) == 12
    assert sum(row["flops"] for row in linear) == 12 * samples * 2 * 2048 * 8192 / 2
    times = [row["forward_s"] + row["backward_s"] for row in rows]
    assert times == sorted(times, reverse=True) and all(row["limit"] in ("compute", "memory") for row in rows)
    said = invoke(*asked)
    assert said.exit_code == 0 and "up: linear" in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80


def test_one_layer_by_the_end_of_its_name(invoke: Invoke, file: Path, folder: Path) -> None:
    model = f"{folder / 'model.py'}:make"
    found = json.loads(invoke("explain", str(file), "--layer", "3", "--model", model, "--json").stdout)
    assert found["layer"] == 3 and found["stage"] == 1 and found["recompute"] == "none"
    assert found["parameters"] == 2048 * 8192 + 4096 + 2048  # half of two matrices, half of one bias and the other
    assert len(found["collectives"]) == 2  # one all-reduce forward, one backward
    said = invoke("explain", str(file), "--layer", "3", "--model", model).stdout
    assert "all-reduce" in said and "model.py" in said and max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("more", "message", "advice"),
    [
        (("--layer", "tail"), "no layer is called 'tail'", "--layer "),
        (("--layer", ""), "no layer is called", "--layer "),
        (("--operators", "--layer", "3"), "are three questions", "one at a time"),
        (("-o", "x.json"), "-o keeps the answers of --what-if", "--what-if"),
    ],
)
def test_bad_questions(
    invoke: Invoke, file: Path, folder: Path, more: tuple[str, ...], message: str, advice: str
) -> None:
    done = invoke("explain", str(file), "--model", f"{folder / 'model.py'}:make", *more)
    assert done.exit_code == 2 and message in done.stderr and advice in done.stderr


def test_the_model_is_asked_for_where_the_plan_does_not_name_it(invoke: Invoke, file: Path, folder: Path) -> None:
    done = invoke("explain", str(file), "--operators")
    assert done.exit_code == 2 and "--model MODEL" in done.stderr
    other = invoke("explain", str(file), "--operators", "--model", f"{folder / 'model.py'}:other")
    assert other.exit_code == 2 and "is another model" in other.stderr and "layers 7 there and 5 here" in other.stderr
    smaller = invoke("explain", str(file), "--operators", "--model", f"{folder / 'model.py'}:make", "--gpus", "2xA10G")
    assert smaller.exit_code == 2 and "4 GPUs there and 2 here" in " ".join(smaller.stderr.split())


@pytest.mark.parametrize("question", ["--operators", "--what-if"])
@pytest.mark.parametrize(
    ("gpus", "said"), [("2x2xH100", "A10G there and H100-80GB-SXM here"), ("4xA10G", "2 x 2 GPUs there and 1 x 4 here")]
)
def test_a_plan_is_not_asked_about_another_cluster(
    invoke: Invoke, file: Path, folder: Path, question: str, gpus: str, said: str
) -> None:
    done = invoke("explain", str(file), question, "--model", f"{folder / 'model.py'}:make", "--gpus", gpus)
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and said in told and "legal: the plan's own cluster: 2 x 2 A10G" in told
    assert "--gpus SPEC" in told and "plan again" in told


def test_a_cluster_file_that_changed_since_is_another_cluster(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    import autoplan

    described, model = tmp_path / "ours.toml", f"{folder / 'model.py'}:make"
    described.write_text('device = "A10G"\nnodes = 2\ngpus_per_node = 2\n[inter]\nbytes_per_s = 5e9\n')
    path = autoplan.plan(model, gpus=described, precision="bf16").save(tmp_path / "plan.json")
    assert invoke("explain", str(path), "--operators", "--model", model).exit_code == 0
    described.write_text(described.read_text().replace("5e9", "6e9"))
    done = invoke("explain", str(path), "--operators", "--model", model)
    told = " ".join(done.stderr.split())
    assert done.exit_code == 2 and "links or other figures" in told
    assert "is not what it was when the plan was made" in told


def test_what_if_says_what_other_machines_would_change(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    import autoplan

    model, target = f"{folder / 'model.py'}:make", tmp_path / "asked.json"
    plan = autoplan.plan(model, gpus="2x2xA10G", precision="bf16", global_batch=65536)
    path = plan.save(tmp_path / "plan.json")
    done = invoke("explain", str(path), "--what-if", "--model", model, "-o", str(target))
    assert done.exit_code == 0 and max(map(len, done.stdout.splitlines())) <= 80
    kept = Plan.load(target)
    assert kept.stages == plan.stages and len(kept.other_answers) == 6
    for answer in kept.other_answers:
        named = answer.strategy.describe() if answer.strategy else "nothing fits"
        same = named == plan.strategy.describe()
        assert same == answer.condition.startswith(("up to", "down to"))
        assert ("the same decision" if same else named) in " ".join(done.stdout.split())
    # An answer is what the search says of such a machine.
    changed = next(a for a in kept.other_answers if a.quantity == "inter_bytes_per_s" and "down" not in a.condition)
    slow = Cluster.parse("2x2xA10G")
    machines = dataclasses.replace(slow, inter=dataclasses.replace(slow.inter, bytes_per_s=changed.value))
    again = autoplan.plan(model, gpus=machines, precision="bf16", global_batch=65536)
    assert again.strategy == changed.strategy and again.predicted.step_time_s == changed.step_time_s
    assert "What would change the decision" in invoke("explain", str(target)).stdout


def test_without_asking_a_plan_says_what_memory_would_let_fit(folder: Path) -> None:
    import autoplan

    model = f"{folder / 'model.py'}:make"
    kind = Cluster.parse("2x2xA10G")
    plan = autoplan.plan(model, gpus=kind.with_memory(0.12), precision="bf16")
    short = [a for a in plan.alternatives if a.step_time_s is None]
    said = plan.explain()
    assert "What would change the decision" in said and "--what-if" in said
    needed = {f"with {size(a.short_by_bytes)} more on each GPU" for a in short}
    assert needed and all(each in " ".join(said.split()) for each in needed)
    assert "its step was not priced" not in said  # each is


@pytest.mark.parametrize(
    ("name", "near"),
    [("attn", "model.blocks.0.attn"), ("blocks.1", "model.blocks.1.attn"), ("atn", "model.blocks.0.attn")],
)
def test_names_near_a_layers_are_offered(name: str, near: str, plan: Plan) -> None:
    from autoplan.errors import PlanFileError
    from autoplan.explain.operators import one_layer
    from tests.support.layer_graphs import Dense, graph

    layers = graph([Dense(elements=1)] * 6)
    names = [f"model.blocks.{i // 2}.{part}" for i, part in enumerate(("attn", "mlp") * 3)]
    named = tuple(dataclasses.replace(layer, name=name) for layer, name in zip(layers.layers, names, strict=True))
    with pytest.raises(PlanFileError) as caught:
        one_layer(plan, dataclasses.replace(layers, layers=named), layers.kinds, (), name)
    assert caught.value.attempt == f"--layer {near}"


# ------------------------------------------------------------------------------------------------ on a terminal


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
@pytest.mark.parametrize("command", ["explain", "diff", "show --timeline"])
def test_colour_is_for_terminals_and_for_those_who_want_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool, command: str
) -> None:
    file, other = str(stored_file()), str(stored_file(4))
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    plain = CliRunner().invoke(application, [*command.split(), file, *([other] if command == "diff" else [])]).stdout
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = CliRunner().invoke(application, [*command.split(), file, *([other] if command == "diff" else [])]).stdout
    assert bool(re.search("\x1b\\[[0-9;]*3[0-9]m", shown)) == coloured
    assert "\x1b" not in plain and re.sub("\x1b\\[[0-9;]*m", "", shown) == plain
