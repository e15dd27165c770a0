"""Where ``-o`` goes: a file, a folder, or ``-``, which is standard output.

What is written to standard output is the command's result: tables and ``--json`` are not printed beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from autoplan.errors import AutoplanError
from autoplan.whole_file import write_whole

_STANDARD = Path("-")


def is_stdout(path: Path | None) -> bool:
    """Whether ``-o -`` was said."""
    return path == _STANDARD


def check_file(path: Path | None, *, what: str, name: str, json: bool) -> None:
    """Refuse a file that could not be written, before minutes are spent on what goes into it (``what``, such as
    ``name``), and ``-`` where ``--json`` prints too."""
    if path is None:
        return
    if is_stdout(path):
        _refuse_two(what, json=json, attempt=f"one of them, or -o {name}")
        return
    target = _target(path, what)
    if target.is_dir():
        raise _cannot(what, path, f"{path} is a folder", attempt=f"-o {path / name}")
    if not target.parent.is_dir():
        raise _cannot(what, path, f"there is no folder {path.parent}", attempt="make it first, or write elsewhere")
    device = target.exists() and not target.is_file()  # or a pipe: written to, and not replaced
    _check_permission(target if device else target.parent, path, what)


def check_folder(path: Path | None, *, what: str, json: bool, printed: bool) -> None:
    """The same for a folder of files; ``-`` is for what can be ``printed`` one after another."""
    if path is None:
        return
    if is_stdout(path):
        if not printed:
            raise _cannot(what, path, "it is a folder, and standard output is not", attempt="-o FOLDER")
        _refuse_two(what, json=json, attempt="--json alone, which holds the files too, or -o FOLDER")
        return
    target = _target(path, what)
    there = next(folder for folder in (target, *target.parents) if folder.exists())
    if not there.is_dir():
        raise _cannot(what, path, f"{there} is a file, and a folder is written", attempt="another name")
    _check_permission(there, path, what)


def write(path: Path, text: str, *, what: str) -> None:
    """Write ``text`` whole, or to standard output; what hinders that is said as an :class:`AutoplanError`."""
    if is_stdout(path):
        sys.stdout.write(text)
        return
    try:
        write_whole(path, text)
    except OSError as error:
        raise _cannot(what, path, error.strerror or type(error).__name__) from None


def _target(path: Path, what: str) -> Path:
    """Where links lead; refuses what cannot even be looked for, such as a name that is too long."""
    target = Path(os.path.realpath(path))
    try:
        target.exists()
    except OSError as error:
        raise _cannot(what, path, error.strerror or type(error).__name__) from None
    return target


def _check_permission(there: Path, path: Path, what: str) -> None:
    if not os.access(there, os.W_OK):
        raise _cannot(what, path, f"no permission to write to {there}")


def _refuse_two(what: str, *, json: bool, attempt: str) -> None:
    if json:
        raise AutoplanError(
            f"`-o -` writes the {what} to standard output, and --json prints there too", attempt=attempt
        )


def _cannot(what: str, path: Path, reason: str, *, attempt: str = "write elsewhere") -> AutoplanError:
    return AutoplanError(f"cannot write the {what}: {reason}", where=f"-o {path}", attempt=attempt)
