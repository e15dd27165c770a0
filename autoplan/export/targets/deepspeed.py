"""DeepSpeed: ds_config.json.

Keys read in docs/_pages/config-json.md, runtime/zero/config.py and runtime/tensor_parallel/config.py of 0.19. The JSON
cannot cut a model into pipeline stages: that needs a ``PipelineModule`` in your code, and is said.
"""

from __future__ import annotations

import json
from typing import Any

from autoplan.errors import PlanFileError
from autoplan.export.targets.types import Exported, Imported, Losses, Target, layers_of, recompute_of, torchrun, uneven
from autoplan.plan import Plan


def export(plan: Plan) -> Exported:
    """``ds_config.json`` for ``deepspeed.initialize(config="ds_config.json")``."""
    strategy, losses = plan.strategy, Losses("DeepSpeed")
    policy, _ = recompute_of(plan)
    losses.refuse(
        strategy.zero_stage >= 2 and strategy.pipeline > 1,
        f"ZeRO-{strategy.zero_stage} with pipeline stages",
        "plan with --strategy zero_stage=1",
    )
    losses.note(
        strategy.pipeline > 1,
        f"pipeline stages: write PipelineModule(layers, num_stages={strategy.pipeline}) in your code; the JSON cannot",
    )
    losses.note(
        uneven(layers_of(plan)),
        'stages of unequal layers: PipelineModule balances by parameters (partition_method="parameters")',
    )
    losses.note(strategy.pipeline > 1 and strategy.schedule != "1f1b", f"schedule {strategy.schedule}: it runs 1F1B")
    losses.note(strategy.virtual_stages > 1, "virtual stages: one stage a GPU")
    losses.note(
        strategy.sequence_parallel, "sequence parallelism of norms and dropout: those are computed on every rank"
    )
    losses.note(policy != "none", f"recompute ({policy}): call deepspeed.checkpointing.checkpoint around your layers")
    config: dict[str, Any] = {
        "train_batch_size": strategy.global_batch,
        "train_micro_batch_size_per_gpu": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.micro_batches,
        "zero_optimization": {"stage": strategy.zero_stage, "overlap_comm": True},
    }
    if plan.precision in ("bf16", "fp16"):
        config[plan.precision] = {"enabled": True}
    if strategy.zero_stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if strategy.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": strategy.tensor}
    if strategy.context > 1:
        config["sequence_parallel_size"] = strategy.context
        losses.note(True, "the sequence split by ring attention: its sequence parallelism is Ulysses, by heads")
    if strategy.expert > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": strategy.expert}
    if strategy.pipeline > 1:
        config["pipeline"] = {"stages": strategy.pipeline}
    return Exported(
        files={"ds_config.json": json.dumps(config, indent=2) + "\n"},
        launch=torchrun(plan, "train.py --deepspeed_config ds_config.json"),
        lost=tuple(losses.notes),
    )


def read(text: str) -> Imported:
    """The strategy of a configuration. Raises PlanFileError for what is no such JSON."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"not JSON: {error}", where="the DeepSpeed configuration") from None
    if not isinstance(config, dict):
        raise PlanFileError(
            "not an object", where="the DeepSpeed configuration", legal='{"train_batch_size": 256, ...}'
        )

    def whole(section: dict[str, Any], key: str, default: int) -> int:
        value = section.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            if value == "auto":
                return default
            raise PlanFileError(f"{key} is {value!r}", where="the DeepSpeed configuration", legal="a number from 1")
        return value

    tensor = whole(_section(config, "tensor_parallel"), "autotp_size", 1)
    pipeline = whole(_section(config, "pipeline"), "stages", 1)
    context = whole(config, "sequence_parallel_size", 1)
    expert = whole(_section(config, "expert_parallel"), "autoep_size", 1)
    strategy: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    micro, accumulated = (
        whole(config, key, 1) if _is_number(config.get(key)) else None
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    batch = whole(config, "train_batch_size", 1) if _is_number(config.get("train_batch_size")) else None
    if micro is not None:
        strategy["micro_batch_size"] = micro
    zero = _section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise PlanFileError(f"stage is {stage!r}", where="the DeepSpeed configuration", legal="0, 1, 2 or 3")
    strategy["zero_stage"] = stage
    notes = []
    if "offload_optimizer" in zero or "offload_param" in zero:
        notes.append("offload to the host is not priced")
    gpus = None
    if batch is not None and micro is not None and accumulated is not None:
        if batch % (micro * accumulated):
            raise PlanFileError(
                f"train_batch_size {batch} is no multiple of {micro} x {accumulated} (micro-batch x accumulation)",
                where="the DeepSpeed configuration",
            )
        strategy["data"] = batch // (micro * accumulated)
        gpus = strategy["data"] * tensor * pipeline * context
    elif micro is None or batch is None:
        notes.append("batch sizes that the file leaves out, or to `auto`, are what the GPUs and the launcher make them")
    precision = next((name for name in ("bf16", "fp16") if _section(config, name).get("enabled") is True), None)
    return Imported(strategy=strategy, gpus=gpus, global_batch=batch, precision=precision, notes=tuple(notes))


def _is_number(value: Any) -> bool:
    """Whether a setting is there and is left to nobody else."""
    return value is not None and value != "auto"


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise PlanFileError(f"{name} is {value!r}", where="the DeepSpeed configuration", legal="an object")
    return value


TARGET = Target(name="deepspeed", releases=("0.19",), export=export, read=read)
