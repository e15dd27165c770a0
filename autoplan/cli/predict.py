"""``autoplan predict``: time and memory of a strategy that the user has in mind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import answer, completions, console, options
from autoplan.errors import StrategyError


def predict(
    model: options.Model,
    gpus: options.Gpus,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            metavar="K=V,...",
            help="The strategy: data=4,tensor=2,zero_stage=1.",
            autocompletion=completions.strategy,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="The strategy of a torchtitan, Megatron-LM, DeepSpeed or Accelerate setup."
        ),
    ] = None,
    stages: options.Stages = None,
    global_batch: options.GlobalBatch = None,
    seq: options.Sequence = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = "adamw",
    compiled: options.Compiled = False,
    output: options.Output = None,
    json: options.Json = False,
) -> None:
    """Predict a given strategy; a key left out takes the value that costs least.

    With --config the strategy, and the global batch, precision and sequence where they are not given, are those of a
    configuration that you train with today, compiled where it compiles; keys of --strategy go before its own. Exit
    code 1: it does not fit.

    Example: autoplan predict llama3-8b --gpus 8xH100 --strategy data=8,zero_stage=1
    """
    options.check_cluster(gpus)
    wanted = options.with_limits(options.parse_strategy(strategy), stages=stages)
    if config is not None:
        from autoplan.export.read import read_file

        imported = read_file(config, None).imported
        wanted = {**imported.strategy, **wanted}
        for note in imported.notes:
            console.note(f"{config}: {note}")
        global_batch, seq = global_batch or imported.global_batch, seq or imported.seq
        precision, compiled = precision or imported.precision, compiled or imported.compiled
    if not wanted:
        raise StrategyError("predict needs a strategy", attempt="--strategy data=4,tensor=2, or `autoplan plan`")

    def decide() -> answer.Plan:
        import autoplan

        return autoplan.predict(
            model,
            gpus=gpus,
            global_batch=global_batch,
            seq=seq,
            precision=precision,
            optimizer=optimizer,
            compiled=compiled,
            strategy=wanted,
        )

    answer.give(decide, what=f"Predicting {model} on {gpus}", output=output, json=json)
