"""``autoplan compare``: the best plan of every family of parallelism side by side."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from autoplan.cli import console, options
from autoplan.explain.text import percent, seconds, size

if TYPE_CHECKING:
    from autoplan.search.questions import Contender


def compare(
    model: options.Model,
    gpus: options.Gpus,
    global_batch: options.GlobalBatch = None,
    seq: options.Sequence = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = "adamw",
    strategy: options.StrategyText = None,
    headroom: options.Headroom = None,
    max_gpus: options.MaxGpus = None,
    inside_node: options.InsideNode = None,
    json: options.Json = False,
) -> None:
    """Show the best plan of each family: one GPU, data, sharded state, pipeline, tensor and their combinations.

    Exit code 1: none of them fits.

    Example: autoplan compare gpt2-xl --gpus 8xA100-80GB --global-batch 64
    """
    options.check_cluster(gpus)
    forced = options.with_limits(
        options.parse_strategy(strategy), headroom=headroom, max_gpus=max_gpus, inside_node=inside_node
    )
    import autoplan

    with console.progress(f"Comparing plans of {model} on {gpus}"):
        found = autoplan.compare(
            model,
            gpus=gpus,
            global_batch=global_batch,
            seq=seq,
            precision=precision,
            optimizer=optimizer,
            strategy=forced or None,
        )
    if json:
        rows = [dataclasses.asdict(contender) for contender in found]
        console.result_json({"schema": 1, "feasible": any(c.chosen for c in found), "families": rows})
    else:
        _print(found)
    if not any(contender.step_time_s is not None for contender in found):
        raise typer.Exit(1)


def _print(found: tuple[Contender, ...]) -> None:
    listed = console.table(
        ("", False),
        ("best of its family", False),
        ("mb", True),
        ("step", True),
        ("memory", True),
        ("bubble", True),
        ("comm", True),
    )
    for contender in found:
        listed.add_row(
            "*" if contender.chosen else "",
            _name(contender),
            str(contender.strategy.micro_batch_size),
            *_figures(contender),
        )
    console.result(listed, "* the plan; mb: samples in a micro-batch; comm: communication that nothing hides")


def _name(contender: Contender) -> str:
    """The strategy; on several kinds of GPUs also which of them."""
    from autoplan.search.families import FAMILIES

    strategy = contender.strategy.describe()
    return strategy if contender.family in [name for name, *_ in FAMILIES] else f"{contender.family}: {strategy}"


def _figures(contender: Contender) -> tuple[str, str, str, str]:
    step_s, bubble, exposed_s = contender.step_time_s, contender.bubble_fraction, contender.exposed_communication_s
    if step_s is None or bubble is None or exposed_s is None:
        return "-", f"{size(contender.short_by_bytes)} short", "-", "-"
    return seconds(step_s), size(contender.peak_memory_bytes), percent(bubble), seconds(exposed_s)
