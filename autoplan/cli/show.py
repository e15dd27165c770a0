"""``autoplan show``: a plan file on one screen."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli import console, options
from autoplan.cli.summary import summary
from autoplan.plan import Plan

Timeline = Annotated[bool, typer.Option("--timeline", help="Draw one step: a row a stage, a column a slice of time.")]


def show(path: options.PlanFile, timeline: Timeline = False, json: options.Json = False) -> None:
    """Print a plan file as `autoplan plan` printed it.

    Example: autoplan show plan.json --timeline
    """
    plan = Plan.load(path)
    if json:
        console.result_json(plan.to_dict())
    elif timeline:
        from autoplan.report import step, terminal

        with console.progress(f"Simulating a step of {plan.strategy.describe()}"):
            drawn = terminal.timeline(step.simulate(plan))
        typer.echo(drawn.rstrip("\n"))
    else:
        console.result(*summary(plan))
