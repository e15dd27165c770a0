"""One step drawn in 80 columns of plain text: a row a stage, or a pipeline rank that holds several, a column an equal
slice of time.

Where a column is no longer than the shortest action each one is drawn with its micro-batch's number. Otherwise the
whole step is drawn by how much of each column is work, and its beginning and its end again with every action.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autoplan.cost_models.schedule import Event
from autoplan.explain.text import WIDTH, heading, paragraph, percent, seconds
from autoplan.report.step import Step

_LABEL = 6
_IDLE_COLUMN = 8
TRACK = WIDTH - _LABEL - 1 - _IDLE_COLUMN - 2
# Rows that a screen holds; of more stages some are left out, evenly.
MOST_ROWS = 24
_TAIL_MARKS = {"gradient synchronisation": "s", "optimizer": "o", "not attributed": "?"}
_LEGEND = "F forward, B backward (a number is the micro-batch), s gradient synchronisation, o optimizer, . waiting"
_SPLIT = "B is in two parts: I the gradients of inputs, W those of weights."


Mark = Callable[[dict[str, float]], str]


@dataclass(frozen=True, slots=True)
class _Block:
    """Something that fills its time: ``label`` starts with the mark that fills the rest of its columns."""

    label: str
    start_s: float
    end_s: float


def timeline(step: Step) -> str:
    """The step as text; every line has at most 80 columns."""
    rows = _rows(len(step.lanes))
    shortest = min((e.end_s - e.start_s for lane in step.lanes for e in lane if e.end_s > e.start_s), default=0.0)
    idle = sum(step.idle_share(stage) for stage in range(len(step.lanes))) / len(step.lanes)
    lines = [heading(f"One step: {seconds(step.end_s)}, {percent(idle)} of it waiting")]
    lines += paragraph(_LEGEND)
    if any(event.action.kind == "W" for lane in step.lanes for event in lane):
        lines += paragraph(_SPLIT)
    lines += paragraph(_rows_are(step))
    if len(rows) < len(step.lanes):
        lines.append(f"{len(rows)} of {len(step.lanes)} {step.row}s are drawn.")
    if step.unexplained_s:
        lines += paragraph(
            f"The plan says {seconds(step.plan.predicted.step_time_s)}; {seconds(abs(step.unexplained_s))} of the "
            "difference is in no stage's times (an older plan file: plan again for the exact step)."
        )
    coarse = shortest > 0 and step.end_s / TRACK > shortest
    if coarse:
        lines += paragraph("In the whole step # is a column that is all work, a digit the tenths of it that are.")
    lines += ["", *_window(step, rows, 0.0, step.end_s, "the whole step", idle=True, mark=_busy if coarse else _cell)]
    if coarse:
        # Three columns for the shortest action: room for its letter and its micro-batch.
        span = shortest / 3 * TRACK
        since = max(0.0, step.end_s - span)
        lines += ["", *_window(step, rows, 0.0, span, "its beginning")]
        if (step.end_s - since) / TRACK > 0:  # an action may be too short beside the step for floats to tell
            lines += ["", *_window(step, rows, since, step.end_s, "its end")]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _rows_are(step: Step) -> str:
    """What the rows stand for, where they are not simply the stages of GPUs of one kind."""
    plan = step.plan
    if step.row == "rank":
        held = ", ".join(str(stage) for stage in range(0, len(plan.stages), len(step.lanes)))
        return (
            f"A row is a pipeline rank, which holds {plan.strategy.virtual_stages} stages: rank 0 the stages {held}. "
            "Its actions are those of all of them."
        )
    if not plan.cluster.groups:
        return ""
    runs = dict.fromkeys(stage.device for stage in plan.stages)
    on = {device: [i for i, stage in enumerate(plan.stages) if stage.device == device] for device in runs}
    named = [f"stage {held[0]}" if len(held) == 1 else f"stages {held[0]} to {held[-1]}" for held in on.values()]
    return f"A row is a stage: {', '.join(f'{which} on {device}' for which, device in zip(named, on, strict=True))}."


def _rows(stages: int) -> list[int]:
    if stages <= MOST_ROWS:
        return list(range(stages))
    return sorted({round(i * (stages - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})


def _window(
    step: Step, rows: list[int], since: float, to: float, name: str, *, idle: bool = False, mark: Mark | None = None
) -> list[str]:
    """Rows of what happens from ``since`` to ``to``; ``mark`` turns the shares of a column into its character."""
    column = (to - since) / TRACK
    title = f"{name}: {seconds(since)} to {seconds(to)}, a column is {seconds(column)}"
    lines = [f"{step.row:>{_LABEL}} {title:<{TRACK + 2}}{'waits' if idle else '':>{_IDLE_COLUMN}}"]
    for stage in rows:
        track = _track(_blocks(step, stage), since, to, mark or _cell)
        share = percent(step.idle_share(stage)) if idle else ""
        lines.append(f"{stage:>{_LABEL}} |{track}|{share:>{_IDLE_COLUMN}}")
    return lines


def _blocks(step: Step, stage: int) -> list[_Block]:
    blocks = [_Block(_label(event), event.start_s, event.end_s) for event in step.lanes[stage]]
    return blocks + [_Block(_TAIL_MARKS[tail.what], tail.start_s, tail.end_s) for tail in step.tails[stage]]


def _label(event: Event) -> str:
    return f"{event.action.kind}{event.action.micro_batch}"


def _track(blocks: Iterable[_Block], since: float, to: float, mark_of: Mark) -> str:
    """``blocks`` on TRACK columns: each column shows what fills most of it, and a block that keeps room its label."""
    column = (to - since) / TRACK
    filled: list[dict[str, float]] = [{} for _ in range(TRACK)]
    labels: list[tuple[int, str]] = []
    for block in blocks:
        start, end = (block.start_s - since) / column, (block.end_s - since) / column
        if end <= 0 or start >= TRACK:
            continue
        mark = block.label[0]
        for at in range(max(0, math.floor(start)), min(TRACK, math.ceil(end))):
            filled[at][mark] = filled[at].get(mark, 0.0) + min(end, at + 1) - max(start, at)
        first, room = math.ceil(start - 0.5), math.floor(end + 0.5) - math.ceil(start - 0.5)
        if len(block.label) > 1 and first >= 0 and room > len(block.label) and first + room <= TRACK:
            labels.append((first, block.label))
    cells = [mark_of(shares) for shares in filled]
    for first, label in labels if mark_of is _cell else ():
        cells[first : first + len(label)] = label
    return "".join(cells)


def _cell(shares: dict[str, float]) -> str:
    waiting = 1.0 - sum(shares.values())
    mark = max(shares, key=lambda name: shares[name], default=".")
    return mark if shares and shares[mark] >= waiting else "."


def _busy(shares: dict[str, float]) -> str:
    tenths = math.floor(sum(shares.values()) * 10 + 1e-3)
    return "#" if tenths >= 10 else str(tenths) if tenths else "."
