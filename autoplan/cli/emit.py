"""``autoplan emit``: the plan's program as a folder of Python that needs torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import console, options, plans
from autoplan.cli.output import check_folder


def emit(
    model: options.Model,
    plan: options.PlanFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write; it must be new.")],
    json: options.Json = False,
) -> None:
    """Write the plan's program as readable Python that needs only torch: `torchrun train.py` trains it.

    Weights come along where the model has any; a preset's program starts from random ones, or from files that you give
    it.

    Example: autoplan emit llama3-8b plan.json -o llama3-8b-program
    """
    from autoplan.export.targets import starting
    from autoplan.export.targets.types import nodes_and_each

    check_folder(output, what="program", json=json, printed=False)
    wanted = plans.load(plan)
    with console.progress(f"Writing {model} under {wanted.strategy.describe()}"):
        from autoplan.export import emit_model

        folder = emit_model(model, wanted, output)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    if json:
        console.result_json({"schema": 1, "directory": str(folder), "files": files, "unchecked": wanted.unchecked})
        return
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.py"))
    typer.echo(f"wrote {folder}: {lines} lines of Python")
    typer.echo(f"files: {', '.join(files)}")
    nodes, each = nodes_and_each(wanted)
    where = f" --nnodes {nodes} --rdzv-endpoint HOST:29500" if nodes > 1 else ""
    typer.echo(f"run: cd {folder} && torchrun --nproc-per-node {each}{where} train.py")
    for said in starting(wanted):
        typer.echo(f"of several kinds: {said}")
