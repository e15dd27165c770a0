"""The model as a graph, coloured by stage: where its boxes, arrows and the cuts between stages stand.

Layers are laid out in the order of the plan, row after row. A plan's ``model.edges`` say which hands a value to which;
a chain has none, and neighbours are then joined. Of very long models a box is a run of layers of one stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.explain.text import shorten
from autoplan.plan import Plan

WIDTH = 1000.0
COLOURS = 8  # classes s0 to s7, used in turn
_MOST_BOXES = 240
_HEIGHT, _ROW = 34.0, 56.0
_FEWEST_COLUMNS, _MOST_COLUMNS = 4, 10
_GAP = 16.0
_LETTER = 6.4  # pixels of a letter of the font


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
    """An SVG path from one box to another; ``cut``: it crosses from stage to stage, and is a send."""

    path: str
    cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    height: float
    legend: tuple[tuple[str, str], ...]


def colour(rank: int) -> str:
    """The class of what pipeline rank ``rank`` holds."""
    return f"s{rank % COLOURS}"


def picture(plan: Plan) -> Picture:
    """The graph of ``plan``'s model."""
    runs = _runs(plan)
    columns = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, len(runs)))
    boxes = tuple(_box(plan, runs, at, columns) for at in range(len(runs)))
    of_layer = {layer: at for at, (first, last, _) in enumerate(runs) for layer in range(first, last + 1)}
    pairs = plan.model.edges or [(layer, layer + 1) for layer in range(len(plan.model.layers) - 1)]
    joined = sorted({(of_layer[a], of_layer[b]) for a, b in pairs if of_layer[a] != of_layer[b]})
    return Picture(
        boxes=boxes,
        arrows=tuple(_arrow(boxes[one], boxes[other]) for one, other in joined),
        height=math.ceil(len(runs) / columns) * _ROW,
        legend=tuple(_legend(plan)),
    )


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


def _box(plan: Plan, runs: list[tuple[int, int, int]], at: int, columns: int) -> Box:
    first, last, stage = runs[at]
    wide = WIDTH / columns
    row, column = divmod(at, columns)
    names = plan.model.layers
    label = _short(names[first]) if first == last else f"{last - first + 1} layers"
    title = f"{names[first]}" if first == last else f"{names[first]} to {names[last]}"
    return Box(
        x=column * wide,
        y=row * _ROW + 8,
        width=wide - _GAP,
        height=_HEIGHT,
        colour=colour(stage % plan.strategy.pipeline),
        label=shorten(label, int((wide - _GAP) / _LETTER)),
        stage=stage,
        title=f"{title}: layer {first if first == last else f'{first} to {last}'}, stage {stage}"
        + _recompute(plan, stage, first),
    )


def _short(name: str) -> str:
    """The end of a module path that says which layer it is: ``layers.5`` of ``model.layers.5``."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _recompute(plan: Plan, stage: int, layer: int) -> str:
    held = plan.stages[stage]
    policy = held.layer_recompute[layer - held.first_layer] if held.layer_recompute else "none"
    return f", recompute {policy}" if policy != "none" else ""


def _arrow(one: Box, other: Box) -> Arrow:
    return Arrow(path=" ".join(_path(one, other)), cut=one.stage != other.stage)


def _path(one: Box, other: Box) -> Iterator[str]:
    """Straight to the neighbour, over the boxes between along a row, and down around them to another row."""
    middle, right = one.y + one.height / 2, one.x + one.width
    if one.y == other.y:
        if other.x - right <= _GAP + 0.01:
            yield f"M{right:.1f} {middle:.1f}H{other.x - 2:.1f}"
        else:
            yield f"M{right - 8:.1f} {one.y:.1f}C{right:.1f} {one.y - 10:.1f} {other.x - 4:.1f} {one.y - 10:.1f}"
            yield f"{other.x + 8:.1f} {other.y - 1:.1f}"
        return
    turn = one.y + one.height + (_ROW - _HEIGHT) / 2
    yield f"M{one.x + one.width / 2:.1f} {one.y + one.height:.1f}V{turn:.1f}H{other.x + other.width / 2:.1f}"
    yield f"V{other.y - 2:.1f}"
