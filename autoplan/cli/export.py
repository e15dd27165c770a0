"""``autoplan export``: a plan as settings of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import completions, console, options, plans
from autoplan.cli.output import check_folder, is_stdout


def export(
    plan: options.PlanFile,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TOOL",
            help="torchtitan, megatron, deepspeed, accelerate, fsdp2, transformers, slurm or kubernetes.",
            autocompletion=completions.targets,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Write the files here; else, or with -, they are printed."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a plan as another tool's configuration, and say what that tool cannot express of it.

    Example: autoplan export plan.json --to megatron -o megatron
    """
    from autoplan.export.targets import target_named
    from autoplan.export.write import write_files

    target = target_named(to)
    check_folder(output, what="files", json=json, printed=True)
    folder = None if is_stdout(output) else output
    wanted = plans.load(plan)
    exported = target.export(wanted)
    if folder is not None:
        write_files(exported.files, folder)
    if json:
        answer = {
            "target": target.name,
            "files": exported.files,
            "launch": exported.launch,
            "lost": list(exported.lost),
            "unchecked": wanted.unchecked,
        }
        console.result_json({"schema": 1, **answer})
        return
    for name, text in exported.files.items():
        typer.echo(f"wrote {folder / name}" if folder is not None else f"# {name}\n{text.rstrip()}\n")
    typer.echo(f"run: {exported.launch}")
    for lost in exported.lost:
        typer.echo(f"{target.name} cannot express {lost}")
