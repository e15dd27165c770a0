"""``autoplan plan``: the best plan for a model on a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli import answer, completions, options


def plan(
    model: options.Model,
    gpus: options.Gpus,
    global_batch: options.GlobalBatch = None,
    seq: options.Sequence = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = "adamw",
    compiled: options.Compiled = False,
    strategy: options.StrategyText = None,
    headroom: options.Headroom = None,
    max_gpus: options.MaxGpus = None,
    stages: options.Stages = None,
    inside_node: options.InsideNode = None,
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="TOOL",
            help="Only what it can express: megatron, deepspeed-zero3, fsdp2, ddp...",
            autocompletion=completions.like,
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            min=0.0,
            help="Search no longer: the best found by then, with how far from the best it may be.",
        ),
    ] = None,
    output: options.Output = None,
    json: options.Json = False,
) -> None:
    """Find the fastest plan that fits, and prove it.

    Keys in --strategy are forced, --like keeps to what another tool can express; the rest is planned.
    Exit code 1: nothing fits.

    Example: autoplan plan llama3-70b --gpus 8x8xH100 --global-batch 256 --seq 4096 -o plan.json
    """
    options.check_cluster(gpus)
    forced = options.with_limits(
        options.parse_strategy(strategy), headroom=headroom, max_gpus=max_gpus, stages=stages, inside_node=inside_node
    )
    if like is not None:
        from autoplan.export.like import strategy_like

        forced = strategy_like(like, forced)

    def decide() -> answer.Plan:
        import autoplan

        return autoplan.plan(
            model,
            gpus=gpus,
            global_batch=global_batch,
            seq=seq,
            precision=precision,
            optimizer=optimizer,
            compiled=compiled,
            strategy=forced or None,
            time_limit_s=time_limit,
        )

    answer.give(decide, what=f"Planning {model} for {gpus}", output=output, json=json)
