"""``autoplan min-gpus``: the fewest GPUs of a kind that hold a model."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Annotated

import typer

from autoplan.cli import answer, completions, console, options
from autoplan.cluster import Cluster
from autoplan.errors import ClusterError, InfeasibleError


def min_gpus(
    model: options.Model,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="KIND", help="The kind of GPU: H100.", autocompletion=completions.kinds),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            metavar="SPEC",
            help="Or a cluster, of whose kind and nodes they are.",
            autocompletion=completions.specs,
        ),
    ] = None,
    global_batch: options.GlobalBatch = None,
    seq: options.Sequence = None,
    precision: options.Precision = None,
    optimizer: options.Optimizer = "adamw",
    strategy: options.StrategyText = None,
    headroom: options.Headroom = None,
    inside_node: options.InsideNode = None,
    json: options.Json = False,
) -> None:
    """Find the fewest GPUs of a kind that hold a model.

    Exit code 1: no number of them does.

    Example: autoplan min-gpus llama3-70b --gpu H100
    """
    if (gpu is None) == (gpus is None) or (gpu is not None and not gpu.strip()):
        raise ClusterError("name the kind of GPU once", legal="--gpu KIND, or --gpus SPEC", attempt="--gpu H100")
    forced = options.with_limits(options.parse_strategy(strategy), headroom=headroom, inside_node=inside_node)
    import autoplan

    try:
        with console.progress(f"Counting {gpu or gpus} for {model}"):
            found = autoplan.min_gpus(
                model,
                gpu=gpu,
                gpus=gpus,
                global_batch=global_batch,
                seq=seq,
                precision=precision,
                optimizer=optimizer,
                strategy=forced or None,
            )
    except InfeasibleError as error:
        if not json:
            raise
        console.result_json(answer.infeasible(error))
        raise typer.Exit(error.exit_code) from None
    if json:
        console.result_json(
            {
                "schema": 1,
                "feasible": True,
                "gpus": found.gpus,
                "device": found.cluster.device.name,
                "global_batch": found.global_batch,
                "strategy": dataclasses.asdict(found.strategy),
            }
        )
        return
    again = _options(
        ("--global-batch", [str(found.global_batch)]),
        ("--seq", [str(seq)] if seq else []),
        ("--precision", [precision] if precision else []),
        ("--optimizer", [optimizer] if optimizer != "adamw" else []),
        ("--strategy", strategy or []),
        ("--headroom", [headroom] if headroom else []),
        ("--inside-node", [inside_node] if inside_node else []),
    )
    console.result(f"{found.gpus} x {found.cluster.device.name}")
    console.note(
        f"{found.strategy.describe()}, micro-batch {found.strategy.micro_batch_size}, global batch "
        f"{found.global_batch}; next: {_next(model, found.cluster, again)}"
    )


def _options(*given: tuple[str, Sequence[str]]) -> str:
    """The same question again, as options behind a command."""
    return "".join(f" {name} {shlex.quote(value)}" for name, values in given for value in values)


def _next(model: str, cluster: Cluster, again: str) -> str:
    """The command that plans for ``cluster``, which may be no SPEC: so many GPUs as a cluster file has them.
    ``again``: the question's options."""
    try:
        Cluster.parse(cluster.spec)
    except ClusterError:
        of, _, file = cluster.spec.partition(" as in ")
        return f"autoplan plan {shlex.quote(model)} --gpus FILE{again}, where FILE is {file or cluster.spec} with {of}"
    return f"autoplan plan {shlex.quote(model)} --gpus {shlex.quote(cluster.spec)}{again}"
