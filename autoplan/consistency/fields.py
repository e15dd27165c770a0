"""Single values: no text that steers a terminal, no number that is none."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autoplan.consistency.problems import Problem

if TYPE_CHECKING:
    from autoplan.plan import Plan

# No figure of a plan comes near: bytes of the largest clusters are about 1e18.
_LARGEST = 1e30
# Differences, which rounding may take a little below zero.
_GAPS, _ROUNDING = ("gap", "simulated_gap"), 1e-6
# Control characters, of which terminals make commands.
_STEERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def texts(plan: Plan) -> Iterator[Problem]:
    """Names in a file that somebody sent are printed: none may colour, move or clear a terminal."""
    for path, value in _leaves(plan, ""):
        if _STEERS.search(path) or (isinstance(value, str) and _STEERS.search(value)):
            yield path.encode("unicode_escape").decode(), f"{value!r} has characters that steer a terminal"


def numbers(plan: Plan) -> Iterator[Problem]:
    """Every number is finite, and none is below 0."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    for path, value in _leaves({name: value for name, value in fields.items() if name != "forced"}, ""):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = -_ROUNDING if path.rsplit(".", 1)[-1] in _GAPS else 0
        if not math.isfinite(value) or not least <= value <= _LARGEST:
            yield path, f"{value} is not a number of 0 or more"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tuple):
        items = dict(enumerate(value)).items()
    else:
        yield path, value
        return
    for name, part in items:
        yield from _leaves(part, f"{path}.{name}" if path else str(name))


def missing(written: Any, whole: Any, path: str = "") -> Iterator[Problem]:
    """Fields of ``whole``, a plan's data, that the data ``written`` lacks: one that is left out would be taken for its
    default, which nobody wrote."""
    if isinstance(whole, dict) and isinstance(written, dict):
        for name, value in whole.items():
            here = f"{path}.{name}" if path else name
            if name not in written:
                yield here, "is not there, and files of this revision have it"
            else:
                yield from missing(written[name], value, here)
    elif isinstance(whole, list) and isinstance(written, list):
        for index, (one, other) in enumerate(zip(written, whole, strict=False)):
            yield from missing(one, other, f"{path}.{index}")
