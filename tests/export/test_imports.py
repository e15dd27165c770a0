"""Configurations of other tools as people have them: what is read of them, and what is said of the rest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autoplan.cli.application import application
from autoplan.errors import PlanFileError
from autoplan.export.read import read_file
from autoplan.export.targets import TARGETS
from autoplan.export.targets.settings import Settings
from tests.export.test_targets import a_plan

TORCHTITAN_TOML = """
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 2
seq_len = 8192
compile = false

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 4
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""

MEGATRON_SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
TP_SIZE=4     # inside a node
PP_SIZE="2"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size ${TP_SIZE}
    --pipeline-model-parallel-size ${PP_SIZE}
    --sequence-parallel
    --use-distributed-optimizer
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_PARALLEL_ARGS[@]} \\
    --micro-batch-size 1 --global-batch-size 64 --bf16
"""


def test_the_toml_of_an_earlier_torchtitan_is_read(tmp_path: Path) -> None:
    (tmp_path / "llama3_8b.toml").write_text(TORCHTITAN_TOML)

    found = read_file(tmp_path / "llama3_8b.toml", None)

    assert found.tool == "torchtitan"
    assert found.imported.seq == 8192
    wanted = {"data": 4, "tensor": 2, "pipeline": 1, "zero_stage": 3, "micro_batch_size": 2, "recompute": "selective"}
    assert wanted.items() <= found.imported.strategy.items()


def test_variables_of_a_megatron_script_are_put_in(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(MEGATRON_SCRIPT)

    found = read_file(tmp_path / "train.sh", None)

    assert found.tool == "megatron"
    assert (found.imported.gpus, found.imported.global_batch, found.imported.precision) == (16, 64, "bf16")
    wanted = {"data": 2, "tensor": 4, "pipeline": 2, "zero_stage": 1, "sequence_parallel": True}
    assert wanted.items() <= found.imported.strategy.items()


@pytest.mark.parametrize(
    ("settings", "data", "batch"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, 8, 64),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, None, 64),  # the GPUs decide the micro-batch
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, None, 64),  # ... the accumulation
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}, None, None),
    ],
)
def test_what_a_deepspeed_file_leaves_to_the_gpus_is_not_made_up(
    settings: dict[str, Any], data: int | None, batch: int | None
) -> None:
    found = TARGETS["deepspeed"].read(json.dumps({**settings, "zero_optimization": {"stage": 2}, "unheard_of": 1}))
    assert (found.strategy.get("data"), found.global_batch) == (data, batch)
    micro = settings.get("train_micro_batch_size_per_gpu")
    assert found.strategy.get("micro_batch_size") == (micro if micro == 2 else None)
    assert found.strategy["zero_stage"] == 2


@pytest.mark.parametrize(
    ("kind", "section", "zero"),
    [
        ("FSDP", {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True}}, 3),
        ("FSDP", {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, 2),
        ("FSDP", {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False}}, 2),
        ("DEEPSPEED", {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "none"}}, 2),
        ("DEEPSPEED", {"deepspeed_config": {"deepspeed_config_file": "ds_config.json"}}, None),
        ("MULTI_GPU", {"downcast_bf16": "no"}, 0),
    ],
)
def test_accelerate_files_of_every_backend_are_read(kind: str, section: dict[str, Any], zero: int | None) -> None:
    config = {"distributed_type": kind, "mixed_precision": "bf16", "num_processes": 8, **section}
    found = TARGETS["accelerate"].read(yaml.safe_dump(config))
    assert (found.strategy["data"], found.strategy.get("zero_stage"), found.gpus) == (8, zero, 8)
    assert bool(found.notes) is (zero is None)


# ------------------------------------------------------------------------------------------------ what is not priced


def recipe(*assignments: str) -> str:
    lines = ["parallelism.tensor_parallel_degree = 2", *assignments]
    return "\n".join(["def planned():", "    config = base()", *(f"    config.{line}" for line in lines)])


def flags(*others: str) -> str:
    return " ".join(["torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2", *others])


NOT_PRICED = [
    (
        "torchtitan",
        recipe("optimizer.lr = 1e-3", "optimizer.eps = 1e-8", "training.steps = 10"),
        "not priced: optimizer, training.steps",
    ),
    ("torchtitan", TORCHTITAN_TOML, "not priced: activation_checkpoint.selective_ac_option"),
    (
        "megatron",
        flags("--lr 1e-4", "--use-flash-attn", "--expert-tensor-parallel-size 1", "--tp-comm-overlap"),
        "not priced: --lr, --use-flash-attn, --expert-tensor-parallel-size, --tp-comm-overlap",
    ),
    (
        "deepspeed",
        json.dumps(
            {
                "zero_optimization": {"stage": 3, "overlap_comm": False},
                "bf16": {"enabled": True},
                "train_micro_batch_size_per_gpu": 1,
                "train_batch_size": 8,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            }
        ),
        "not priced: zero_optimization.overlap_comm, optimizer",
    ),
    (
        "accelerate",
        "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}\nmegatron_lm_config: {a: 1}",
        "not priced: fsdp_config.fsdp_offload_params, megatron_lm_config",
    ),
    ("transformers", '{"tp_size": 2, "fsdp_cpu_offload": true}', "not priced: fsdp_cpu_offload"),
]


@pytest.mark.parametrize(("name", "text", "line"), NOT_PRICED)
def test_what_was_not_read_is_said_in_one_line(name: str, text: str, line: str) -> None:
    assert [note for note in TARGETS[name].read(text).notes if note.startswith("not priced")] == [line]


CONSTANTS = ["DATA", "ZERO_STAGE", "MICRO_BATCH_SIZE", "MICRO_BATCHES", "RECOMPUTE", "PRECISION"]
SLIPS = [
    ("torchtitan", recipe("parallelism.pipeline_paralel_degree = 2"), "parallelism.pipeline_parallel_degree"),
    ("torchtitan", "[paralellism]\ntensor_parallel_degree = 2\n[training]", "parallelism.tensor_parallel_degree"),
    ("megatron", flags("--pipeline-model-paralell-size 2"), "--pipeline-model-parallel-size"),
    ("deepspeed", '{"zero_optimisation": {"stage": 3}}', "zero_optimization.stage"),
    ("deepspeed", '{"train_micro_batch_size_per_gpus": 3}', "train_micro_batch_size_per_gpu"),
    ("deepspeed", '{"zero_optimization": {"stages": 3}}', "zero_optimization.stage"),
    ("accelerate", "distributed_type: FSDP\nmixed_precison: bf16", "mixed_precision"),
    ("accelerate", "fsdp_config: {fsdp_reshard_after_foward: false}", "fsdp_config.fsdp_reshard_after_forward"),
    ("transformers", '{"fspd_size": 4, "tp_size": 2}', "fsdp_size"),
    ("fsdp2", "\n".join([*(f"{name} = 1" for name in CONSTANTS), "COMPILD = True"]), "COMPILED"),
    ("slurm", "#SBATCH --nodes=1\n#SBATCH --gpus-per-node=8\n# autoplan strategy: data=4,pipelines=2", "pipeline"),
]


@pytest.mark.parametrize(("name", "text", "meant"), SLIPS)
def test_a_slip_of_the_pen_is_refused_by_name(name: str, text: str, meant: str) -> None:
    with pytest.raises(PlanFileError, match="no setting that is read") as raised:
        TARGETS[name].read(text)
    assert raised.value.legal == meant


def test_names_of_the_tool_that_are_alike_are_no_slips() -> None:
    settings = Settings({"schedule_csv": "", "schedules": 1}, "here", others=("schedule_csv",))
    assert settings.get("schedule_csvs") is None
    assert settings.not_priced() == ("not priced: schedule_csv, schedules",)


def test_many_names_are_counted() -> None:
    found = {f"optimizer.{i}": i for i in range(40)} | {f"{chr(97 + i)}{i}{i * 7}": i for i in range(14)}
    (line,) = Settings(found, "here").not_priced()
    assert line.endswith("k1070, and 3 more")
    assert line.count("optimizer") == 1


# ------------------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.parametrize("name", ["torchtitan", "accelerate", "fsdp2"])
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_plans_are_exported_and_read_back(name: str, compiled: bool) -> None:
    exported = TARGETS[name].export(dataclasses.replace(a_plan(data=4, zero_stage=3), compiled=compiled))
    (text,) = exported.files.values()
    assert TARGETS[name].read(text).compiled is compiled


@pytest.mark.parametrize("name", ["megatron", "deepspeed"])
def test_a_tool_whose_file_cannot_compile_says_so(name: str) -> None:
    plan = a_plan(data=4, zero_stage=1)
    assert not any("torch.compile" in lost for lost in TARGETS[name].export(plan).lost)
    assert any("torch.compile" in lost for lost in TARGETS[name].export(dataclasses.replace(plan, compiled=True)).lost)


@pytest.mark.parametrize(
    ("name", "text", "compiled"),
    [
        ("torchtitan", TORCHTITAN_TOML, False),
        ("torchtitan", TORCHTITAN_TOML.replace("compile = false", "compile = true"), True),
        ("torchtitan", TORCHTITAN_TOML + "[compile]\nenable = true\n", True),
        ("torchtitan", TORCHTITAN_TOML + '[compile]\nenable = true\ncomponents = ["loss"]\n', False),
        ("accelerate", "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}", True),
        ("accelerate", "dynamo_config: {dynamo_backend: EAGER}", False),
        ("accelerate", "dynamo_backend: 'NO'", False),
        ("deepspeed", '{"compile": {"deepcompile": true}}', True),
        ("deepspeed", '{"compile": {"deepcompile": false}}', False),
    ],
)
def test_a_configuration_that_compiles_is_priced_so(name: str, text: str, compiled: bool) -> None:
    assert TARGETS[name].read(text).compiled is compiled


def test_predict_prices_what_a_configuration_compiles(tmp_path: Path) -> None:
    run = CliRunner().invoke
    steps = []
    for enable in ("false", "true"):
        text = TORCHTITAN_TOML.replace("local_batch_size = 2", "local_batch_size = 1")
        (tmp_path / "llama.toml").write_text(f"{text}[compile]\nenable = {enable}\n")
        asked = ["predict", "llama3-8b", "--gpus", "8xH100", "--global-batch", "16", "--json"]
        answer = run(application, [*asked, "--config", str(tmp_path / "llama.toml")])
        assert answer.exit_code == 0, answer.output
        plan = json.loads(answer.stdout)
        assert plan["compiled"] is (enable == "true")
        steps.append(plan["predicted"]["step_time_s"])
    assert steps[1] < steps[0]
