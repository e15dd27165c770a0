"""What recompute saves and costs in the spans of a chain: exactly, and from below.

While a layer recomputes, what it did not keep comes back: a *window* of memory beside the activations of all
micro-batches in flight. The choice is solved for a few thresholds: layers whose window is within one may recompute, and
the span leaves room for the largest window of those that may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.search.recompute import NOTHING, Choice, Frontier, Pieces, Prices, extend, pieces_of, prices_of

if TYPE_CHECKING:
    from autoplan.search.chain import Chain

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Thresholds that are tried; all windows where they are no more. Of more, those that are nearly alike are one.
MOST_WINDOWS = 6
_NEARLY = 1.25


@dataclass(frozen=True, slots=True)
class Needs:
    """Spans (``first``, ``end``) that hold ``held`` micro-batches of ``saved_bytes``, with ``room_bytes`` for those and
    the window."""

    first: Integers
    end: Integers
    held: Integers
    saved_bytes: Floats
    room_bytes: Floats


@dataclass(frozen=True)
class Savings:
    """What the layers of ``chain`` may save."""

    chain: Chain
    _frontiers: dict[tuple[int, ...], Frontier] = field(default_factory=dict, init=False)
    _thresholds: dict[tuple[int, ...], list[int]] = field(default_factory=dict, init=False)

    @cached_property
    def windows(self) -> tuple[float, ...]:
        """Thresholds of what a layer opens while it recomputes, ascending."""
        found = {self._window(kind, c.policy) for kind, own in self._all.items() for c in own}
        return _thresholds(sorted(found))

    def choices(self, window: float) -> dict[int, tuple[Choice, ...]]:
        """The choices of each kind that open no more than that."""
        return {
            kind: tuple(c for c in own if self._window(kind, c.policy) <= window) for kind, own in self._all.items()
        }

    def opened(self, kind: int, window: float) -> float:
        """The most that a layer of a kind opens within a threshold."""
        return max((self._window(kind, c.policy) for c in self.choices_of(kind, window)), default=0.0)

    def choices_of(self, kind: int, window: float) -> tuple[Choice, ...]:
        """The choices of one kind that open no more than that."""
        return tuple(c for c in self._all[kind] if self._window(kind, c.policy) <= window)

    def least_extra_s(self, needs: Needs) -> Floats:
        """The least recompute seconds of every span; inf where no choice fits."""
        least = np.full(len(needs.first), math.inf)
        deficits = [self._deficits(at, needs) for at in range(len(self.windows))]
        if not self.chain.grouped:
            for deficit, pieces in zip(deficits, self._pieces, strict=True):
                least = np.minimum(least, pieces.least_extra_s(needs.first, needs.end, deficit))
            return least
        for same in _runs(needs.first * (self.chain.layers + 1) + needs.end):
            held = self.chain.held_kinds(int(needs.first[same[0]]), int(needs.end[same[0]]))
            for at in self._unlike(held):
                least[same] = np.minimum(least[same], self._frontier(at, held).least_extras_s(deficits[at][same]))
        return least

    def least_in_part_s(self, needs: Needs) -> Floats:
        """No more than the least, and quickly: layers may recompute in part."""
        least = np.full(len(needs.first), math.inf)
        for at, prices in enumerate(self._prices):
            found = prices.least_extra_s(needs.first, needs.end, self._deficits(at, needs))
            least = np.minimum(least, found)
        return least

    def policies(self, needs: Needs) -> tuple[str, ...]:
        """The policy of each layer of one span behind its least recompute."""
        deficits = [self._deficits(at, needs) for at in range(len(self.windows))]
        first, end = int(needs.first[0]), int(needs.end[0])
        answer = [self.chain.policies[0]] * (end - first)
        if not self.chain.grouped:
            each = [
                float(pieces.least_extra_s(needs.first, needs.end, deficit)[0])
                for deficit, pieces in zip(deficits, self._pieces, strict=True)
            ]
            at = min(range(len(each)), key=each.__getitem__)
            for layer, followed in self._pieces[at].policy_of(first, end, float(deficits[at][0])).items():
                answer[layer - first] = followed
            return tuple(answer)
        held = self.chain.held_kinds(first, end)
        extra_s = {at: self._frontier(at, held).least_extra_s(float(deficits[at][0])) for at in self._unlike(held)}
        at = min(extra_s, key=extra_s.__getitem__)
        counts = self._frontier(at, held).counts(float(deficits[at][0]))
        for offset in range(len(answer)):
            mine = counts.get(int(self.chain.kinds[first + offset]), {})
            policy = next((p for p in self.chain.policies[1:] if mine.get(p)), None)
            if policy:
                mine[policy] -= 1
                answer[offset] = policy
        return tuple(answer)

    @cached_property
    def _all(self) -> dict[int, tuple[Choice, ...]]:
        """The choices of each kind, against the first policy."""
        kept, extra = self.chain.kept.saved_bytes, self.chain.seconds.extra_s
        first, *others = self.chain.policies
        found: dict[int, tuple[Choice, ...]] = {}
        columns = [(p, (kept[first] - kept[p]).tolist(), (extra[p] - extra[first]).tolist()) for p in others]
        for kind in range(len(self.chain.priced.kinds)):
            each = (Choice(p, saved[kind], seconds[kind]) for p, saved, seconds in columns)
            found[kind] = tuple(choice for choice in each if choice.saved_bytes > 0)
        return found

    def _window(self, kind: int, policy: str) -> float:
        return self._windows_of[policy][kind]

    @cached_property
    def _windows_of(self) -> dict[str, list[float]]:
        return {policy: bytes_.tolist() for policy, bytes_ in self.chain.kept.window_bytes.items()}

    @cached_property
    def _opened(self) -> list[Floats]:
        """For each threshold [L + 1, L + 1] the largest window that a span may open."""
        kinds = range(len(self.chain.priced.kinds))
        return [
            self.chain.range_max(self.chain.per_layer(np.array([self.opened(kind, window) for kind in kinds])))
            for window in self.windows
        ]

    def _deficits(self, at: int, needs: Needs) -> Floats:
        """Bytes that each micro-batch has to save within a threshold."""
        left = needs.room_bytes - self._opened[at][needs.first, needs.end]
        deficit: Floats = needs.saved_bytes - left / needs.held
        return deficit

    @cached_property
    def _pieces(self) -> list[Pieces]:
        kinds = self.chain.kinds.tolist()
        return [pieces_of(kinds, self.choices(window)) for window in self.windows]

    @cached_property
    def _prices(self) -> list[Prices]:
        found = []
        for window in self.windows:
            prices, gains, most = prices_of(self.choices(window))
            found.append(Prices(prices, self.chain.prefix(gains), self.chain.prefix(most)))
        return found

    @cached_property
    def _alike(self) -> list[tuple[int, ...]]:
        """For each threshold how many choices of each kind are within it: those of a lower one are within a higher."""
        return [
            tuple(len(self.choices_of(kind, window)) for kind in range(len(self.chain.priced.kinds)))
            for window in self.windows
        ]

    def _unlike(self, held: tuple[int, ...]) -> list[int]:
        """The thresholds, the lowest of those that leave layers of the kinds that are held the same choices."""
        kinds = tuple(kind for kind, number in enumerate(held) if number)
        if kinds not in self._thresholds:
            seen: dict[tuple[int, ...], int] = {}
            for at, numbers in enumerate(self._alike):
                seen.setdefault(tuple(numbers[kind] for kind in kinds), at)
            self._thresholds[kinds] = list(seen.values())
        return self._thresholds[kinds]

    def _frontier(self, at: int, held: tuple[int, ...]) -> Frontier:
        """What so many layers of each kind can save within a threshold. One kind after the other, so that spans that
        begin alike share their beginnings."""
        grown = NOTHING
        begun: tuple[int, ...] = ()
        for kind, number in enumerate(held):
            if number:
                begun = (*begun, kind, number, self._alike[at][kind])
                if begun not in self._frontiers:
                    own = self.choices_of(kind, self.windows[at])
                    self._frontiers[begun] = extend(grown, kind, number, own)
                grown = self._frontiers[begun]
        return grown


def _thresholds(ascending: list[float]) -> tuple[float, ...]:
    """At most :data:`MOST_WINDOWS` of the values, so that each is nearly one of them or less."""
    found, nearly = ascending, 1.0
    while len(found) > MOST_WINDOWS:
        nearly *= _NEARLY
        found = []
        for window in reversed(ascending):
            if not found or window * nearly < found[-1]:
                found.append(window)
        found.reverse()
    return tuple(found)


def _runs(values: Integers) -> list[Integers]:
    """Positions of each distinct value, a value at a time."""
    if not len(values):
        return []
    order = np.argsort(values, kind="stable")
    return np.split(order, np.nonzero(np.diff(values[order]))[0] + 1)
