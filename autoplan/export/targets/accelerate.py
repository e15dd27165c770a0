"""Accelerate: the YAML of ``accelerate launch --config_file``.

Keys read in commands/config/config_args.py and parallelism_config.py of 1.15: FSDP 2 for sharded state, a
parallelism_config for degrees other than plain data parallelism. It has neither pipeline nor expert axes. Gradient
accumulation is no key of the file, and unknown ones are refused: ``Accelerator(gradient_accumulation_steps=...)``.
"""

from __future__ import annotations

from typing import Any

import yaml

from autoplan.errors import PlanFileError
from autoplan.export.targets.types import Exported, Imported, Losses, Target, header, nodes_and_each, recompute_of
from autoplan.plan import Plan

_PREFIX = "parallelism_config_"
_WHERE = "the Accelerate configuration"


def export(plan: Plan) -> Exported:
    """``accelerate.yaml``."""
    strategy, losses = plan.strategy, Losses("Accelerate")
    losses.refuse(strategy.pipeline > 1, f"pipeline {strategy.pipeline}", "plan with --strategy pipeline=1")
    losses.refuse(strategy.expert > 1, f"expert {strategy.expert}", "plan with --strategy expert=1")
    sharded = strategy.zero_stage > 0
    losses.refuse(
        not sharded and strategy.data > 1 and (strategy.tensor > 1 or strategy.context > 1),
        "replicated data parallelism beside tensor or context (it needs sharded parameters there)",
        "plan with --strategy zero_stage=3",
    )
    policy, everywhere = recompute_of(plan)
    losses.note(strategy.zero_stage == 1, "ZeRO-1: FSDP without resharding scatters gradients every micro-batch too")
    losses.note(
        policy == "selective" or not everywhere,
        "recompute layer by layer or of the attention core: whole layers, all of them",
    )
    losses.note(
        strategy.sequence_parallel, "sequence parallelism of norms and dropout: those are computed on every rank"
    )
    nodes, each = nodes_and_each(plan)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "mixed_precision": {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}.get(plan.precision, "fp8"),
        "num_machines": nodes,
        "num_processes": nodes * each,
        "machine_rank": 0,
        "main_training_function": "main",
    }
    if sharded or strategy.tensor > 1 or strategy.context > 1:
        config["parallelism_config"] = {
            f"{_PREFIX}dp_replicate_size": 1 if sharded else strategy.data,
            f"{_PREFIX}dp_shard_size": strategy.data if sharded else 1,
            f"{_PREFIX}tp_size": strategy.tensor,
            f"{_PREFIX}cp_size": strategy.context,
        }
    if sharded:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": strategy.zero_stage == 3,
            "fsdp_activation_checkpointing": policy != "none",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
        }
    sizes = f"per-device batch size {strategy.micro_batch_size}"
    if strategy.micro_batches > 1:
        sizes += f"; Accelerator(gradient_accumulation_steps={strategy.micro_batches})"
    comments = "".join(f"# {line}\n" for line in [*header(plan), sizes])
    return Exported(
        files={"accelerate.yaml": comments + yaml.safe_dump(config, sort_keys=False)},
        launch="accelerate launch --config_file accelerate.yaml train.py",
        lost=tuple(losses.notes),
    )


def read(text: str) -> Imported:
    """The strategy of a configuration. Raises PlanFileError for what is no such YAML."""
    config = load_yaml(text, _WHERE)
    degrees = config.get("parallelism_config") or {}
    if not isinstance(degrees, dict):
        raise PlanFileError("parallelism_config is no mapping", where=_WHERE)

    def degree(name: str, default: int = 1) -> int:
        value = degrees.get(f"{_PREFIX}{name}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanFileError(f"{_PREFIX}{name} is {value!r}", where=_WHERE, legal="a number from 1")
        return value

    gpus = config.get("num_processes")
    gpus = gpus if isinstance(gpus, int) and not isinstance(gpus, bool) and gpus > 0 else None
    tensor, context = degree("tp_size"), degree("cp_size")
    fsdp = config.get("fsdp_config") or {}
    if not isinstance(fsdp, dict):
        raise PlanFileError("fsdp_config is no mapping", where=_WHERE)
    data = degree("dp_replicate_size") * degree("dp_shard_size")
    if not degrees and gpus:
        data = gpus
    strategy: dict[str, Any] = {"data": data, "tensor": tensor, "context": context, "pipeline": 1, "expert": 1}
    sharded = str(config.get("distributed_type")) == "FSDP"
    strategy["zero_stage"] = _sharded_stage(fsdp) if sharded else 0
    notes: list[str] = []
    if str(config.get("distributed_type")) == "DEEPSPEED":
        other = config.get("deepspeed_config") or {}
        stage = other.get("zero_stage") if isinstance(other, dict) else None
        if stage in (0, 1, 2, 3):
            strategy["zero_stage"] = stage
        else:
            del strategy["zero_stage"]
            notes.append("the ZeRO stage is in a DeepSpeed file of its own: import that")
    strategy["recompute"] = "full" if fsdp.get("fsdp_activation_checkpointing") else "none"
    precision = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}.get(
        str(config.get("mixed_precision")).lower()
    )
    if config.get("mixed_precision") is False:  # YAML reads a bare `no` so
        precision = "fp32"
    return Imported(strategy=strategy, gpus=gpus, precision=precision, notes=tuple(notes))


# What FSDP 1 called what FSDP 2 says with fsdp_reshard_after_forward.
_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}


def _sharded_stage(fsdp: dict[str, Any]) -> int:
    reshard, named = fsdp.get("fsdp_reshard_after_forward", True), fsdp.get("fsdp_sharding_strategy")
    for each in (named, reshard):
        if isinstance(each, str) and each.upper() in _STRATEGIES:
            return _STRATEGIES[each.upper()]
    return 3 if reshard else 2


def load_yaml(text: str, where: str) -> dict[str, Any]:
    """One mapping; raises PlanFileError with the line."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise PlanFileError(f"not YAML: {getattr(error, 'problem', error)}", where=f"{where}{line}") from None
    if not isinstance(config, dict):
        raise PlanFileError("not a mapping", where=where)
    return config


TARGET = Target(name="accelerate", releases=("1.15",), export=export, read=read)
