"""What is exported, read by the tools themselves."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path
from typing import Any

import pytest

from autoplan.export.targets import TARGETS
from tests.export.test_targets import a_plan, graph
from tests.support.plans import hand_plan

pytestmark = pytest.mark.bridges
pytest.importorskip("accelerate", reason="`make bridges` installs the tools")

SHARDED: dict[str, Any] = {"data": 4, "tensor": 2, "zero_stage": 3, "micro_batch_size": 2, "micro_batches": 4}


@pytest.mark.parametrize(
    "strategy", [SHARDED, {"data": 8}, {"tensor": 4}, {"data": 4, "context": 2, "zero_stage": 2}], ids=str
)
def test_accelerate_loads_the_file_and_its_degrees(strategy: dict[str, Any], tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    plan = a_plan(**strategy)
    exported = TARGETS["accelerate"].export(plan)
    (tmp_path / "accelerate.yaml").write_text(exported.files["accelerate.yaml"])
    config = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    sharded = plan.strategy.zero_stage > 0
    assert config.num_processes == plan.strategy.gpus
    assert config.distributed_type == (DistributedType.FSDP if sharded else DistributedType.MULTI_GPU)
    degrees = {key.removeprefix("parallelism_config_"): value for key, value in config.parallelism_config.items()}
    if degrees:
        found = ParallelismConfig(**degrees)
        assert (found.tp_size, found.cp_size) == (plan.strategy.tensor, plan.strategy.context)
        assert found.dp_replicate_size * found.dp_shard_size == plan.strategy.data
    else:
        assert strategy.keys() == {"data"}
    assert (config.fsdp_config.get("fsdp_version") == 2) is sharded


@pytest.mark.parametrize(
    "strategy",
    [
        SHARDED,
        {"data": 4, "pipeline": 2, "zero_stage": 1, "micro_batches": 4},
        {"data": 2, "context": 2},
        {"data": 4, "expert": 2},
    ],
    ids=str,
)
def test_deepspeeds_own_class_takes_the_settings(strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.runtime.config as deepspeed

    plan = a_plan(**strategy)
    monkeypatch.setattr(deepspeed.dist, "get_rank", lambda: 0)
    ranks = types.SimpleNamespace(get_data_parallel_world_size=lambda: plan.strategy.data)
    settings = json.loads(TARGETS["deepspeed"].export(plan).files["ds_config.json"])
    config = deepspeed.DeepSpeedConfig(settings, mpu=ranks)  # asserts that the batch sizes multiply
    assert config.zero_config.stage == plan.strategy.zero_stage
    assert config.train_batch_size == plan.strategy.global_batch
    assert config.gradient_accumulation_steps == plan.strategy.micro_batches
    assert config.bfloat16_config.enabled
    if plan.strategy.pipeline > 1:
        assert config.pipeline["stages"] == plan.strategy.pipeline
    if plan.strategy.tensor > 1:
        assert config.tensor_parallel_config.autotp_size == plan.strategy.tensor


@pytest.mark.parametrize(("pipeline", "virtual", "cuts"), [(4, 1, (6, 13, 20)), (2, 2, (5, 12, 20))])
def test_megatrons_own_parser_reads_the_layout(pipeline: int, virtual: int, cuts: tuple[int, ...]) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    schedule = "interleaved" if virtual > 1 else "1f1b"
    plan = hand_plan(graph(), cuts=cuts, pipeline=pipeline, virtual_stages=virtual, schedule=schedule, micro_batches=8)
    script = TARGETS["megatron"].export(plan).files["megatron.sh"]
    text = script.partition("--pipeline-model-parallel-layout '")[2].partition("'")[0]
    layout = PipelineParallelLayerLayout.from_str(text, pipeline).layout  # [pipeline rank][virtual stage]
    decoders = [
        [sum(kind is LayerType.decoder for kind in layout[stage % pipeline][stage // pipeline])]
        for stage in range(pipeline * virtual)
    ]
    planned = [
        [sum("layers." in plan.model.layers[i] for i in range(stage.first_layer, stage.last_layer + 1))]
        for stage in plan.stages
    ]
    assert decoders == planned


def test_megatrons_configurations_have_what_the_flags_are_named_after() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig

    plan = a_plan(
        data=4, tensor=2, pipeline=2, virtual_stages=2, schedule="interleaved", micro_batches=8, context=2, zero_stage=1
    )
    script = TARGETS["megatron"].export(plan).files["megatron.sh"]
    flags = {part.removeprefix("--").replace("-", "_") for part in script.split() if part.startswith("--")}
    known = {
        name
        for config in (ModelParallelConfig, TransformerConfig, DistributedDataParallelConfig)
        for name in config.__dataclass_fields__
    }
    # The rest are flags of Megatron-LM's training loop, which is no part of the package.
    assert {flag for flag in flags - known if "parallel" in flag} <= {"pipeline_model_parallel_layout"}
    assert {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"} <= flags


@pytest.mark.parametrize(
    "strategy",
    [
        {"data": 8, "tensor": 2, "zero_stage": 3},
        {"data": 8},
        {"data": 4, "zero_stage": 1, "micro_batches": 4},
        {"data": 2, "pipeline": 4, "zero_stage": 2, "micro_batches": 8},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved", "micro_batches": 8, "context": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_torchtitan_runs_the_recipe(strategy: dict[str, Any], recompute: str, tmp_path: Path) -> None:
    from torchtitan.trainer import Trainer

    plan = a_plan(recompute=recompute, **strategy)
    exported = TARGETS["torchtitan"].export(plan)
    (tmp_path / "planned.py").write_text(exported.files["planned.py"])
    found = importlib.util.spec_from_file_location("planned", tmp_path / "planned.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    config = module.planned()
    assert isinstance(config, Trainer.Config)  # its sections have slots: a name that is not theirs would have raised
    parallel, wanted = config.parallelism, plan.strategy
    assert parallel.tensor_parallel_degree == wanted.tensor
    assert parallel.pipeline_parallel_degree == wanted.pipeline
    assert parallel.context_parallel_degree == wanted.context
    assert parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree == wanted.data
    assert config.training.global_batch_size == wanted.global_batch
    if wanted.pipeline > 1:
        assert len(parallel.module_fqns_per_model_part) == len(plan.stages)
    assert (config.activation_checkpoint is None) is (recompute == "none")


def fields(*configurations: Any) -> list[str]:
    """Names of the fields of dataclasses and of pydantic's models."""
    found = [getattr(each, "model_fields", None) or each.__dataclass_fields__ for each in configurations]
    return [name for names in found for name in names]


