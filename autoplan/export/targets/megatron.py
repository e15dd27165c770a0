"""Megatron-LM: flags of pretrain_gpt.py.

Names read in megatron/training/arguments.py, core/model_parallel_config.py and core/transformer/transformer_config.py
of the releases named below. Data parallelism is what the other degrees leave over. Model stages are placed as ours are:
stage s on pipeline rank s mod P, so that ``--pipeline-model-parallel-layout`` lists them in model order.
"""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

from autoplan.errors import PlanFileError
from autoplan.export.targets.settings import Settings
from autoplan.export.targets.types import (
    Exported,
    Imported,
    Losses,
    Target,
    blocks_of,
    header,
    recompute_of,
    torchrun,
    uneven,
)
from autoplan.plan import Plan

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
_PRECISION = {
    "bf16": "--bf16",
    "fp16": "--fp16",
    "fp8": "--bf16 --fp8-format hybrid",
    "mxfp8": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
}
_FORMATS = {"fp8": "fp8-format", "bf16": "bf16", "fp16": "fp16"}  # flag by precision, the narrowest first
_OTHERS = ("--fp4-format", "--fp4-recipe", "--virtual-pipeline-model-parallel-size")
# Where ranks meet; how a whole layer is recomputed; overlap, as it is priced.
_ASIDE = (
    *(f"--{name}" for name in ("node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id")),
    *(f"--{name}" for name in ("recompute-method", "recompute-num-layers")),
    *(f"--{name}" for name in ("overlap-grad-reduce", "overlap-param-gather")),
)


