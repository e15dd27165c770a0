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
    points: tuple[Point, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    capacity_x: float
    capacity: str
    band_x: float


def picture(plan: Plan) -> Picture:
    """The scatter of ``plan`` and its alternatives."""
    timed = [(plan.predicted.step_time_s, plan.predicted.peak_memory_bytes)]
    timed += [(a.step_time_s, a.peak_memory_bytes) for a in plan.alternatives if a.step_time_s is not None]
    least, most = min(t for t, _ in timed), max(t for t, _ in timed)
    most = max(most, least * _LEAST_SPAN) * 1.08
    widest = max(plan.cluster.memory_bytes, *(peak for _, peak in timed)) * 1.02
    nearest = min(peak for _, peak in timed)
    narrowest = nearest * 0.9 if nearest > widest / 3 else 0.0  # nothing stands before it: no room for nothing
    inner = WIDTH - LEFT - RIGHT

    def x(peak: float) -> float:
        return LEFT + (peak - narrowest) / (widest - narrowest) * inner

    def y(step_s: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - math.log(step_s / (least / 1.08)) / math.log(most / (least / 1.08)) * (HEIGHT - TOP - BOTTOM)
        )

    return Picture(
        points=tuple(_points(plan, x, y)),
        across=tuple((x(at), size(at)) for at in (narrowest + (widest - narrowest) * i / 4 for i in range(5))),
        up=tuple((y(at), seconds(at)) for at in (least, math.sqrt(least * most), most)),
        capacity_x=x(plan.cluster.memory_bytes),
        capacity=size(plan.cluster.memory_bytes),
        band_x=WIDTH - RIGHT + 24,
    )


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
