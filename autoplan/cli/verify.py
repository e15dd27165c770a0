"""``autoplan verify``: does the plan's program compute the model's own training step?"""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli import console, options, plans


def verify(
    model: options.Model,
    plan: options.PlanFile,
    static: Annotated[bool, typer.Option("--static", help="Prove what needs no run, and leave it there.")] = False,
    ranks: Annotated[
        int, typer.Option("--ranks", metavar="N", min=1, help="Processes the numeric check may use.")
    ] = 16,
    json: options.Json = False,
) -> None:
    """Check a plan's program against the single process, on this machine's CPU.

    Static checks hold for any number of GPUs; the numeric check runs a smaller copy of the model under the same kinds
    of parallelism. Exit code 0: equal. 1: different, or not shown to be equal.

    Example: autoplan verify gpt2 plan.json
    """
    import autoplan
    from autoplan.verification.text import report_text

    wanted = plans.load(plan)
    with console.progress(f"Verifying {model} under {wanted.strategy.describe()}"):
        report = autoplan.verify(model, wanted, static=static, ranks=ranks)
    if json:
        console.result_json(report.to_dict() | {"unchecked": wanted.unchecked})
    else:
        console.told(report_text(report))
    raise typer.Exit(report.exit_code)
