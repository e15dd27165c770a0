"""The model as a graph, coloured by stage: where its boxes, arrows and the cuts between stages stand.

Layers are laid out in the order of the plan, row after row. A plan's ``model.edges`` say which hands a value to which;
a chain has none, and neighbours are then joined. Of very long models a box is a run of layers of one stage. What is not
for the neighbour goes through lanes over the rows (:mod:`.model_lanes`), one a source, and never through a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.explain.text import shorten
from autoplan.plan import Plan
from autoplan.report import model_lanes
from autoplan.report.model_lanes import Place

WIDTH = 1000.0
COLOURS = 8  # classes s0 to s7, used in turn
_MOST_BOXES = 240
_HEIGHT, _BETWEEN = 34.0, 22.0
_FEWEST_COLUMNS, _MOST_COLUMNS = 4, 10
_GAP = 16.0
_LETTER = 7.0  # pixels of a letter of the font
_MOST_READERS = 4  # named in a title


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """One layer, or a run of them: ``colour`` is its class, ``title`` what a pointer or a screen reader is told."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    label: str
    stage: int
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """An SVG path from one box to ``ends`` others; ``cut``: it crosses from stage to stage, and is a send."""

    path: str
    cut: bool
    ends: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """``left``: how far lanes stand out before the first box."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    height: float
    left: float
    legend: tuple[tuple[str, str], ...]


def colour(rank: int) -> str:
    """The class of what pipeline rank ``rank`` holds."""
    return f"s{rank % COLOURS}"


def picture(plan: Plan) -> Picture:
    """The graph of ``plan``'s model."""
    runs = _runs(plan)
    columns = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, len(runs)))
    of_layer = {layer: at for at, (first, last, _) in enumerate(runs) for layer in range(first, last + 1)}
    pairs = plan.model.edges or [(layer, layer + 1) for layer in range(len(plan.model.layers) - 1)]
    joined = sorted({(of_layer[a], of_layer[b]) for a, b in pairs if of_layer[a] != of_layer[b]})
    readers: dict[int, list[int]] = {}
    for one, other in joined:
        if other != one + 1:
            readers.setdefault(one, []).append(other)
    lanes = model_lanes.lanes(readers, columns)
    tops = list(_tops(math.ceil(len(runs) / columns), lanes))
    boxes = tuple(_box(plan, runs, at, columns, tops[at // columns], readers.get(at, [])) for at in range(len(runs)))
    places = [Place(x=box.x, y=box.y, width=box.width, row=at // columns) for at, box in enumerate(boxes)]
    near = [Arrow(path=_neighbour(boxes[a], boxes[b]), cut=_cut(boxes, a, b)) for a, b in joined if b == a + 1]
    far = [
        Arrow(path=lanes.path(places, one, ends), cut=cut, ends=len(ends))
        for one, others in readers.items()
        for cut in (False, True)
        if (ends := [other for other in others if _cut(boxes, one, other) == cut])
    ]
    return Picture(
        boxes=boxes,
        arrows=(*near, *far),
        height=tops[-1] + _HEIGHT + _BETWEEN / 2,
        left=lanes.left,
        legend=tuple(_legend(plan)),
    )


def _tops(rows: int, lanes: model_lanes.Lanes) -> Iterator[float]:
    """Where the boxes of each row begin, below the row's lanes."""
    at = 0.0
    for row in range(rows):
        at += lanes.height(row) + (_BETWEEN if row else 8.0)
        yield at
        at += _HEIGHT


def _cut(boxes: tuple[Box, ...], one: int, other: int) -> bool:
    return boxes[one].stage != boxes[other].stage


def _legend(plan: Plan) -> Iterator[tuple[str, str]]:
    """(class, the stages that have it)."""
    ranks = plan.strategy.pipeline
    for first in range(min(COLOURS, ranks)):
        held = [stage for stage in range(len(plan.stages)) if stage % ranks % COLOURS == first]
        named = ", ".join(map(str, held[:4])) + (", ..." if len(held) > 4 else "")
        rank = f"rank {first}: " if ranks < len(plan.stages) and ranks <= COLOURS else ""
        yield colour(first), f"{rank}stage{'s' if len(held) > 1 else ''} {named}"


def _runs(plan: Plan) -> list[tuple[int, int, int]]:
    """(first layer, last layer, stage) of every box."""
    each = math.ceil(len(plan.model.layers) / _MOST_BOXES)
    return [
        (first, min(first + each - 1, stage.last_layer), index)
        for index, stage in enumerate(plan.stages)
        for first in range(stage.first_layer, stage.last_layer + 1, each)
    ]


def _box(plan: Plan, runs: list[tuple[int, int, int]], at: int, columns: int, top: float, readers: list[int]) -> Box:
    first, last, stage = runs[at]
    wide = WIDTH / columns
    column = at % columns
    names = plan.model.layers
    label = short(names[first]) if first == last else f"{last - first + 1} layers"
    title = f"{names[first]}" if first == last else f"{names[first]} to {names[last]}"
    return Box(
        x=column * wide,
        y=top,
        width=wide - _GAP,
        height=_HEIGHT,
        colour=colour(stage % plan.strategy.pipeline),
        label=shorten(label, int((wide - _GAP) / _LETTER)),
        stage=stage,
        title=f"{title}: layer {first if first == last else f'{first} to {last}'}, stage {stage}"
        + _recompute(plan, stage, first)
        + _also_read(plan, [runs[reader][0] for reader in readers]),
    )


def _also_read(plan: Plan, readers: list[int]) -> str:
    """Who reads a layer's value beside the next."""
    if not readers:
        return ""
    named = ", ".join(plan.model.layers[layer] for layer in readers[:_MOST_READERS])
    more = f" and {len(readers) - _MOST_READERS} more" if len(readers) > _MOST_READERS else ""
    return f"; also read by {named}{more}"


def short(name: str) -> str:
    """The end of a module path that says which layer it is: ``layers.5`` of ``model.layers.5``, ``3.resnets`` of
    ``down.3.resnets``."""
    parts = name.split(".")
    return ".".join(parts[-2:] if any(part.isdigit() for part in parts[-2:]) else parts[-1:])


def _recompute(plan: Plan, stage: int, layer: int) -> str:
    held = plan.stages[stage]
    policy = held.layer_recompute[layer - held.first_layer] if held.layer_recompute else "none"
    return f", recompute {policy}" if policy != "none" else ""


def _neighbour(one: Box, other: Box) -> str:
    """Straight to the next box, or from the end of a row to the beginning of the next."""
    middle, right = one.y + one.height / 2, one.x + one.width
    if one.y == other.y:
        return f"M{right:.1f} {middle:.1f}H{other.x - 2:.1f}"
    turn = one.y + one.height + _BETWEEN / 3
    down = f"M{one.x + one.width / 2:.1f} {one.y + one.height:.1f}V{turn:.1f}"
    return f"{down}H{other.x + other.width / 2:.1f}V{other.y - 2:.1f}"
