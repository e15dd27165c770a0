"""``autoplan explain``: a plan in words and tables, and why not less or more."""

from __future__ import annotations

import typer

from autoplan.cli import console, options
from autoplan.plan import Plan


def explain(path: options.PlanFile, json: options.Json = False) -> None:
    """Say what a plan splits, what that costs, and why the alternatives lost."""
    plan = Plan.load(path)
    if json:
        console.result_json(plan.to_dict())
    else:
        typer.echo(plan.explain().rstrip("\n"))
