"""What the page draws, as rectangles: memory bars and the pipeline, in units of a picture ``WIDTH`` wide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.explain.text import seconds, size
from autoplan.plan import Stage
from autoplan.report import parts
from autoplan.report.step import Step

WIDTH = 1000.0
ROW = 22.0
# A picture with more actions than this gets its whole step shaded by how busy it is, and two windows with every action.
MOST_RECTANGLES = 1500
# ... and so does one with more in a row: they would be a few pixels each, without a number.
_MOST_IN_A_ROW = 160
_COLUMNS = 250
# Actions that a window shows at least, one after the other, and for each stage, so that the warm-up is in it.
_LEAST_ACTIONS, _ACTIONS_A_STAGE = 48, 4
_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_WORDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
# The groups of a memory bar: class and label by term; the rest is "else".
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("weights", "weights", ("weights",)),
    ("gradients", "gradients", ("gradients",)),
    ("optimizer", "optimizer state, master weights", ("optimizer_state", "master_weights")),
    ("activations", "saved activations", ("saved_activations", "received_activations")),
)
ELSE = ("else", "everything else")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """``kind`` is its class, ``label`` what fits inside, ``title`` what a pointer or a screen reader is told."""

    x: float
    width: float
    kind: str
    title: str
    label: str = ""
    opacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Rows of rectangles; ``ticks`` are (x, label) of its time axis. ``row`` is what a row is: stage, or rank."""

    row: str
    caption: str
    rows: tuple[tuple[Rectangle, ...], ...]
    ticks: tuple[tuple[float, str], ...]


def memory_bar(stage: Stage, capacity: float) -> tuple[Rectangle, ...]:
    """The stage's memory by group on a bar whose whole is the GPU's memory."""
    known = {name for _, _, names in GROUPS for name in names}
    shares = [(kind, label, sum(stage.memory_terms.get(n, 0.0) for n in names)) for kind, label, names in GROUPS]
    shares.append((*ELSE, sum(value for name, value in stage.memory_terms.items() if name not in known)))
    made, at = [], 0.0
    for kind, label, value in shares:
        width = min(value / capacity * WIDTH, WIDTH - at)
        if width > 0:
            made.append(Rectangle(x=at, width=width, kind=kind, title=f"{label}: {size(value)}"))
        at += max(0.0, width)
    return tuple(made)


def pipeline(step: Step) -> tuple[Picture, ...]:
    """The step in one picture, or the whole shaded and its beginning and end action by action."""
    if step.actions <= min(MOST_RECTANGLES, _MOST_IN_A_ROW * len(step.lanes)):
        return (_picture(step, 0.0, step.end_s, "The whole step"),)
    shortest = min(e.end_s - e.start_s for lane in step.lanes for e in lane)
    span = min(step.end_s, max(shortest, step.end_s * 1e-4) * max(_LEAST_ACTIONS, _ACTIONS_A_STAGE * len(step.lanes)))
    return (
        _shaded(step),
        _picture(step, 0.0, span, "Its beginning"),
        _picture(step, step.end_s - span, step.end_s, "Its end"),
    )


def _picture(step: Step, since: float, to: float, caption: str) -> Picture:
    scale = WIDTH / (to - since)
    rows = []
    for stage in range(len(step.lanes)):
        inside = (r for r in _blocks(step, stage) if r[2] > since and r[1] < to)
        row = []
        for kind, start, end, label, title in inside:
            x, stop = (max(start, since) - since) * scale, (min(end, to) - since) * scale
            fits = stop - x > 7.0 * len(label) + 4
            row.append(Rectangle(x=x, width=stop - x, kind=kind, title=title, label=label if fits else ""))
        rows.append(tuple(row))
    return Picture(row=step.row, caption=caption, rows=tuple(rows), ticks=_ticks(since, to))


def _blocks(step: Step, stage: int) -> Iterator[tuple[str, float, float, str, str]]:
    """(class, start, end, label, title) of what a stage does, or a rank: of every second stage that it holds in another
    shade."""
    for event in step.lanes[stage]:
        kind, number = event.action.kind, event.action.micro_batch
        span, made_of = _span(event.start_s, event.end_s), parts.said(step.plan, event)
        title = f"stage {event.action.stage}, {_WORDS[kind]} of micro-batch {number}: {span}"
        title += f" ({made_of})" if made_of else ""
        later = event.action.stage // len(step.lanes) % 2
        yield _KINDS[kind] + " later" * later, event.start_s, event.end_s, str(number), title
    for tail in step.tails[stage]:
        yield (
            "tail",
            tail.start_s,
            tail.end_s,
            "",
            f"{step.row} {stage}, {tail.what}: {_span(tail.start_s, tail.end_s)}",
        )


def _span(start: float, end: float) -> str:
    return f"{seconds(end - start)}, from {seconds(start)}"


def _shaded(step: Step) -> Picture:
    """Columns as opaque as they are busy; neighbours that are alike share a rectangle."""
    rows = []
    for stage in range(len(step.lanes)):
        tenths = [round(share * 10) for share in _busy_columns(step, stage)]
        row, first = [], 0
        for at in range(1, _COLUMNS + 1):
            if at == _COLUMNS or tenths[at] != tenths[first]:
                if tenths[first]:
                    column = WIDTH / _COLUMNS
                    title = f"{step.row} {stage}: {tenths[first] * 10}% busy"
                    row.append(
                        Rectangle(
                            x=first * column,
                            width=(at - first) * column,
                            kind="busy",
                            title=title,
                            opacity=tenths[first] / 10,
                        )
                    )
                first = at
        rows.append(tuple(row))
    return Picture(
        row=step.row,
        caption="The whole step: the stronger, the busier",
        rows=tuple(rows),
        ticks=_ticks(0.0, step.end_s),
    )


def _busy_columns(step: Step, stage: int) -> list[float]:
    shares = [0.0] * _COLUMNS
    for _, start, end, _, _ in _blocks(step, stage):
        first, last = start / step.end_s * _COLUMNS, end / step.end_s * _COLUMNS
        for column in range(int(first), min(_COLUMNS, math.ceil(last))):
            shares[column] += min(last, column + 1) - max(first, column)
    return shares


def _ticks(since: float, to: float) -> tuple[tuple[float, str], ...]:
    return tuple((WIDTH * i / 4, seconds(since + (to - since) * i / 4)) for i in range(5))
