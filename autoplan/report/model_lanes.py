"""Where the arrows of a graph go that do not join neighbours: lanes over each row of boxes, one for each source that is
read there, and lanes before the first column from row to row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_STEP, _MOST_HEIGHT, _MOST_LEFT = 6.0, 72.0, 60.0  # between two lanes, and of all of a row, or before it, at most
_CLEAR = 7.0  # between boxes and the nearest lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A box in ``row``: its left upper corner and its width."""

    x: float
    y: float
    width: float
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """``over``: the sources that have a lane over each row, the nearest to the boxes first; ``before``: those that are
    read in another row."""

    over: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]

    def height(self, row: int) -> float:
        """What the lanes over ``row`` take."""
        number = len(self.over[row]) if row < len(self.over) else 0
        return min(number * _STEP, _MOST_HEIGHT) + _CLEAR if number else 0.0

    @property
    def left(self) -> float:
        """What the lanes before the first column take."""
        return min(len(self.before) * _STEP, _MOST_LEFT) + _CLEAR if self.before else 0.0

    def path(self, places: Sequence[Place], source: int, targets: Sequence[int]) -> str:
        """SVG from the top of ``source`` through its lanes to the top of each of ``targets``, each end with its
        head."""
        start, parts = places[source], []
        leaves = start.x + start.width - self._aside(start, source)
        rows = sorted({start.row, *(places[target].row for target in targets)})
        several = rows[-1] != start.row
        for row in rows:
            y = self._lane(places, row, source)
            ends = [self._enters(places[target], source) for target in targets if places[target].row == row]
            begins = [self._before(source)] if several else []
            across = [*begins, *([leaves] if row == start.row else []), *ends]
            parts.append(f"M{min(across):.1f} {y:.1f}H{max(across):.1f}")
            parts += [f"M{x:.1f} {y:.1f}V{_top(places, row) - 2:.1f}{_head(x, _top(places, row) - 2)}" for x in ends]
        parts.append(f"M{leaves:.1f} {start.y:.1f}V{self._lane(places, start.row, source):.1f}")
        if several:
            first, last = (self._lane(places, row, source) for row in (start.row, rows[-1]))
            parts.append(f"M{self._before(source):.1f} {first:.1f}V{last:.1f}")
        return "".join(parts)

    def _lane(self, places: Sequence[Place], row: int, source: int) -> float:
        number = self.over[row].index(source)
        step = min(_STEP, _MOST_HEIGHT / len(self.over[row]))
        return _top(places, row) - _CLEAR - number * step

    def _before(self, source: int) -> float:
        step = min(_STEP, _MOST_LEFT / len(self.before))
        return -_CLEAR - self.before.index(source) * step

    def _enters(self, place: Place, source: int) -> float:
        return place.x + self._aside(place, source)

    def _aside(self, place: Place, source: int) -> float:
        """How far from a box's edge a source's arrow stands: each has its own place, up to half of the box."""
        return 8.0 + self.over[place.row].index(source) * _STEP % max(_STEP, place.width / 2 - 8.0)


def lanes(readers: dict[int, list[int]], columns: int) -> Lanes:
    """The lanes for values that ``readers`` other than the next box read, by source."""
    rows: dict[int, list[int]] = {}
    before = []
    for source, others in sorted(readers.items()):
        seen = dict.fromkeys(other // columns for other in (source, *others))
        for row in seen:
            rows.setdefault(row, []).append(source)
        if len(seen) > 1:
            before.append(source)
    # The latest source lies lowest, so that its arrows cross the fewest lanes.
    over = tuple(tuple(sorted(rows.get(row, ()), reverse=True)) for row in range(max(rows, default=-1) + 1))
    return Lanes(over=over, before=tuple(before))


def _top(places: Sequence[Place], row: int) -> float:
    return next(place.y for place in places if place.row == row)


def _head(x: float, y: float) -> str:
    return f"M{x - 3:.1f} {y - 4.5:.1f}L{x:.1f} {y:.1f}L{x + 3:.1f} {y - 4.5:.1f}"
