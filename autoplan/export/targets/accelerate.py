"""Accelerate: the YAML of ``accelerate launch --config_file``.

Keys read in commands/config/config_args.py and parallelism_config.py of 1.15: FSDP 2 for sharded state, a
parallelism_config for degrees other than plain data parallelism. It has neither pipeline nor expert axes. Gradient
accumulation is no key of the file, and unknown ones are refused: ``Accelerator(gradient_accumulation_steps=...)``.
"""

from __future__ import annotations

from typing import Any

import yaml

from autoplan.errors import PlanFileError
from autoplan.export.targets.settings import Settings, flattened
from autoplan.export.targets.types import Exported, Imported, Losses, Target, header, nodes_and_each, recompute_of
from autoplan.plan import Plan

_PREFIX = "parallelism_config_"
_WHERE = "the Accelerate configuration"
_SECTIONS = ("parallelism_config", "fsdp_config", "deepspeed_config", "dynamo_config")
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
_OTHERS = (
    "parallelism_config.parallelism_config_sp_size",
    "fsdp_config.fsdp_activation_checkpointing_offload",
)
_OFFLOADS = ("fsdp_config.fsdp_offload_params", "fsdp_config.fsdp_activation_checkpointing_offload")
# What says where ranks meet, and how a file of weights is written.
_ASIDE = (
    *("compute_environment", "machine_rank", "num_machines", "main_training_function", "main_process_ip"),
    *("main_process_port", "rdzv_backend", "same_network", "gpu_ids", "debug", "enable_cpu_affinity"),
    *(f"fsdp_config.fsdp_{name}" for name in ("version", "state_dict_type", "cpu_ram_efficient_loading")),
    *(f"fsdp_config.fsdp_{name}" for name in ("auto_wrap_policy", "transformer_layer_cls_to_wrap")),
    *(f"fsdp_config.fsdp_{name}" for name in ("use_orig_params", "sync_module_states")),
    "downcast_bf16",
    *(f"tpu_{name}" for name in ("env", "use_cluster", "use_sudo")),
)


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
    if plan.compiled:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    comments = "".join(f"# {line}\n" for line in [*header(plan), sizes])
    return Exported(
        files={"accelerate.yaml": comments + yaml.safe_dump(config, sort_keys=False)},
        launch="accelerate launch --config_file accelerate.yaml train.py",
        lost=tuple(losses.notes),
    )


def read(text: str) -> Imported:
    """The strategy of a configuration. Raises PlanFileError for what is no such YAML."""
    config = load_yaml(text, _WHERE)
    for section in _SECTIONS:
        if not isinstance(config.get(section) or {}, dict):
            raise PlanFileError(f"{section} is no mapping", where=_WHERE)
    given = {name: value for name, value in flattened(config) if value not in ({}, None, "none")}
    settings = Settings(given, _WHERE, others=_OTHERS)
    settings.aside(*_ASIDE, *(name for name in _OFFLOADS if given.get(name) is False))

    def degree(name: str) -> int:
        value = settings.get(f"parallelism_config.{_PREFIX}{name}", 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanFileError(f"{_PREFIX}{name} is {value!r}", where=_WHERE, legal="a number from 1")
        return value

    gpus = settings.get("num_processes")
    gpus = gpus if isinstance(gpus, int) and not isinstance(gpus, bool) and gpus > 0 else None
    tensor, context = degree("tp_size"), degree("cp_size")
    data = degree("dp_replicate_size") * degree("dp_shard_size")
    if not config.get("parallelism_config") and gpus:
        data = gpus
    strategy: dict[str, Any] = {"data": data, "tensor": tensor, "context": context, "pipeline": 1, "expert": 1}
    zero, notes = _zero_stage(settings)
    strategy |= zero
    recompute = settings.get("fsdp_config.fsdp_activation_checkpointing")
    strategy["recompute"] = "full" if recompute else "none"
    mixed = settings.get("mixed_precision")  # YAML reads a bare `no` as False
    precision = _PRECISIONS.get("no" if mixed is False else str(mixed).lower())
    return Imported(
        strategy=strategy,
        gpus=gpus,
        precision=precision,
        compiled=_is_compiled(settings),
        notes=(*notes, *settings.not_priced()),
    )


def _zero_stage(settings: Settings) -> tuple[dict[str, int], list[str]]:
    """The key of the strategy, where the file says it; else a note of where it stands."""
    kind, others = str(settings.get("distributed_type")), settings.get("deepspeed_config.zero_stage")
    sharded = _sharded_stage(settings)
    if kind != "DEEPSPEED":
        return {"zero_stage": sharded if kind == "FSDP" else 0}, []
    if others in (0, 1, 2, 3):
        return {"zero_stage": others}, []
    settings.aside("deepspeed_config.deepspeed_config_file")
    return {}, ["the ZeRO stage is in a DeepSpeed file of its own: import that"]


def _is_compiled(settings: Settings) -> bool:
    """Both ways that a file names the compiler of torch; "no" and "eager" compile nothing."""
    named = [settings.get(name) for name in ("dynamo_config.dynamo_backend", "dynamo_backend")]
    return any(isinstance(name, str) and name.lower() not in ("no", "eager") for name in named)


# What FSDP 1 called what FSDP 2 says with fsdp_reshard_after_forward.
_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}


def _sharded_stage(settings: Settings) -> int:
    reshard = settings.get("fsdp_config.fsdp_reshard_after_forward", True)
    for each in (settings.get("fsdp_config.fsdp_sharding_strategy"), reshard):
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
