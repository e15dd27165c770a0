"""What ``plan`` and ``predict`` print: the plan in tables or as JSON, or that nothing fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from autoplan.cli import console
from autoplan.cli.output import check_file, is_stdout, write
from autoplan.cli.summary import summary
from autoplan.errors import InfeasibleError
from autoplan.explain.text import seconds
from autoplan.plan import SCHEMA_VERSION, Plan


def give(decide: Callable[[], Plan], *, what: str, output: Path | None, json: bool) -> None:
    """Run ``decide`` under a spinner, then print its plan (or that nothing fits, and exit with 1).

    A file that cannot be written is refused before.
    """
    check_file(output, what="plan", name="plan.json", json=json)
    try:
        with console.progress(what):
            plan = decide()
    except InfeasibleError as error:
        if not json:
            raise
        console.result_json(infeasible(error))
        raise typer.Exit(error.exit_code) from None
    if output is not None:
        write(output, plan.to_json(), what="plan")
    if json:
        console.result_json(plan.to_dict(with_seconds=True))
        return
    if not is_stdout(output):
        console.result(*summary(plan))
    console.note(_closing(plan, output))


def infeasible(error: InfeasibleError) -> dict[str, Any]:
    """The JSON object that says no, by how many bytes, and what would fit."""
    return {
        "schema": SCHEMA_VERSION,
        "feasible": False,
        "reason": error.what,
        "short_by_bytes": error.short_by_bytes,
        "term": error.term,
        "suggestions": list(error.suggestions),
    }


def _closing(plan: Plan, output: Path | None) -> str:
    spent = ", ".join(f"{name} {seconds(value)}" for name, value in plan.seconds.items())
    if output is None:
        advice = "add `-o plan.json` to keep it"
    elif is_stdout(output):
        advice = "the plan file is on standard output"
    else:
        advice = f"wrote {output}; next: autoplan explain {shlex.quote(str(output))}"
    return f"{spent}; {advice}" if spent else advice
