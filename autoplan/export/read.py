"""A file of another tool: whose it is, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import PlanFileError, StrategyError
from autoplan.export.targets import Imported, target_named

# What a file of a tool has and others lack, in the order in which they are asked.
_SIGNS = (
    ("kubernetes", "kind: Job"),
    ("slurm", "#SBATCH"),
    ("megatron", "--tensor-model-parallel-size"),
    ("megatron", "--pipeline-model-parallel-size"),
    ("torchtitan", "config.parallelism."),
    ("torchtitan", "[parallelism]"),
    ("torchtitan", "data_parallel_shard_degree ="),
    ("fsdp2", "fully_shard"),
    ("accelerate", "compute_environment"),
    ("accelerate", "distributed_type"),
    ("transformers", '"tp_size"'),
    ("transformers", '"fsdp_size"'),
    ("deepspeed", "zero_optimization"),
    ("deepspeed", "train_micro_batch_size_per_gpu"),
    ("deepspeed", "train_batch_size"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was read, and whose it is."""

    tool: str
    imported: Imported


def read_file(path: Path, tool: str | None) -> Found:
    """Raises PlanFileError for what cannot be read or recognised, and what the tool's reader raises."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise PlanFileError(f"cannot read it: {reason}", where=str(path)) from None
    name = tool or next((owner for owner, sign in _SIGNS if sign in text), None)
    if name is None:
        raise PlanFileError(
            "this is no configuration that is known",
            where=str(path),
            legal="one of torchtitan, Megatron-LM, DeepSpeed, Accelerate, FSDP2, transformers, Slurm or Kubernetes",
            attempt="--from TOOL",
        )
    try:
        target = target_named(name)
    except StrategyError as error:
        raise StrategyError(error.what, where="--from", legal=error.legal) from None
    if _is_plan(text):
        raise PlanFileError(
            f"this is a plan of autoplan's own, and no configuration of {target.name}",
            where=str(path),
            attempt=f"autoplan export {path} --to {target.name}, or autoplan show {path}",
        )
    try:
        return Found(tool=target.name, imported=target.read(text))
    except PlanFileError as error:  # which knows its text alone
        where = f"{path}, {error.where}" if error.where else str(path)
        raise PlanFileError(error.what, where=where, legal=error.legal, attempt=error.attempt) from None


def _is_plan(text: str) -> bool:
    return '"schema"' in text[:200] and '"revision"' in text[:200]
