"""Quantities as people read them: seconds, bytes and counts with three figures and a unit."""

from __future__ import annotations


def seconds(value: float) -> str:
    """``12.3 ms``, ``2.41 s``."""
    if value == 0:
        return "0"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if float(f"{value * factor:.3g}") >= 1 or unit == "us":
            return f"{_three(value * factor)} {unit}"
    raise AssertionError


def size(value: float) -> str:
    """Binary units: ``71.3 GiB``."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{_three(value / factor)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """``8.03 B``, ``124 M``: decimal thousands, millions, billions, trillions."""
    for factor, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return _three(value / factor) + unit
    return f"{value:.0f}"


def percent(value: float) -> str:
    """A fraction as ``41.0 %``."""
    return f"{100 * value:.1f} %"


def _three(value: float) -> str:
    """Three significant figures without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
