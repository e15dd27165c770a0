"""``autoplan report``: a plan as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import console, options, output, plans

Target = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.html", help="Where to write it; - is stdout.")]


def report(path: options.PlanFile, target: Target = Path("plan.html"), json: options.Json = False) -> None:
    """Write a plan as one HTML page that needs no network: to read, to print, to attach.

    Example: autoplan report plan.json -o plan.html
    """
    from autoplan.report.page import page

    output.check_file(target, what="page", name="plan.html", json=json)
    plan = plans.load(path)
    with console.progress(f"Drawing {plans.named(path)}"):
        text = page(plan)
    output.write(target, text, what="page")
    if json:
        console.result_json(
            {"schema": 1, "file": str(target), "bytes": len(text.encode()), "unchecked": plan.unchecked}
        )
    elif not output.is_stdout(target):
        console.note(f"wrote {target}: open it in a browser")
