"""torchtitan: a Python recipe, for ``--module planned --config planned``.

Names read in the 0.3.0 wheel: a run is a function that returns a ``Trainer.Config``; there is no TOML any more (that of
earlier releases is read). FSDP is
its data parallelism: parameters are sharded, and kept gathered between forward and backward (ZeRO-2's memory of
gradients and optimizer state) where ``fsdp_reshard_after_forward`` is "never".
"""

from __future__ import annotations

import ast
import tomllib
from typing import Any

from autoplan.errors import PlanFileError
from autoplan.export.targets.settings import Settings, flattened
from autoplan.export.targets.types import Exported, Imported, Losses, Target, header, nodes_and_each, recompute_of
from autoplan.plan import Plan

# Presets of ours whose configuration stands in torchtitan's registry.
_BASES = {
    "llama3-8b": ("torchtitan.models.llama3.config_registry", "llama3_8b"),
    "llama3-70b": ("torchtitan.models.llama3.config_registry", "llama3_70b"),
    "llama3.1-405b": ("torchtitan.models.llama3.config_registry", "llama3_405b"),
}
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
_RECOMPUTE = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}

_WHERE = "the torchtitan recipe"
_OTHERS = ("parallelism.pipeline_parallel_schedule_csv",)


def export(plan: Plan) -> Exported:
    """``planned.py`` with one function that changes the base configuration of the model."""
    strategy, losses = plan.strategy, Losses("torchtitan")
    policy, everywhere = recompute_of(plan)
    module, function = _BASES.get(plan.model.name, ("your_models", "base_config"))
    losses.note(
        plan.model.name not in _BASES, f"{plan.model.name} itself: put your model's own configuration function in"
    )
    losses.note(not everywhere, f"recompute layer by layer: {policy} for every layer")
    losses.note(
        strategy.zero_stage == 1, "ZeRO-1: FSDP without resharding, which scatters gradients every micro-batch too"
    )
    sharded = strategy.zero_stage > 0
    settings: dict[str, Any] = {
        "training.local_batch_size": strategy.micro_batch_size * strategy.micro_batches,
        "training.global_batch_size": strategy.global_batch,
        "training.seq_len": plan.model.tokens_per_sample,
        "parallelism.data_parallel_replicate_degree": 1 if sharded else strategy.data,
        "parallelism.data_parallel_shard_degree": strategy.data if sharded else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if strategy.zero_stage == 3 else "never",
        "parallelism.tensor_parallel_degree": strategy.tensor,
        "parallelism.enable_sequence_parallel": strategy.sequence_parallel,
        "parallelism.context_parallel_degree": strategy.context,
        "parallelism.expert_parallel_degree": strategy.expert,
        "parallelism.pipeline_parallel_degree": strategy.pipeline,
    }
    if strategy.pipeline > 1:
        settings["parallelism.pipeline_parallel_schedule"] = _SCHEDULES[strategy.schedule]
        settings["parallelism.pipeline_parallel_microbatch_size"] = strategy.micro_batch_size
        settings["parallelism.module_fqns_per_model_part"] = _parts(plan)
    elif strategy.micro_batches > 1:
        settings["training.local_batch_size"] = strategy.micro_batch_size  # it accumulates up to the global batch
    if plan.compiled:
        settings["compile.enable"] = True
    lines = [f"    config.{key} = {_literal(value)}" for key, value in settings.items()]
    lines.append(f"    config.activation_checkpoint = {_RECOMPUTE[policy]}")
    imports = [f"from {module} import {function}", "from torchtitan.trainer import Trainer"]
    if policy != "none":
        name = _RECOMPUTE[policy].partition(".")[0]
        imports.insert(1, f"from torchtitan.distributed.activation_checkpoint import {name}")
    text = "\n".join(
        [
            '"""' + "\n".join(header(plan)),
            "",
            "For torchtitan 0.3.",
            '"""',
            "",
            *imports,
            "",
            "",
            "def planned() -> Trainer.Config:",
            f"    config = {function}()",
            *lines,
            "    return config",
            "",
        ]
    )
    nodes, each = nodes_and_each(plan)
    several = f" --nnodes {nodes} --rdzv-endpoint $MASTER_ADDR:29500" if nodes > 1 else ""
    launch = f"torchrun --nproc-per-node {each}{several} -m torchtitan.train --module planned --config planned"
    return Exported(files={"planned.py": text}, launch=launch, lost=tuple(losses.notes))


def _parts(plan: Plan) -> list[list[str]]:
    return [list(plan.model.layers[stage.first_layer : stage.last_layer + 1]) for stage in plan.stages]


def _literal(value: Any) -> str:
    if isinstance(value, list):
        rows = ["        [" + ", ".join(f'"{name}"' for name in part) + "]," for part in value]
        return "\n".join(["[", *rows, "    ]"])
    return f'"{value}"' if isinstance(value, str) else str(value)


