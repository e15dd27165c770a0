"""Plans as settings of other tools, and back."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from autoplan.cli.application import application
from autoplan.errors import AutoplanError, StrategyError
from autoplan.export.like import LIKE, strategy_like
from autoplan.export.read import read_file
from autoplan.export.targets import TARGETS, target_named
from autoplan.export.targets.types import Exported, Target, nodes_and_each
from autoplan.layers.types import Layer, LayerGraph, LayerKind
from autoplan.plan import Plan
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem
from tests.support.mixed import group, mixed
from tests.support.plans import hand_plan

LAYERS = 24
DEGREES = ("data", "tensor", "pipeline", "context", "expert")


def graph() -> LayerGraph:
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(LAYERS)), "lm_head"]
    return LayerGraph(
        name="llama3-8b",
        layers=tuple(Layer(name=name, kind=0, nodes=()) for name in names),
        kinds=(LayerKind(operators=()),),
        edges=(),
        tokens_per_sample=4096,
        dtype="bf16",
        fingerprint="",
    )


def a_plan(*, recompute: str = "none", precision: str = "bf16", **strategy: Any) -> Plan:
    plan = hand_plan(graph(), **strategy)
    stages = tuple(
        dataclasses.replace(stage, recompute={recompute: stage.last_layer - stage.first_layer + 1})
        for stage in plan.stages
    )
    cluster = dataclasses.replace(plan.cluster, spec="8x8xH100", device="H100", nodes=8, gpus_per_node=8)
    return dataclasses.replace(plan, stages=stages, precision=precision, cluster=cluster)


def a_random_plan(draw: random.Random) -> Plan:
    """Each axis beside data is taken half the time, so that tools of few axes are asked for plans that they know."""
    tensor, pipeline, context, expert = (draw.choice([1, 1, 1, 2, 4, 8]) for _ in range(4))
    data = draw.choice([1, 2, 4, 8, 16, 32, 64])
    virtual = draw.choice([1, 2]) if pipeline > 1 else 1
    return a_plan(
        recompute=draw.choice(["none", "selective", "full"]),
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        virtual_stages=virtual,
        context=min(2, context),
        expert=min(2, expert),
        zero_stage=draw.choice([0, 1, 2, 3]) if data > 1 else 0,
        micro_batch_size=draw.choice([1, 2, 4]),
        micro_batches=draw.choice([1, 4, 8]),
        schedule="interleaved" if virtual > 1 else "1f1b",
    )


@pytest.mark.parametrize("name", TARGETS)
def test_fifty_random_plans_are_exported_and_read_back_with_the_same_degrees(name: str) -> None:
    draw, target, told = random.Random(0), TARGETS[name], set()
    for _ in range(2_000):
        plan = a_random_plan(draw)
        try:
            exported = target.export(plan)
        except StrategyError as refusal:
            assert refusal.attempt  # and nothing half-done
            continue
        assert_read_back(target, plan, exported)
        told.add((plan.strategy, str(plan.stages[0].recompute)))
        if len(told) == 50:
            return
    raise AssertionError(f"{name} expressed {len(told)} plans alone")


def assert_read_back(target: Target, plan: Plan, exported: Exported) -> None:
    imported = target.read(_settings_file(exported.files))
    assert not any(note.startswith("not priced") for note in imported.notes)
    found = imported.strategy
    for axis in DEGREES:
        assert found.get(axis, 1) == getattr(plan.strategy, axis), axis
    for key in ("micro_batch_size", "virtual_stages"):
        if key in found and not (key == "virtual_stages" and any("virtual stages" in lost for lost in exported.lost)):
            assert found[key] == getattr(plan.strategy, key), key
    if not any("ZeRO" in lost for lost in exported.lost):
        assert found["zero_stage"] == plan.strategy.zero_stage


def _settings_file(files: dict[str, str]) -> str:
    return next(text for name, text in files.items() if name != "load.py")


# --------------------------------------------------------------------------------------------------- as the tools read


def test_transformers_own_class_takes_the_settings() -> None:
    from transformers.distributed.configuration_utils import DistributedConfig

    exported = TARGETS["transformers"].export(a_plan(data=4, tensor=2, zero_stage=3))
    config = DistributedConfig(**json.loads(exported.files["distributed_config.json"]))

    assert (config.tp_size, config.fsdp_size, config.pp_size) == (2, 4, 1)


def test_megatrons_layout_has_every_layer_once() -> None:
    plan = hand_plan(graph(), cuts=(6, 13, 20), data=2, pipeline=4, micro_batches=8)
    exported = TARGETS["megatron"].export(plan)

    assert "--pipeline-model-parallel-layout 'Et*5|t*7|t*7|t*5L'" in exported.files["megatron.sh"]


@pytest.mark.parametrize("name", ["megatron", "slurm"])
def test_shell_scripts_parse(name: str) -> None:
    exported = TARGETS[name].export(a_plan(data=4, tensor=4, pipeline=2, micro_batches=4))
    for text in exported.files.values():
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_python_recipes_parse_and_yaml_loads() -> None:
    plan = a_plan(data=8, zero_stage=3, recompute="full")
    for name in ("torchtitan", "fsdp2", "transformers"):
        for file, text in TARGETS[name].export(plan).files.items():
            assert not file.endswith(".py") or ast.parse(text)
    documents = list(yaml.safe_load_all(TARGETS["kubernetes"].export(plan).files["job.yaml"]))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    assert yaml.safe_load(TARGETS["accelerate"].export(plan).files["accelerate.yaml"])["distributed_type"] == "FSDP"


# ------------------------------------------------------------------------------------------------------ what is lost


def test_a_tool_says_what_it_cannot_express() -> None:
    plan = a_plan(data=2, pipeline=2, micro_batches=4, recompute="full")
    assert any("PipelineModule" in lost for lost in TARGETS["deepspeed"].export(plan).lost)
    with pytest.raises(StrategyError, match="Accelerate cannot express pipeline 2"):
        TARGETS["accelerate"].export(plan)
    with pytest.raises(StrategyError, match="FSDP2 cannot express pipeline 2"):
        TARGETS["fsdp2"].export(plan)


@pytest.mark.parametrize("name", ["megatron", "slurm", "kubernetes"])
def test_on_several_kinds_it_says_which_machines_hold_which_ranks(name: str) -> None:
    kinds = mixed([group(2, name="fast"), group(2, speed=0.5, name="slow")])
    layers = [Dense(flops=3e12, elements=20_000_000)] * 12
    plan = search(problem(layers, kinds, global_batch=64, heads=1, forced={"pipeline": 2, "data": 2}))
    first, second = (stage.device for stage in plan.stages)
    (said,) = (lost for lost in TARGETS[name].export(plan).lost if lost.startswith("which machine is which"))
    assert f"ranks 0 to 1 on {first}, 2 to 3 on {second};" in said and "--node-rank" in said


def test_of_two_kinds_the_machines_of_the_one_that_is_used_are_started() -> None:
    kinds = mixed([group(4, nodes=2, name="fast"), group(1, speed=0.05, name="slow")])
    plan = search(problem([Dense(flops=3e12, elements=2_000_000)] * 4, kinds, global_batch=64, heads=1))
    assert [g.gpus_used for g in plan.cluster.groups] == [8, 0]
    assert nodes_and_each(plan) == (2, 4)  # and not eight machines of one GPU, though one divides both sizes
    assert "Idle: the one slow, because with it the best plan is" in plan.case


def test_unknown_tools_and_releases_are_named() -> None:
    with pytest.raises(StrategyError, match="no tool called 'horovod'"):
        target_named("horovod")
    with pytest.raises(StrategyError, match=r"torchtitan 9\.9"):
        target_named("torchtitan@9.9")


# ----------------------------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_is_recognised_by_what_it_holds(name: str, tmp_path: Path) -> None:
    exported = TARGETS[name].export(a_plan(data=4, zero_stage=3))
    path = tmp_path / "settings"
    path.write_text(_settings_file(exported.files))

    assert read_file(path, None).tool == name


READABLE = st.one_of(
    st.text(max_size=80), st.dictionaries(st.text(max_size=8), st.integers(), max_size=3).map(json.dumps)
)


@pytest.mark.parametrize("name", TARGETS)
def test_no_text_at_all_makes_a_traceback(name: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(READABLE)
    def read(text: str) -> None:
        try:
            TARGETS[name].read(text)
        except AutoplanError as error:
            assert error.exit_code == 2

    read()


def test_the_command_line_writes_reads_and_overwrites_nothing(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 128,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
        )
    )
    run = CliRunner().invoke
    made = run(
        application,
        [
            *("plan", str(config), "--gpus", "8xH100", "--global-batch", "16", "--seq", "64", "-o", str(plan)),
            *("--strategy", "tensor=2,pipeline=2,data=2,zero_stage=1"),
        ],
    )
    assert made.exit_code == 0, made.output

    written = run(application, ["export", str(plan), "--to", "megatron", "-o", str(tmp_path / "out")])
    assert written.exit_code == 0, written.output
    again = run(application, ["export", str(plan), "--to", "megatron", "-o", str(tmp_path / "out")])
    assert (again.exit_code, "nothing is overwritten" in again.stderr) == (2, True)

    predicted = run(
        application,
        [
            *("predict", str(config), "--gpus", "8xH100", "--seq", "64", "--json"),
            *("--config", str(tmp_path / "out" / "megatron.sh"), "--strategy", "tensor=1,data=4,micro_batch_size=2"),
        ],
    )
    assert predicted.exit_code == 0, predicted.output
    answer = json.loads(predicted.stdout)
    degrees = {key: answer["strategy"][key] for key in ("data", "tensor", "pipeline", "zero_stage")}
    assert degrees == {"data": 4, "tensor": 1, "pipeline": 2, "zero_stage": 1}
    assert answer["global_batch"] == 16

    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {}}}')
    unpriced = ["predict", str(config), "--gpus", "8xH100", "--seq", "64", "--config", str(tmp_path / "ds_config.json")]
    assert "offload to the host is not priced" in run(application, unpriced).stderr

    read = run(application, ["import", str(tmp_path / "out" / "megatron.sh"), "--json"])
    assert read.exit_code == 0, read.output
    strategy = json.loads(read.stdout)["strategy"]
    assert {key: strategy[key] for key in ("data", "tensor", "pipeline", "zero_stage")} == {
        "data": 2,
        "tensor": 2,
        "pipeline": 2,
        "zero_stage": 1,
    }


def test_a_plan_can_keep_to_what_another_tool_can_express() -> None:
    assert strategy_like("deepspeed-zero3", {"micro_batch_size": 2}) == {
        "tensor": 1,
        "pipeline": 1,
        "zero_stage": 3,
        "micro_batch_size": 2,
    }
    with pytest.raises(StrategyError, match="`tensor` 2 was asked for, and ddp has tensor 1"):
        strategy_like("ddp", {"tensor": 2})
    with pytest.raises(StrategyError, match="no tool called 'horovod'"):
        strategy_like("horovod", {})


@pytest.mark.parametrize("name", LIKE)
def test_plans_like_a_tool_can_be_exported_to_it(name: str) -> None:
    target = {"ddp": "fsdp2"}.get(name, name.partition("-")[0])
    layers = [Dense()] * 8
    asked = problem(layers, cluster(gpus=8), forced=dict(LIKE[name]))

    assert TARGETS[target].export(search(asked)).files
