"""``autoplan simulate``: one step of a plan as a trace for a timeline viewer."""

from __future__ import annotations

import json as text_of
import sys
from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import console, options, output, plans
from autoplan.explain.text import percent, seconds

Target = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="TRACE.json", help="Where to write it; - is stdout.")
]
Whole = Annotated[bool, typer.Option("--all", help="Write every action of a very long step.")]


def simulate(path: options.PlanFile, target: Target = None, whole: Whole = False, json: options.Json = False) -> None:
    """Trace one step of a plan: open the file at https://ui.perfetto.dev.

    Example: autoplan simulate plan.json -o trace.json
    """
    from autoplan.report import step, trace

    output.check_file(target, what="trace", name="trace.json", json=json)
    plan = plans.load(path)
    with console.progress(f"Simulating a step of {plan.strategy.describe()}"):
        simulated = step.simulate(plan)
        made = trace.trace(simulated, most_actions=sys.maxsize if whole else trace.MOST_ACTIONS)
        written = text_of.dumps(made, separators=(",", ":")) + "\n"
    facts = made["otherData"]
    if target is not None:
        output.write(target, written, what="trace")
    if json:
        idle = [simulated.idle_share(stage) for stage in range(len(simulated.lanes))]
        about = {"file": target and str(target), "unchecked": plan.unchecked}
        console.result_json({"schema": 1, **facts, "idle_share_of_stages": idle, **about})
    elif target is None:
        console.result(f"{seconds(facts['end_s'])} a step, {facts['actions']:,} actions; add -o trace.json for a trace")
    elif not output.is_stdout(target):
        console.note(f"{seconds(facts['end_s'])} a step, {facts['actions']:,} actions in {target}")
    _remarks(facts)


def _remarks(facts: dict[str, float]) -> None:
    if facts["left_out"]:
        console.note(f"{facts['left_out']:,} actions amid the step are left out: --all writes them")
    missing = facts["not_attributed_s"]
    share = percent(abs(missing) / facts["predicted_step_s"])
    if missing > 0:
        console.note(f"{share} of the predicted step is in no stage's times: the plan file is an older one")
    elif missing < 0:
        console.note(f"the stages' times make a step {share} longer than the plan says: the plan file was edited")