def export(plan: Plan) -> Exported:
    """``megatron.sh``: the launch command with every parallelism flag; the model's own flags are yours."""
    strategy, losses = plan.strategy, Losses("Megatron-LM")
    blocks = blocks_of(plan)
    flags = [
        f"--tensor-model-parallel-size {strategy.tensor}",
        f"--pipeline-model-parallel-size {strategy.pipeline}",
        f"--context-parallel-size {strategy.context}",
        f"--expert-model-parallel-size {strategy.expert}",
        f"--micro-batch-size {strategy.micro_batch_size}",
        f"--global-batch-size {strategy.global_batch}",
    ]
    flags += ["--sequence-parallel"] if strategy.sequence_parallel else []
    if strategy.virtual_stages > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {strategy.virtual_stages}")
    if len(blocks) > 1 and (uneven(blocks) or strategy.virtual_stages > 1):
        flags.append(f"--pipeline-model-parallel-layout {shlex.quote(_layout(blocks))}")
    if strategy.zero_stage == 1:
        flags.append("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    elif strategy.zero_stage in _SHARDING:
        flags.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {_SHARDING[strategy.zero_stage]}")
    flags += _recompute(plan, losses)
    flags += [_PRECISION[plan.precision]] if plan.precision in _PRECISION else []
    losses.refuse(
        strategy.zero_stage >= 2 and strategy.pipeline > 1,
        f"ZeRO-{strategy.zero_stage} with pipeline stages (its FSDP has none)",
        "plan with --strategy zero_stage=1",
    )
    losses.note(strategy.schedule == "gpipe", "GPipe: Megatron runs 1F1B, which holds fewer micro-batches at once")
    losses.note(plan.compiled, "torch.compile: Megatron fuses what it has kernels for")
    losses.note(strategy.schedule == "zero_bubble", "zero-bubble: released Megatron runs 1F1B or interleaved 1F1B")
    body = " \\\n    ".join([torchrun(plan, "pretrain_gpt.py"), *flags, '"${MODEL_FLAGS[@]}"'])
    comments = "".join(f"# {line}\n" for line in header(plan))
    model = "# The model's own flags: --num-layers, --hidden-size, --seq-length, data, tokenizer, ...\nMODEL_FLAGS=()\n"
    return Exported(
        files={"megatron.sh": f"#!/usr/bin/env bash\n{comments}set -euo pipefail\n{model}{body}\n"},
        launch="bash megatron.sh",
        lost=tuple(losses.notes),
    )


def _layout(blocks: list[int]) -> str:
    """E the embedding, t a decoder layer, L the loss; | ends a stage."""
    parts = [f"t*{count}" if count else "" for count in blocks]
    return "E" + "|".join(parts) + "L"


def _recompute(plan: Plan, losses: Losses) -> list[str]:
    policy, everywhere = recompute_of(plan)
    if policy == "none":
        return []
    if policy == "selective":
        losses.note(not everywhere, "recompute of the attention core in some layers alone: it is turned on for all")
        return ["--recompute-activations"]
    if everywhere:
        return ["--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
    most = max(stage.recompute.get("full", 0) for stage in plan.stages)
    losses.note(True, f"recompute layer by layer: the first {most} layers of every stage are recomputed")
    return [f"--recompute-granularity full --recompute-method block --recompute-num-layers {most}"]


def read(text: str) -> Imported:
    """The strategy of a launch script's (or argument file's) flags. Raises PlanFileError for flags without sense."""
    flags = Settings(_flags(text), "the Megatron-LM flags", others=_OTHERS)
    flags.aside(*_ASIDE)

    def whole(name: str, default: int) -> int:
        value = flags.get(name)
        if value is None:
            return default
        if not re.fullmatch(r"[1-9]\d*", value):
            raise PlanFileError(f"{name} is {value!r}", where=flags.where, legal="a whole number from 1")
        return int(value)

    tensor, pipeline = whole("--tensor-model-parallel-size", 1), whole("--pipeline-model-parallel-size", 1)
    context, expert = whole("--context-parallel-size", 1), whole("--expert-model-parallel-size", 1)
    gpus = whole("--nproc-per-node", 0) * whole("--nnodes", 1) or None
    strategy: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    if gpus is not None:
        model = tensor * pipeline * context
        if gpus % model:
            raise PlanFileError(
                f"{gpus} processes are no multiple of tensor {tensor} x pipeline {pipeline} x context {context}",
                where="the Megatron-LM flags",
            )
        strategy["data"] = gpus // model
    strategy["micro_batch_size"] = whole("--micro-batch-size", 1)
    strategy["sequence_parallel"] = "--sequence-parallel" in flags and tensor > 1  # Megatron ignores it without
    virtual = whole("--num-virtual-stages-per-pipeline-rank", 1)
    layout = flags.get("--pipeline-model-parallel-layout")
    if layout and virtual == 1:
        virtual = max(1, (layout.count("|") + 1) // pipeline)
    strategy |= {"virtual_stages": virtual, "schedule": "interleaved" if virtual > 1 else "1f1b"}
    strategy["zero_stage"] = _zero_stage(flags)
    strategy["recompute"] = _policy(flags)
    asked = {name: f"--{flag}" in flags for name, flag in _FORMATS.items()}
    precision = next((name for name, is_there in asked.items() if is_there), None)
    if flags.get("--fp8-recipe") == "mxfp8":
        precision = "mxfp8"
    batch = whole("--global-batch-size", 0) if "--global-batch-size" in flags else None
    seq = whole("--seq-length", 0) if "--seq-length" in flags else None
    return Imported(
        strategy=strategy, gpus=gpus, global_batch=batch, precision=precision, seq=seq, notes=flags.not_priced()
    )


def _flags(text: str) -> dict[str, str]:
    """The words that begin with two dashes, each with its value; what the script assigns to its variables is put in."""
    plain = _with_variables(re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*$", "", text)))
    try:
        words = shlex.split(plain)
    except ValueError as error:
        raise PlanFileError(f"not a shell script: {error}", where="the Megatron-LM flags") from None
    flags: dict[str, str] = {}
    for word, following in itertools.pairwise([*words, ""]):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags[name.replace("_", "-")] = value if equals else ("" if following.startswith("-") else following)
    if not flags:
        raise PlanFileError(
            "there are no flags", where="the Megatron-LM flags", legal="--tensor-model-parallel-size 2, and the like"
        )
    return flags


def _with_variables(text: str) -> str:
    """``$NAME`` and ``${NAME}`` as the lines ``NAME=word`` set them, ``${NAME:-word}`` as its default otherwise."""
    given = dict(re.findall(r"(?m)^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?([^\s\"'();$]+)[\"']?\s*(?:;.*|#.*)?$", text))
    given |= {
        name: default
        for name, default in re.findall(r"(?m)^\s*(?:export\s+)?([A-Za-z_]\w*)=[\"']?\$\{\w+:-(\w+)\}", text)
    }

    def value(found: re.Match[str]) -> str:
        name, default = found.group(1) or found.group(3), found.group(2)
        return str(given.get(name, default if default is not None else found.group(0)))

    return re.sub(r"\$\{(\w+)(?::-(\w+))?\}|\$([A-Za-z_]\w*)", value, text)


def _zero_stage(flags: Settings) -> int:
    kind = flags.get("--data-parallel-sharding-strategy", "optim_grads_params")
    own, torchs, distributed = (
        f"--use-{name}" in flags for name in ("megatron-fsdp", "torch-fsdp2", "distributed-optimizer")
    )
    if own or torchs:
        return {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(kind, 3)
    return int(distributed)


def _policy(flags: Settings) -> str:
    granularity = flags.get("--recompute-granularity")
    if "--recompute-activations" in flags or granularity == "selective":
        return "selective"
    return "full" if granularity == "full" else "none"


TARGET = Target(name="megatron", releases=("core 0.16",), export=export, read=read)
