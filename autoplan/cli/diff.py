"""``autoplan diff``: what changed between two plan files, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import console, options, plans

Before = Annotated[Path, typer.Argument(metavar="A.json", help="A plan file; - is stdin.")]
After = Annotated[Path, typer.Argument(metavar="B.json", help="Another.")]


def diff(before: Before, after: After, json: options.Json = False) -> None:
    """Say what B decides otherwise than A, and what that does to time and memory.

    Example: autoplan diff old.json new.json
    """
    from autoplan.report import difference

    one, two = plans.load_two(before, after)
    if json:
        unchecked = {
            plans.named(path): plan.unchecked for path, plan in ((before, one), (after, two)) if plan.unchecked
        }
        console.result_json(difference.difference(one, two).to_dict() | {"unchecked": unchecked})
    else:
        console.told(difference.as_text(one, two, (plans.short(before), plans.short(after))))
