"""Which layers of a stage recompute: the least added time that fits, exactly.

A layer under policy r keeps ``keep[r]`` bytes a micro-batch and adds ``extra[r]`` seconds to its backward. Within a
stage only sums matter, and layers of one kind are alike, so a choice is a count for each (kind, policy):

    minimise sum_k sum_r n[k, r] extra[k, r]   subject to   sum_k sum_r n[k, r] saved[k, r] >= deficit

with saved[k, r] = keep[k, none] - keep[k, r]. The *frontier* of a multiset of layers lists its undominated (saved,
extra) pairs, so one look-up answers every deficit. Above :data:`MOST_POINTS` pairs some are dropped: the answer still
fits, and may recompute a little more than needed. Runs of layers no two of which are alike have no short frontier:
there the cheapest bytes come first (:class:`Pieces`), and of the choices around the last one all are tried.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST_POINTS = 2048
# Of a run of unlike layers so many choices are tried in every combination, half of them on each side of the last one
# that the cheapest bytes need.
CORE = 10
# Runs that are looked at together.
_AT_ONCE = 256
# Prices of saved bytes that are told apart where recompute is bounded from below.
MOST_PRICES = 24


@dataclass(frozen=True, slots=True)
class Choice:
    """What one policy of a kind saves (bytes a micro-batch) and costs (seconds a micro-batch), against keeping all."""

    policy: str
    saved_bytes: float
    extra_s: float


@dataclass(frozen=True, slots=True)
class _Step:
    """One kind's contribution: for each point of the frontier, where it came from and the counts that were added."""

    kind: int
    choices: tuple[Choice, ...]
    parent: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Frontier:
    """Undominated (saved, extra) pairs, both ascending; the first is (0, 0), keeping everything."""

    saved_bytes: Floats
    extra_s: Floats
    steps: tuple[_Step, ...]

    @cached_property
    def _lists(self) -> tuple[list[float], list[float]]:
        return self.saved_bytes.tolist(), self.extra_s.tolist()

    def least_extra_s(self, deficit_bytes: float) -> float:
        """Least seconds that save at least ``deficit_bytes``; inf where nothing does."""
        saved, extra = self._lists
        at = bisect_left(saved, deficit_bytes)
        return extra[at] if at < len(extra) else math.inf

    def least_extras_s(self, deficit_bytes: Floats) -> Floats:
        """The same for many deficits."""
        at = np.searchsorted(self.saved_bytes, deficit_bytes)
        return np.where(at < len(self.extra_s), self.extra_s[np.minimum(at, len(self.extra_s) - 1)], math.inf)

    def counts(self, deficit_bytes: float) -> dict[int, dict[str, int]]:
        """For each kind how many of its layers follow each policy (those that keep everything left out)."""
        at = bisect_left(self._lists[0], deficit_bytes)
        answer: dict[int, dict[str, int]] = {}
        for step in reversed(self.steps):
            mine = answer.setdefault(step.kind, {})
            for choice, number in zip(step.choices, step.counts[at], strict=True):
                if number:
                    mine[choice.policy] = mine.get(choice.policy, 0) + int(number)
            at = int(step.parent[at])
        return answer


NOTHING = Frontier(np.zeros(1), np.zeros(1), ())


@dataclass(frozen=True, slots=True)
class Prices:
    """The least recompute of runs of layers if layers could recompute in part, from below: a byte saved at each of
    ``prices`` (seconds, ascending) leaves a run its deficit at that price, less the most that its layers gain.
    ``gains``: [L + 1, P] sums over the layers before each cut, ``saved_bytes``: [L + 1] of the most that they save."""

    prices: Floats
    gains: Floats
    saved_bytes: Floats

    def least_extra_s(self, first: Integers, end: Integers, deficit_bytes: Floats) -> Floats:
        """Seconds for every run; inf where its layers don't save that much."""
        deficit = np.maximum(deficit_bytes, 0.0)
        short = self.saved_bytes[end] - self.saved_bytes[first]
        # A hair for the rounding of sums: what is bounded from below must never be above.
        paid = deficit[:, None] * (self.prices * (1 - 1e-9)) - (self.gains[end] - self.gains[first])
        least = np.maximum(0.0, paid.max(axis=1, initial=0.0))
        return np.where(short < deficit * (1 - 1e-9), math.inf, least)


def prices_of(choices: Mapping[int, Sequence[Choice]]) -> tuple[Floats, Floats, Floats]:
    """The prices at which kinds with such choices (0, 1, ...) begin to save more, [K, P] what a layer of each gains at
    them, and [K] the most bytes that it saves."""
    ratios = sorted({ratio for own in choices.values() for _, ratio in hull(own)})
    prices = np.array(_quantiles(ratios, MOST_PRICES), dtype=float)
    gains, most = np.zeros((len(choices), len(prices))), np.zeros(len(choices))
    for kind, own in choices.items():
        for choice in own:
            gains[kind] = np.maximum(gains[kind], prices * choice.saved_bytes - choice.extra_s)
            most[kind] = max(most[kind], choice.saved_bytes)
    return prices, gains, most