def names_of_the_tools() -> list[tuple[str, str]]:
    """(tool, a file of one setting), for every name of the tool's own that stands beside those that are read."""
    from accelerate.commands.launch import launch_command_parser
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    megatron = fields(ModelParallelConfig, TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    flags = [("megatron", f"--tensor-model-parallel-size 2 --{name.replace('_', '-')} 1") for name in megatron]
    recipes = [
        ("torchtitan", f"config.{section}.{name} = 1")
        for section, kind in (
            ("parallelism", ParallelismConfig),
            ("training", TrainingConfig),
            ("compile", CompileConfig),
        )
        for name in fields(kind)
    ]
    sections = {"zero_optimization": DeepSpeedZeroConfig, "tensor_parallel": TPTrainingConfig}
    files = [
        ("deepspeed", json.dumps({section: {name: 1}}))
        for section, kind in (*sections.items(), ("tensor_parallel", TPConfig))
        for name in fields(kind)
    ]
    options = [action.dest for action in launch_command_parser()._actions]
    prefixes = {"fsdp_": "fsdp_config: ", "parallelism_config_": "parallelism_config: ", "dynamo_": "dynamo_config: "}
    written = [
        ("accelerate", f"{next((s for p, s in prefixes.items() if name.startswith(p)), '')}{{{name}: 1}}")
        for name in options
    ]
    return [
        *flags,
        *recipes,
        *files,
        *written,
        *(("transformers", json.dumps({n: 1})) for n in fields(DistributedConfig)),
    ]


def test_no_name_of_a_tools_own_is_taken_for_a_slip() -> None:
    names = names_of_the_tools()
    assert len(names) > 600
    for name, text in names:
        TARGETS[name].read(text)