def read(text: str) -> Imported:
    """The strategy of a recipe's assignments to ``config``. Raises PlanFileError for what is no Python."""
    found = _settings(text)
    found.aside("model.name", "model.flavor", "activation_checkpoint.mode")

    def whole(key: str, default: int) -> int:
        value = found.get(key, default)
        if not isinstance(value, int) or (value < 1 and key != "parallelism.data_parallel_shard_degree"):
            raise PlanFileError(f"config.{key} is {value!r}", where=_WHERE, legal="a number from 1")
        return value

    replicate = whole("parallelism.data_parallel_replicate_degree", 1)
    shard = whole("parallelism.data_parallel_shard_degree", -1)
    pipeline = whole("parallelism.pipeline_parallel_degree", 1)
    strategy: dict[str, Any] = {
        "tensor": whole("parallelism.tensor_parallel_degree", 1),
        "pipeline": pipeline,
        "context": whole("parallelism.context_parallel_degree", 1),
        "expert": whole("parallelism.expert_parallel_degree", 1),
    }
    notes = []
    if shard > 0:
        strategy["data"] = replicate * shard
    else:
        notes.append("data_parallel_shard_degree is what the GPUs leave over: give --gpus")
    reshard = found.get("parallelism.fsdp_reshard_after_forward", "default")
    strategy["zero_stage"] = 0 if shard == 1 else 2 if reshard == "never" else 3
    if shard not in (1, -1) and replicate > 1:
        notes.append("hybrid sharding is priced as sharding over all data ranks")
    strategy["sequence_parallel"] = (
        bool(found.get("parallelism.enable_sequence_parallel", True)) and strategy["tensor"] > 1
    )
    names = {written: ours for ours, written in _SCHEDULES.items()}
    schedule = str(found.get("parallelism.pipeline_parallel_schedule", "1F1B"))
    parts = found.get("parallelism.module_fqns_per_model_part")
    size = whole("parallelism.pipeline_parallel_microbatch_size", 1)
    if pipeline > 1:
        strategy["schedule"] = names.get(schedule, "1f1b")
        strategy["virtual_stages"] = max(1, len(parts) // pipeline) if isinstance(parts, list) else 1
    local = whole("training.local_batch_size", 1)
    strategy["micro_batch_size"] = size if pipeline > 1 else local
    strategy["recompute"] = {"FullAC": "full", "SelectiveAC": "selective"}.get(
        str(found.get("activation_checkpoint")), "none"
    )
    batch = found.get("training.global_batch_size")
    seq = found.get("training.seq_len")
    return Imported(
        strategy=strategy,
        global_batch=batch if isinstance(batch, int) and batch > 0 else None,
        seq=seq if isinstance(seq, int) else None,
        compiled=_is_compiled(found),
        notes=(*notes, *found.not_priced()),
    )


def _is_compiled(found: Settings) -> bool:
    components = found.get("compile.components", ["model"])
    enabled = found.get("compile.enable", found.get("training.compile", False))
    return enabled is True and isinstance(components, list) and "model" in components


def _settings(text: str) -> Settings:
    """The settings of a recipe, or of the TOML file of an earlier release, by the recipe's names."""
    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        sections = {}
    if not isinstance(sections.get("training", sections.get("parallelism")), dict):
        return Settings(_assignments(text), _WHERE, others=_OTHERS)
    found = dict(flattened(sections))
    for key in list(found):  # degrees stood in [training] and [experimental] once
        section, _, name = key.partition(".")
        if section not in ("training", "experimental"):
            continue
        if name.endswith("_parallel_degree") or name.startswith(("data_parallel_", "pipeline_parallel_")):
            found[f"parallelism.{name}"] = found.pop(key)
    if "training.batch_size" in found:
        found.setdefault("training.local_batch_size", found.pop("training.batch_size"))
    mode = str(found.get("activation_checkpoint.mode", "none"))
    found["activation_checkpoint"] = {"full": "FullAC", "selective": "SelectiveAC"}.get(mode, "None")
    return Settings(found, _WHERE, others=_OTHERS)


def _assignments(text: str) -> dict[str, Any]:
    """``config.a.b = literal``, by "a.b"; calls by the name that they begin with."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PlanFileError(f"not Python: {error.msg}", where=f"{_WHERE}, line {error.lineno}") from None
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        key = ast.unparse(node.targets[0]).partition(".")[2]
        try:
            found[key] = ast.literal_eval(node.value)
        except ValueError:
            found[key] = ast.unparse(node.value).partition(".")[0].partition("(")[0]
    if not found:
        raise PlanFileError(
            "nothing is assigned to a configuration here",
            where=_WHERE,
            legal="config.parallelism.tensor_parallel_degree = 2, and the like",
        )
    return found


TARGET = Target(name="torchtitan", releases=("0.3",), export=export, read=read)
