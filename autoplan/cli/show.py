"""``autoplan show``: a plan file on one screen."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import console, options, plans
from autoplan.cli.summary import summary

if TYPE_CHECKING:
    from autoplan.report.step import Step

Timeline = Annotated[bool, typer.Option("--timeline", help="Draw one step: a row a stage, a column a slice of time.")]


def show(path: options.PlanFile, timeline: Timeline = False, json: options.Json = False) -> None:
    """Print a plan file as `autoplan plan` printed it.

    Example: autoplan show plan.json --timeline
    """
    plan = plans.load(path)
    if timeline:
        from autoplan.report import step, terminal

        with console.progress(f"Simulating a step of {plan.strategy.describe()}"):
            simulated = step.simulate(plan)
            drawn = "" if json else terminal.timeline(simulated)
        if json:
            console.result_json(plan.to_dict() | {"timeline": _timeline(simulated)})
        else:
            console.told(drawn)
    elif json:
        console.result_json(plan.to_dict())
    else:
        console.result(*summary(plan))


def _timeline(step: Step) -> dict[str, Any]:
    """The step as data: every action of every pipeline rank."""
    ranks = [
        {
            "rank": rank,
            "idle_share": step.idle_share(rank),
            "actions": [
                {
                    "kind": event.action.kind,
                    "stage": event.action.stage,
                    "micro_batch": event.action.micro_batch,
                    "start_s": event.start_s,
                    "end_s": event.end_s,
                }
                for event in lane
            ],
            "tails": [dataclasses.asdict(tail) for tail in tails],
        }
        for rank, (lane, tails) in enumerate(zip(step.lanes, step.tails, strict=True))
    ]
    return {"end_s": step.end_s, "not_attributed_s": step.unexplained_s, "ranks": ranks}
