"""DeepSpeed: ds_config.json.

Keys read in docs/_pages/config-json.md, runtime/zero/config.py and runtime/tensor_parallel/config.py of 0.19. The JSON
cannot cut a model into pipeline stages: that needs a ``PipelineModule`` in your code, and is said.
"""

from __future__ import annotations

import json
from typing import Any

from autoplan.errors import PlanFileError
from autoplan.export.targets.settings import Settings, flattened
from autoplan.export.targets.types import Exported, Imported, Losses, Target, layers_of, recompute_of, torchrun, uneven
from autoplan.plan import Plan

_WHERE = "the DeepSpeed configuration"
_SECTIONS = ("zero_optimization", "tensor_parallel", "pipeline", "expert_parallel", "bf16", "fp16", "compile")


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
    losses.note(plan.compiled, "torch.compile: call engine.compile() in your code")
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
        raise PlanFileError(f"not JSON: {error}", where=_WHERE) from None
    if not isinstance(config, dict):
        raise PlanFileError("not an object", where=_WHERE, legal='{"train_batch_size": 256, ...}')

    settings = Settings(dict(flattened(config)), _WHERE)
    for name in _SECTIONS:
        if not isinstance(config.get(name, {}), dict):
            raise PlanFileError(f"{name} is {config[name]!r}", where=_WHERE, legal="an object")

    def whole(name: str, default: int) -> int:
        value = settings.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            if value == "auto":
                return default
            raise PlanFileError(f"{name} is {value!r}", where=_WHERE, legal="a number from 1")
        return value

    def told(name: str) -> int | None:
        """None where it is left to somebody else."""
        return whole(name, 1) if settings.get(name) not in (None, "auto") else None

    tensor, pipeline = whole("tensor_parallel.autotp_size", 1), whole("pipeline.stages", 1)
    context, expert = whole("sequence_parallel_size", 1), whole("expert_parallel.autoep_size", 1)
    strategy: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    micro, accumulated = told("train_micro_batch_size_per_gpu"), told("gradient_accumulation_steps")
    batch = told("train_batch_size")
    if micro is not None:
        strategy["micro_batch_size"] = micro
    strategy["zero_stage"] = _zero_stage(settings)
    settings.aside("expert_parallel.enabled", "zero_optimization.stage3_gather_16bit_weights_on_model_save")
    if config.get("zero_optimization", {}).get("overlap_comm") is True:
        settings.aside("zero_optimization.overlap_comm")  # as it is priced
    notes = ["offload to the host is not priced"] if _offloads(settings) else []
    gpus = None
    if batch is not None and micro is not None and accumulated is not None:
        if batch % (micro * accumulated):
            raise PlanFileError(
                f"train_batch_size {batch} is no multiple of {micro} x {accumulated} (micro-batch x accumulation)",
                where=_WHERE,
            )
        strategy["data"] = batch // (micro * accumulated)
        gpus = strategy["data"] * tensor * pipeline * context
    elif micro is None or batch is None:
        notes.append("batch sizes that the file leaves out, or to `auto`, are what the GPUs and the launcher make them")
    enabled = {name: settings.get(f"{name}.enabled") is True for name in ("bf16", "fp16")}
    compiled = [settings.get(f"compile.{name}") is True for name in ("deepcompile", "enabled")]
    return Imported(
        strategy=strategy,
        gpus=gpus,
        global_batch=batch,
        precision=next((name for name, is_on in enabled.items() if is_on), None),
        compiled=any(compiled),
        notes=(*notes, *settings.not_priced()),
    )


def _offloads(settings: Settings) -> bool:
    found = [settings.within(f"zero_optimization.offload_{what}") for what in ("optimizer", "param")]
    return any(part and next((v for k, v in part.items() if k.endswith(".device")), "cpu") != "none" for part in found)


def _zero_stage(settings: Settings) -> int:
    stage = settings.get("zero_optimization.stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise PlanFileError(f"stage is {stage!r}", where=_WHERE, legal="0, 1, 2 or 3")
    return stage


TARGET = Target(name="deepspeed", releases=("0.19",), export=export, read=read)
