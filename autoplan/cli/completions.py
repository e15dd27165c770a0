"""What a shell offers for options whose values are known: each is asked only when a shell asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import typer

Complete = Callable[[str], list[str]]
_VALUES = {
    "zero_stage": ("0", "1", "2", "3"),
    "recompute": ("none", "selective", "full"),
    "sequence_parallel": ("true", "false"),
}


def one_of(values: Callable[[], Iterable[str]]) -> Complete:
    """A completion with those of ``values()`` that begin as what is typed does."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


def _presets() -> list[str]:
    from autoplan.models.catalog import presets

    return [entry.name for entry in presets()]


def _kinds() -> Iterable[str]:
    from autoplan.cluster.hardware import device_kinds

    return device_kinds()


def _precisions() -> Iterable[str]:
    from autoplan.cost_models.recipes import PRECISIONS

    return PRECISIONS


def _optimizers() -> Iterable[str]:
    from autoplan.cost_models.recipes import OPTIMIZERS

    return OPTIMIZERS


def _targets() -> Iterable[str]:
    from autoplan.export.targets import TARGETS

    return TARGETS


def _like() -> Iterable[str]:
    from autoplan.export.like import LIKE

    return LIKE


def specs(incomplete: str) -> list[str]:
    """Kinds of GPUs, behind a number that is there already or a node of 8; after ``+`` one more of them."""
    before, plus, last = incomplete.rpartition("+")
    counted, times, kind = last.rpartition("x")
    behind = f"{before}{plus}{counted if times else 8}x"
    return [f"{behind}{name}" for name in _kinds() if name.startswith(kind if times else "")]


def strategy(incomplete: str) -> list[str]:
    """Keys of ``--strategy``, and the values of those that have few; what is there before the last comma stays."""
    from autoplan.cli.options import STRATEGY_KEYS
    from autoplan.schedules import SCHEDULES

    before, comma, last = incomplete.rpartition(",")
    key, equals, value = last.partition("=")
    if not equals:
        return [f"{before}{comma}{name}=" for name in STRATEGY_KEYS if name.startswith(key)]
    values = _VALUES | {"schedule": tuple(SCHEDULES)}
    return [f"{before}{comma}{key}={each}" for each in values.get(key, ()) if each.startswith(value)]


def axes(incomplete: str) -> list[str]:
    """Axes of the mesh, those that are there already left out."""
    before, comma, last = incomplete.rpartition(",")
    named = before.split(",")
    offered = [axis for axis in ("tensor", "data", "pipeline") if axis.startswith(last) and axis not in named]
    return [f"{before}{comma}{axis}" for axis in offered]


def layers(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the plan's layers, where its file is there."""
    import json

    try:
        written = json.loads(Path(str(context.params.get("path"))).read_text(encoding="utf-8"))
        names = written["model"]["layers"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if isinstance(name, str) and name.startswith(incomplete)]


presets = one_of(_presets)
kinds = one_of(_kinds)
precisions = one_of(_precisions)
optimizers = one_of(_optimizers)
targets = one_of(_targets)
like = one_of(_like)
devices = one_of(lambda: ("cpu", "cuda"))
