"""``autoplan fit``: does a model fit, with how much to spare, or what is the nearest change that makes it fit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from autoplan.cli import answer, console, options
from autoplan.errors import InfeasibleError
from autoplan.explain.text import size

if TYPE_CHECKING:
    from autoplan.search.questions import Fit


def fit(
    model: options.Model,
    gpus: options.Gpus,
    global_batch: options.GlobalBatch = None,
    seq: options.Sequence = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = "adamw",
    strategy: options.StrategyText = None,
    headroom: options.Headroom = None,
    max_gpus: options.MaxGpus = None,
    stages: options.Stages = None,
    inside_node: options.InsideNode = None,
    json: options.Json = False,
) -> None:
    """Say whether a model fits, and with how much memory to spare.

    Exit code 0: it fits. Exit code 1: it does not; then by how much, and the nearest changes that fit.

    Example: autoplan fit llama3-8b --gpus 8xA100-80GB --global-batch 64
    """
    options.check_cluster(gpus)
    forced = options.with_limits(
        options.parse_strategy(strategy), headroom=headroom, max_gpus=max_gpus, stages=stages, inside_node=inside_node
    )
    import autoplan

    try:
        with console.progress(f"Fitting {model} on {gpus}"):
            found = autoplan.fit(
                model,
                gpus=gpus,
                global_batch=global_batch,
                seq=seq,
                precision=precision,
                optimizer=optimizer,
                strategy=forced or None,
            )
    except InfeasibleError as error:
        _say_no(error, json=json)
        raise typer.Exit(error.exit_code) from None
    if json:
        console.result_json(_row(found))
    else:
        console.result(*_sentences(found))


def _say_no(error: InfeasibleError, *, json: bool) -> None:
    if json:
        console.result_json(answer.infeasible(error))
        return
    said = [
        console.folded(f"no: {error.what}", 4),
        *(console.folded(f"  try: {text}", 7) for text in error.suggestions),
    ]
    console.result(*(line for lines in said for line in lines))


def _sentences(found: Fit) -> tuple[str, ...]:
    plan = found.plan
    tightest = min(plan.stages, key=lambda stage: plan.cluster.memory_of(stage) - stage.peak_memory_bytes)
    lines = [
        f"yes: {plan.model.name} fits {plan.cluster.spec} at global batch {plan.global_batch}",
        f"  the fastest plan ({plan.strategy.describe()}, micro-batch {plan.strategy.micro_batch_size}) needs "
        f"{size(tightest.peak_memory_bytes)} of {size(plan.cluster.memory_of(tightest))}: "
        f"{size(found.headroom_bytes)} to spare",
    ]
    if found.most_headroom_bytes > found.headroom_bytes:
        lines.append(f"  the roomiest ({found.roomiest.describe()}) leaves {size(found.most_headroom_bytes)}")
    return tuple(part for line in lines for part in console.folded(line, 4))


def _row(found: Fit) -> dict[str, object]:
    plan = found.plan
    return {
        "schema": 1,
        "feasible": True,
        "gpus": plan.gpus,
        "gpus_used": plan.gpus_used,
        "global_batch": plan.global_batch,
        "strategy": dataclasses.asdict(plan.strategy),
        "memory_bytes": plan.cluster.memory_bytes,
        "peak_memory_bytes": plan.predicted.peak_memory_bytes,
        "headroom_bytes": found.headroom_bytes,
        "roomiest": dataclasses.asdict(found.roomiest),
        "most_headroom_bytes": found.most_headroom_bytes,
    }
