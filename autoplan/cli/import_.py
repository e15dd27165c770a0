"""``autoplan import``: another tool's configuration as a strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import completions, console, options


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration, recipe or launch script.")],
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="Whose it is; guessed from the file where it is not said.",
            autocompletion=completions.targets,
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Read another tool's configuration as a strategy, for `predict --strategy` or `plan --strategy`.

    Example: autoplan import ds_config.json --from deepspeed
    """
    from autoplan.export.read import read_file

    found = read_file(file, tool)
    imported = found.imported
    if json:
        console.result_json(
            {
                "schema": 1,
                "tool": found.tool,
                "strategy": imported.strategy,
                "gpus": imported.gpus,
                "global_batch": imported.global_batch,
                "precision": imported.precision,
                "seq": imported.seq,
                "compiled": imported.compiled,
                "notes": list(imported.notes),
            }
        )
        return
    typer.echo(f"{file}: {found.tool}")
    typer.echo(f"--strategy {','.join(f'{key}={str(value).lower()}' for key, value in imported.strategy.items())}")
    for name in ("gpus", "global_batch", "precision", "seq"):
        value = getattr(imported, name)
        if value is not None:
            typer.echo(f"--{name.replace('_', '-')} {value}")
    if imported.compiled:
        typer.echo("--compiled")
    for note in imported.notes:
        typer.echo(f"note: {note}")
