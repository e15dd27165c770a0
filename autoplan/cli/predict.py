"""``autoplan predict``: time and memory of a strategy that the user has in mind."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli import answer, options
from autoplan.errors import StrategyError


def predict(
    model: options.Model,
    gpus: options.Gpus,
    strategy: Annotated[
        list[str], typer.Option("--strategy", metavar="K=V,...", help="The strategy: data=4,tensor=2,zero_stage=1.")
    ],
    stages: options.Stages = None,
    global_batch: options.GlobalBatch = None,
    seq: options.Sequence = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = "adamw",
    output: options.Output = None,
    json: options.Json = False,
) -> None:
    """Predict a given strategy; a key left out takes the value that costs least.

    Exit code 1: it does not fit.
    """
    wanted = options.with_limits(options.parse_strategy(strategy), stages=stages)
    if not wanted:
        raise StrategyError("predict needs a strategy", attempt="--strategy data=4,tensor=2, or `autoplan plan`")
    options.check_writable(output)

    def decide() -> answer.Plan:
        import autoplan

        return autoplan.predict(
            model,
            gpus=gpus,
            global_batch=global_batch,
            seq=seq,
            precision=precision,
            optimizer=optimizer,
            strategy=wanted,
        )

    answer.give(decide, what=f"Predicting {model} on {gpus}", output=output, json=json)
