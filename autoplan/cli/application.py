"""The application: its commands, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import autoplan
from autoplan.cli import (
    calibrate,
    clusters,
    compare,
    diff,
    doctor,
    emit,
    explain,
    export,
    fit,
    import_,
    min_gpus,
    models,
    plan,
    predict,
    report,
    run,
    show,
    simulate,
    verify,
)
from autoplan.cli.console import error_line
from autoplan.errors import AutoplanError

FAULT = 3
TRACEBACK_VARIABLE = "AUTOPLAN_TRACEBACK"


class Application(TyperGroup):
    """A group whose errors all end as ``error: ...`` lines on stderr and a meaningful exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:  # not standalone, so that errors arrive here
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Exception as error:
            code = _report(error)
        sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception) -> int:
    """Print ``error`` for a person and return the exit code."""
    if isinstance(error, AutoplanError):
        error_line(str(error))
        _trace_if_wanted(error)
        return error.exit_code
    if hasattr(error, "format_message"):  # typer's usage errors: unknown options, missing arguments
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "autoplan"
        error_line(f"{error.format_message()}\n  try:   {command} --help")
        return 2
    if isinstance(error, typer.Abort):
        error_line("interrupted")
        return 130
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).split())[:300]
    error_line(
        f"internal fault: {type(error).__name__}: {reason}\n"
        f"  at:    {Path(frame.filename).name}:{frame.lineno}, in {frame.name}\n"
        f"  try:   the same command as `autoplan --verbose ...` (or {TRACEBACK_VARIABLE}=1) for the whole story"
    )
    _trace_if_wanted(error)
    return FAULT


def _trace_if_wanted(error: Exception) -> None:
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        sys.stderr.write("".join(traceback.format_exception(error)))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoplan {autoplan.__version__}")
        raise typer.Exit


def _common(
    verbose: Annotated[bool, typer.Option("--verbose", help="Show tracebacks with errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Plans how to train a PyTorch model on many GPUs, and trains it so. No GPU is needed to plan."""
    if verbose:
        os.environ[TRACEBACK_VARIABLE] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is on configs that the user did not write


application = typer.Typer(
    name="autoplan",
    cls=Application,
    callback=_common,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
application.command("plan")(plan.plan)
application.command("predict")(predict.predict)
application.command("fit")(fit.fit)
application.command("min-gpus")(min_gpus.min_gpus)
application.command("compare")(compare.compare)
application.command("explain")(explain.explain)
application.command("show")(show.show)
application.command("simulate")(simulate.simulate)
application.command("report")(report.report)
application.command("diff")(diff.diff)
application.command("verify")(verify.verify)
application.command("emit")(emit.emit)
application.command("export")(export.export)
application.command("import")(import_.import_)
application.command(
    "run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": True}
)(run.run)
application.command("models")(models.models)
application.command("clusters")(clusters.clusters)
application.command("doctor")(doctor.doctor)
application.command("calibrate")(calibrate.calibrate)
