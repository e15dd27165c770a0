"""``autoplan show``: a plan file on one screen."""

from __future__ import annotations

from autoplan.cli import console, options
from autoplan.cli.summary import summary
from autoplan.plan import Plan


def show(path: options.PlanFile, json: options.Json = False) -> None:
    """Print a plan file as `autoplan plan` printed it."""
    plan = Plan.load(path)
    if json:
        console.result_json(plan.to_dict())
    else:
        console.result(*summary(plan))
