"""The plan that a command is asked about: a file, or ``-``, which is standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from autoplan.cli import console
from autoplan.errors import PlanFileError
from autoplan.plan import Plan

_STANDARD, _NAME = Path("-"), "standard input"


def is_stdin(path: Path) -> bool:
    """Whether ``-`` was said."""
    return path == _STANDARD


def load(path: Path) -> Plan:
    """The plan in ``path``; of what an older file leaves unchecked a line is said on stderr."""
    plan = _from_standard_input() if is_stdin(path) else Plan.load(path)
    if plan.unchecked:
        console.note(f"{named(path)}: less checked than a plan of today: {plan.unchecked}")
    return plan


def load_two(before: Path, after: Path) -> tuple[Plan, Plan]:
    """Two plans, of which one may be on standard input."""
    if before == after == _STANDARD:
        raise PlanFileError("standard input holds one plan, and two are compared", attempt="autoplan diff plan.json -")
    return load(before), load(after)


def named(path: Path) -> str:
    """What to call the file in a sentence."""
    return _NAME if is_stdin(path) else str(path)


def short(path: Path) -> str:
    """The same without its folders."""
    return _NAME if is_stdin(path) else path.name


def _from_standard_input() -> Plan:
    try:
        read = getattr(sys.stdin, "buffer", sys.stdin).read()
        text = read if isinstance(read, str) else read.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text"
        raise PlanFileError(f"cannot read the plan: {reason}", where=_NAME, attempt="autoplan show PLAN.json") from None
    return Plan.from_json(text, where=_NAME)
