"""``autoplan report``: a plan as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import console, options
from autoplan.cli.simulate import write_beside
from autoplan.plan import Plan

Target = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.html", help="Where to write it; - is stdout.")]


def report(path: options.PlanFile, output: Target = Path("plan.html"), json: options.Json = False) -> None:
    """Write a plan as one HTML page that needs no network: to read, to print, to attach.

    Example: autoplan report plan.json -o plan.html
    """
    from autoplan.report.page import page

    options.check_writable(None if output == Path("-") else output, what="page", name="plan.html")
    with console.progress(f"Drawing {path}"):
        text = page(Plan.load(path))
    if output == Path("-"):
        sys.stdout.write(text)
        return
    write_beside(output, text)
    if json:
        console.result_json({"schema": 1, "file": str(output), "bytes": len(text.encode())})
        return
    console.note(f"wrote {output}: open it in a browser")
