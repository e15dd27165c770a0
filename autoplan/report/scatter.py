"""The plan and what lost to it, as points of memory (across) and step time (up, a logarithmic axis).

What does not fit has no step time: it stands in a band of its own at the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoplan.explain.text import seconds, size
from autoplan.plan import Plan

WIDTH, HEIGHT = 1000.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 130.0, 14.0, 40.0
# The least span of the time axis: factors above the fastest.
_LEAST_SPAN = 1.5
# Where an axis may have its marks in a decade: the fewest that give two of them.
_FACTORS = ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8), tuple(1 + 0.1 * i for i in range(90)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """``number`` is its row in the table: 0 the plan."""

    x: float
    y: float
    number: int
    fits: bool
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """``across`` and ``up`` are (place, label) of the axes' marks, ``capacities`` of what a GPU of each kind holds."""

    points: tuple[Point, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    capacities: tuple[tuple[float, str], ...]
    band_x: float


def picture(plan: Plan) -> Picture:
    """The scatter of ``plan`` and its alternatives."""
    timed = [(plan.predicted.step_time_s, plan.predicted.peak_memory_bytes)]
    timed += [(a.step_time_s, a.peak_memory_bytes) for a in plan.alternatives if a.step_time_s is not None]
    least, most = min(t for t, _ in timed), max(t for t, _ in timed)
    least, most = least / 1.08, max(most, least * _LEAST_SPAN) * 1.08
    sizes = sorted({group.memory_bytes for group in plan.cluster.groups} or {plan.cluster.memory_bytes})
    widest = max(*sizes, *(peak for _, peak in timed)) * 1.02
    nearest = min(*sizes, *(peak for _, peak in timed))
    narrowest = nearest * 0.9 if nearest > widest / 3 else 0.0  # nothing stands before it: no room for nothing
    inner = WIDTH - LEFT - RIGHT

    def x(peak: float) -> float:
        return LEFT + (peak - narrowest) / (widest - narrowest) * inner

    def y(step_s: float) -> float:
        return HEIGHT - BOTTOM - math.log(step_s / least) / math.log(most / least) * (HEIGHT - TOP - BOTTOM)

    return Picture(
        points=tuple(_points(plan, x, y)),
        across=tuple((x(at), size(at)) for at in _round_sizes(narrowest, widest)),
        up=tuple((y(at), seconds(at)) for at in _round_times(least, most)),
        capacities=tuple((x(value), label) for label, value in {size(value): value for value in sizes}.items()),
        band_x=WIDTH - RIGHT + 24,
    )


def _round_sizes(since: float, to: float) -> Iterator[float]:
    """Four to eight round numbers of GiB (below that MiB) from ``since`` to ``to``."""
    unit = 2.0**30 if to - since > 2.0**31 else 2.0**20
    step = _round_step((to - since) / unit / 4) * unit
    at = math.ceil(since / step) * step
    while at <= to:
        yield at
        at += step


def _round_step(least: float) -> float:
    """The largest of 1, 2, 5, 10, ... that is at most ``least``."""
    decade = 10.0 ** math.floor(math.log10(least))
    return max(factor * decade for factor in (1, 2, 5) if factor * decade <= least * (1 + 1e-9))


def _round_times(least: float, most: float) -> list[float]:
    """A few round times, so that neighbours of a logarithmic axis are at least a sixth of it apart."""
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for factors in _FACTORS:
        found = [f * 10.0**d for d in decades for f in factors if least <= f * 10.0**d <= most]
        if len(found) >= 2:
            break
    apart = math.log(most / least) / 6
    kept: list[float] = []
    for at in found:
        if not kept or math.log(at / kept[-1]) >= apart:
            kept.append(at)
    return kept or [math.sqrt(least * most)]


def _points(plan: Plan, x: Callable[[float], float], y: Callable[[float], float]) -> Iterator[Point]:
    yield Point(
        x=x(plan.predicted.peak_memory_bytes),
        y=y(plan.predicted.step_time_s),
        number=0,
        fits=True,
        title=f"the plan, {plan.strategy.describe()}: {seconds(plan.predicted.step_time_s)}, "
        f"{size(plan.predicted.peak_memory_bytes)}",
    )
    unfit = sum(other.step_time_s is None for other in plan.alternatives)
    below = 0
    for number, other in enumerate(plan.alternatives, 1):
        named = f"{number}, {other.family}, {other.strategy.describe()}"
        if other.step_time_s is not None:
            title = f"{named}: {seconds(other.step_time_s)}, {size(other.peak_memory_bytes)}"
            yield Point(x=x(other.peak_memory_bytes), y=y(other.step_time_s), number=number, fits=True, title=title)
            continue
        below += 1
        title = f"{named}: does not fit, {size(other.short_by_bytes)} too much"
        at = TOP + 20 + below * (HEIGHT - TOP - BOTTOM - 20) / (unfit + 1)
        yield Point(x=WIDTH - RIGHT + 77, y=at, number=number, fits=False, title=title)
