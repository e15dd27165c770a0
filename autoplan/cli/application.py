"""The application: its commands, and the one place where an error becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from autoplan.cli import streams
from autoplan.cli.console import error_line, result_json
from autoplan.errors import AutoplanError

FAULT = 3
INTERRUPTED, CLOSED_PIPE = 130, 141  # what shells say of a program that these signals end
TRACEBACK_VARIABLE = "AUTOPLAN_TRACEBACK"
# What `autoplan --help` lists: each command's first paragraph, here so that the list costs no import of the commands.
SUMMARIES = {
    "plan": "Find the fastest plan that fits, and prove it.",
    "predict": "Predict a given strategy; a key left out takes the value that costs least.",
    "fit": "Say whether a model fits, and with how much memory to spare.",
    "min-gpus": "Find the fewest GPUs of a kind that hold a model.",
    "compare": (
        "Show the best plan of each family: one GPU, data, sharded state, pipeline, tensor and their combinations."
    ),
    "explain": "Say what a plan splits, what that costs, why the alternatives lost and what would change the decision.",
    "show": "Print a plan file as `autoplan plan` printed it.",
    "simulate": "Trace one step of a plan: open the file at https://ui.perfetto.dev.",
    "report": "Write a plan as one HTML page that needs no network: to read, to print, to attach.",
    "diff": "Say what B decides otherwise than A, and what that does to time and memory.",
    "verify": "Check a plan's program against the single process, on this machine's CPU.",
    "emit": "Write the plan's program as readable Python that needs only torch: `torchrun train.py` trains it.",
    "export": "Write a plan as another tool's configuration, and say what that tool cannot express of it.",
    "import": "Read another tool's configuration as a strategy, for `predict --strategy` or `plan --strategy`.",
    "run": "Run a script on local processes, one a GPU. What follows `--` goes to the script untouched.",
    "models": "List the presets and where their figures come from.",
    "clusters": "List the GPU kinds known, with the figures plans are made from.",
    "doctor": "Check versions, GPUs, solvers and that processes start and talk to each other.",
    "calibrate": "Measure this machine's operators and links, and fit the figures that plans are made from.",
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "run": {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": True}
}


class _PlainFlags:
    """A command whose switches are listed without a type: `--json`, and not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        found = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return found


class Command(_PlainFlags, TyperCommand):
    """One command."""


class Application(_PlainFlags, TyperGroup):
    """A group whose errors all end as ``error: ...`` lines on stderr and a meaningful exit code.

    Its commands are listed by name and summary; the one that is meant is imported.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.called: str | None = None
        self.commands = {name: TyperCommand(name=name, help=summary) for name, summary in SUMMARIES.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        self.called = name
        return name, command_called(name) if name in SUMMARIES else command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `| head` has read enough; typer would end with 1, which is a no
            return _print_no_more(CLOSED_PIPE)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            try:  # not standalone, so that errors arrive here
                code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
                sys.stdout.flush()  # what cannot be printed is known only now
            except BrokenPipeError:
                raise
            except Exception as error:
                command = f"autoplan {self.called}" if self.called else "autoplan"
                words = sys.argv[1:] if args is None else args
                code = _report(error, command, json="--json" in _ours(words))
        except BrokenPipeError:
            code = _print_no_more(CLOSED_PIPE)
        except SystemExit as ended:  # rich and typer, which print the help, say 1 of a closed pipe: a no
            if not _of_closed_pipe(ended):
                raise
            code = _print_no_more(CLOSED_PIPE)
        sys.exit(code if isinstance(code, int) else 0)


def _ours(words: Sequence[str]) -> Sequence[str]:
    """The words of a command line that are not a script's."""
    return words[: words.index("--")] if "--" in words else words


def _of_closed_pipe(ended: SystemExit) -> bool:
    cause: BaseException | None = ended
    while cause is not None and not isinstance(cause, BrokenPipeError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _print_no_more(code: int) -> int:
    """Nothing is left to be flushed at the end, where it would fail once more; ``code`` as it is."""
    for stream in (sys.stdout, sys.stderr) if code == CLOSED_PIPE else (sys.stdout,):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def command_called(name: str) -> Any:
    """The command, from the file of its name."""
    file = "import_" if name == "import" else name.replace("-", "_")
    function = getattr(import_module(f"autoplan.cli.{file}"), file)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=Command, context_settings=_SETTINGS.get(name))(function)
    command = get_command(alone)
    command.help = "\n\n".join(map(_one_line, (command.help or "").split("\n\n")))
    return command


def _one_line(paragraph: str) -> str:
    """A docstring's paragraph without its line ends, which are not a terminal's; examples are one a line."""
    return paragraph if paragraph.startswith("Example") else " ".join(paragraph.split())


def _report(error: Exception, command: str, *, json: bool) -> int:
    """Print ``error`` of ``command`` for a person, with ``json`` also for a program, and return the exit code."""
    if hasattr(error, "format_message") and not error.format_message():  # `autoplan` alone: the help has been printed
        return 2
    said, code = _as_ours(error, command)
    error_line(str(said))
    if json:
        lines = {"what": said.what, "where": said.where, "legal": said.legal, "attempt": said.attempt}
        with streams.that_may_fail():  # the exit code is said in any case
            result_json({"schema": 1, "error": {"exit_code": code, **lines}})
            sys.stdout.flush()
    if isinstance(error, AutoplanError) or code == FAULT:
        _trace_if_wanted(error)
    return code


def _as_ours(error: Exception, command: str) -> tuple[AutoplanError, int]:
    """What to say of ``error``, and the exit code."""
    if isinstance(error, AutoplanError):
        return error, error.exit_code
    if hasattr(error, "format_message"):  # typer's usage errors: unknown options, missing arguments
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else command
        return AutoplanError(error.format_message(), attempt=f"{command} --help"), 2
    if isinstance(error, typer.Abort):
        return AutoplanError("interrupted"), INTERRUPTED
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return AutoplanError(
            "cannot write: the disk is full", where=error.filename or "standard output"
        ), _print_no_more(2)
    if isinstance(error, OSError) and error.errno in (errno.EBADF, errno.EIO) and error.filename is None:
        return AutoplanError(
            f"cannot print the result: {streams.reason(error)}", attempt="the same command without `>&-`, or > FILE"
        ), _print_no_more(2)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    reason = " ".join(str(error).split())[:300]
    fault = AutoplanError(
        f"internal fault: {type(error).__name__}: {reason}",
        where=f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}",
        attempt=f"the same command as `autoplan --verbose ...` (or {TRACEBACK_VARIABLE}=1) for the whole story",
    )
    return fault, FAULT


def _trace_if_wanted(error: Exception) -> None:
    if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0"):
        with streams.that_may_fail():
            sys.stderr.write("".join(traceback.format_exception(error)))


def _show_version(wanted: bool) -> None:
    if wanted:
        import autoplan

        typer.echo(f"autoplan {autoplan.__version__}")
        raise typer.Exit


def _common(
    verbose: Annotated[bool, typer.Option("--verbose", help="Show tracebacks with errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Plans how to train a PyTorch model on many GPUs, and trains it so. No GPU is needed to plan.

    Example: autoplan plan llama3-8b --gpus 8xH100 -o plan.json

    `autoplan COMMAND --help` shows each command's options and an example.
    """
    if verbose:
        os.environ[TRACEBACK_VARIABLE] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is on configs that the user did not write


application = typer.Typer(
    name="autoplan",
    cls=Application,
    callback=_common,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