def _quantiles(ascending: list[float], most: int) -> list[float]:
    """At most so many of the values, the greatest among them."""
    if len(ascending) <= most:
        return ascending
    return [ascending[(k + 1) * len(ascending) // most - 1] for k in range(most)]


def hull(choices: Sequence[Choice]) -> list[tuple[float, float]]:
    """What a layer of these choices saves if it may follow several in part: (bytes, seconds a byte) one after another,
    at rising prices. The lower convex hull of (0, 0) and the choices."""
    pieces: list[tuple[float, float]] = []
    saved = extra = 0.0
    for best in corners(choices):
        pieces.append((best.saved_bytes - saved, max(0.0, best.extra_s - extra) / (best.saved_bytes - saved)))
        saved, extra = best.saved_bytes, max(extra, best.extra_s)
    return pieces


def corners(choices: Sequence[Choice]) -> list[Choice]:
    """The choices on the lower convex hull, the one that saves least first."""
    found: list[Choice] = []
    saved = extra = 0.0
    while onward := [c for c in choices if c.saved_bytes > saved]:
        best = min(onward, key=lambda c: ((c.extra_s - extra) / (c.saved_bytes - saved), -c.saved_bytes))
        saved, extra = best.saved_bytes, max(extra, best.extra_s)
        found.append(best)
    return found


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each layer of a chain can save, corner by corner of its hull, the cheapest bytes first: a piece is of a
    layer, saves bytes and costs seconds more than the corner before it, and ends at a policy. Prices of one layer rise,
    so that its pieces keep their order. A last piece, of no layer, stands for none. ``places``: [L, Q] each layer's
    pieces."""

    layers: Integers
    saved_bytes: Floats
    extra_s: Floats
    policies: tuple[str, ...]
    places: Integers

    def least_extra_s(self, first: Integers, end: Integers, deficit_bytes: Floats) -> Floats:
        """For every run of layers the least seconds found that save its deficit, never more than one choice above the
        least; inf where nothing does."""
        found = np.zeros(len(first))
        for some in range(0, len(first), _AT_ONCE):
            part = slice(some, some + _AT_ONCE)
            found[part] = self._found(first[part], end[part], deficit_bytes[part])[0]
        return found

    def policy_of(self, first: int, end: int, deficit_bytes: float) -> dict[int, str]:
        """The policies of the layers of one run that follow another than the first."""
        _, order, start, subset = self._found(np.array([first]), np.array([end]), np.array([deficit_bytes]))
        core = [order[0, start[0] + bit] for bit in range(CORE) if subset[0] >> bit & 1]
        taken = [*order[0, : start[0]], *core]
        return {int(self.layers[at]): self.policies[at] for at in taken if self.layers[at] >= 0}

    def _found(
        self, first: Integers, end: Integers, deficit_bytes: Floats
    ) -> tuple[Floats, Integers, Integers, Integers]:
        """For every run the least seconds; its pieces, the cheapest bytes first; how many of those are taken in any
        case; and which of the next ones, as bits."""
        layer = first[:, None] + np.arange(int((end - first).max(initial=0)))
        places = self.places[np.minimum(layer, len(self.places) - 1)]
        places[layer >= end[:, None]] = len(self.policies)
        order = np.sort(places.reshape(len(first), -1), axis=1)
        order = np.concatenate((order, np.full((len(first), 2 * CORE), len(self.policies))), axis=1)
        saved, extra = _before(self.saved_bytes[order]), _before(self.extra_s[order])
        last = np.minimum((saved[:, 1:] < deficit_bytes[:, None]).sum(axis=1), order.shape[1] - CORE)
        start = np.maximum(0, last - CORE // 2)
        core = np.take_along_axis(order, start[:, None] + np.arange(CORE), axis=1)
        rows = np.arange(len(first))
        enough = _sums(saved[rows, start], self.saved_bytes[core]) >= deficit_bytes[:, None]
        cost = np.where(enough, _sums(extra[rows, start], self.extra_s[core]), math.inf)
        for one, other in itertools.combinations(range(CORE), 2):
            # A layer's later piece comes with its earlier one.
            both = np.flatnonzero(
                (self.layers[core[:, one]] == self.layers[core[:, other]]) & (core[:, one] < len(self.policies))
            )
            if len(both):
                cost[np.ix_(both, _WITHOUT[one, other])] = math.inf
        subset = cost.argmin(axis=1)
        return cost[rows, subset], order, start, subset


def _before(values: Floats) -> Floats:
    """Sums of what comes before each column, and last of all."""
    return np.concatenate((np.zeros((len(values), 1)), np.cumsum(values, axis=1)), axis=1)


def _sums(base: Floats, values: Floats) -> Floats:
    """[n, 2^CORE] ``base`` with every subset of the columns of ``values``: subset m has those at the bits of m."""
    sums = base[:, None]
    for column in values.T:
        sums = np.concatenate((sums, sums + column[:, None]), axis=1)
    return sums


# Subsets that hold the second of two positions and not the first.
_WITHOUT = {
    (one, other): np.array([m for m in range(2**CORE) if m >> other & 1 and not m >> one & 1])
    for one, other in itertools.combinations(range(CORE), 2)
}


def pieces_of(kinds: Sequence[int], choices: Mapping[int, Sequence[Choice]]) -> Pieces:
    """The pieces of layers of these kinds, one after the other."""
    of_kind: dict[int, list[tuple[float, float, str]]] = {}
    for kind in dict.fromkeys(kinds):
        saved = extra = 0.0
        of_kind[kind] = []
        for choice in corners(choices[kind]):
            of_kind[kind].append((choice.saved_bytes - saved, choice.extra_s - extra, choice.policy))
            saved, extra = choice.saved_bytes, choice.extra_s
    pieces = [(layer, *piece) for layer, kind in enumerate(kinds) for piece in of_kind[kind]]
    pieces.sort(key=lambda piece: piece[2] / piece[1])
    places = np.full((len(kinds), max(map(len, of_kind.values()), default=0)), len(pieces))
    used = np.zeros(len(kinds), dtype=np.int64)
    for at, (layer, *_) in enumerate(pieces):
        places[layer, used[layer]] = at
        used[layer] += 1
    return Pieces(
        np.array([*(layer for layer, *_ in pieces), -1], dtype=np.int64),
        np.array([*(more for _, more, _, _ in pieces), 0.0]),
        np.array([*(cost for _, _, cost, _ in pieces), 0.0]),
        tuple(policy for *_, policy in pieces),
        places,
    )


def frontier(counts: tuple[tuple[int, int], ...], choices: Mapping[int, tuple[Choice, ...]]) -> Frontier:
    """The frontier of a stage that holds ``counts``: pairs (kind, number of layers)."""
    answer = NOTHING
    for kind, number in counts:
        answer = extend(answer, kind, number, choices.get(kind, ()))
    return answer


def extend(base: Frontier, kind: int, number: int, choices: tuple[Choice, ...]) -> Frontier:
    """``base`` with ``number`` more layers of ``kind``."""
    own = tuple(c for c in choices if c.saved_bytes > 0)
    if not own or not number:
        return base
    saved, extra, counts = _one_kind(number, own)
    all_saved = (base.saved_bytes[:, None] + saved[None, :]).ravel()
    all_extra = (base.extra_s[:, None] + extra[None, :]).ravel()
    kept = _undominated(all_saved, all_extra)
    if len(kept) > MOST_POINTS:
        kept = kept[_thin(len(kept))]
    parent, added = np.divmod(kept, len(saved))
    return Frontier(all_saved[kept], all_extra[kept], (*base.steps, _Step(kind, own, parent, counts[added])))


@lru_cache(maxsize=4096)
def _one_kind(number: int, choices: tuple[Choice, ...]) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Undominated points of ``number`` alike layers, and how many follow each choice."""
    counts = _shares(number, len(choices))
    saved = counts @ np.array([c.saved_bytes for c in choices])
    extra = counts @ np.array([c.extra_s for c in choices])
    kept = _undominated(saved, extra)
    return saved[kept], extra[kept], counts[kept]


@lru_cache(maxsize=64)
def _shares(number: int, choices: int) -> NDArray[np.int64]:
    """[n, C] every way to have up to ``number`` layers follow choices, in lexicographic order."""
    if choices == 1:
        return np.arange(number + 1)[:, None]
    each = [_shares(number - taken, choices - 1) for taken in range(number + 1)]
    first = np.repeat(np.arange(number + 1), [len(others) for others in each])
    return np.concatenate((first[:, None], np.concatenate(each)), axis=1)


def _undominated(saved: Floats, extra: Floats) -> NDArray[np.int64]:
    """Indices of the points that no other beats in both, by ascending saving; ties keep the lowest index."""
    order = np.lexsort((extra, -saved))
    # Walking from the largest saving down, a point stays if it is strictly cheaper than all before it.
    cheapest = np.minimum.accumulate(extra[order])
    stays = np.concatenate(([True], extra[order][1:] < cheapest[:-1]))
    return order[stays][::-1]


def _thin(points: int) -> NDArray[np.int64]:
    """At most :data:`MOST_POINTS` indices, first and last among them. Dropping a point is conservative: what it would
    have served takes the next one, which saves more."""
    return np.linspace(0, points - 1, MOST_POINTS).astype(np.int64)
