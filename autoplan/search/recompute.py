"""Which layers of a stage recompute: the least added time that fits, exactly.

A layer under policy r keeps ``keep[r]`` bytes a micro-batch and adds ``extra[r]`` seconds to its backward. Within a
stage only sums matter, and layers of one kind are alike, so a choice is a count for each (kind, policy):

    minimise sum_k sum_r n[k, r] extra[k, r]   subject to   sum_k sum_r n[k, r] saved[k, r] >= deficit

with saved[k, r] = keep[k, none] - keep[k, r]. The *frontier* of a multiset of layers lists its undominated (saved,
extra) pairs, so one look-up answers every deficit. Above :data:`MOST_POINTS` pairs (many layers no two of which are
alike) some are dropped: the answer still fits, and may recompute a little more than needed. Of longer runs of such
layers the frontier lists those pairs alone that take the cheapest bytes first, at most one layer's choice above the
least (:class:`GreedyFrontier`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_POINTS = 2048


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
class Relaxation:
    """The least recompute of many spans if layers could recompute in part: of a window at a time, seconds a byte saved
    (ascending) and, for each of those, the bytes that every span can save at that price."""

    windows: tuple[tuple[list[float], list[Floats]], ...]

    def least_extra_s(self, deficit_bytes: Sequence[Floats]) -> Floats:
        """Seconds for every span, the least over windows, where ``deficit_bytes`` has one entry a window."""
        best = np.full(len(deficit_bytes[0]) if deficit_bytes else 0, math.inf)
        for (ratios, capacities), deficit in zip(self.windows, deficit_bytes, strict=True):
            rest, extra = np.maximum(deficit, 0.0), np.zeros(len(deficit))
            for ratio, capacity in zip(ratios, capacities, strict=True):
                taken = np.minimum(rest, capacity)
                extra += ratio * taken
                rest = rest - taken
            # A hair for the rounding of sums: what is bounded from below must never be above.
            short = rest > 1e-9 * np.maximum(deficit, 1.0)
            best = np.minimum(best, np.where(short, math.inf, extra * (1 - 1e-9)))
        return best


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


@dataclass(frozen=True)
class GreedyFrontier(Frontier):
    """Pairs of many layers, the cheapest bytes first: each is at most one layer's choice dearer than the least.
    ``taken``: the pieces that the pairs add one after another; a layer's later policy replaces its earlier one."""

    pieces: Pieces | None = None
    taken: NDArray[np.int64] | None = None

    def counts(self, deficit_bytes: float) -> dict[int, dict[str, int]]:
        assert self.pieces is not None and self.taken is not None
        followed: dict[int, tuple[int, str]] = {}
        for piece in self.taken[: int(np.searchsorted(self.saved_bytes, deficit_bytes))]:
            layer = int(self.pieces.layers[piece])
            followed[layer] = self.pieces.kinds[layer], self.pieces.policies[piece]
        answer: dict[int, dict[str, int]] = {}
        for kind, policy in followed.values():
            mine = answer.setdefault(kind, {})
            mine[policy] = mine.get(policy, 0) + 1
        return answer


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each layer of a chain can save, corner by corner of its hull, the cheapest bytes first: a piece is of a
    layer (of one of ``kinds``), saves bytes and costs seconds more than the corner before it, and ends at a policy.
    Prices of one layer rise, so that its pieces keep their order."""

    kinds: tuple[int, ...]
    layers: NDArray[np.int64]
    saved_bytes: Floats
    extra_s: Floats
    policies: tuple[str, ...]

    def span(self, first: int, end: int) -> GreedyFrontier:
        """The pairs of layers ``first`` to ``end`` - 1."""
        taken = np.flatnonzero((self.layers >= first) & (self.layers < end))
        saved, extra = np.zeros(len(taken) + 1), np.zeros(len(taken) + 1)
        np.cumsum(self.saved_bytes[taken], out=saved[1:])
        np.cumsum(self.extra_s[taken], out=extra[1:])
        return GreedyFrontier(saved, extra, (), self, taken)


def pieces_of(kinds: Sequence[int], choices: dict[int, tuple[Choice, ...]]) -> Pieces:
    """The pieces of layers of these kinds, one after the other."""
    of_kind: dict[int, list[tuple[float, float, str]]] = {}
    for kind in dict.fromkeys(kinds):
        saved = extra = 0.0
        of_kind[kind] = []
        for choice in corners(choices[kind]):
            of_kind[kind].append((choice.saved_bytes - saved, choice.extra_s - extra, choice.policy))
            saved, extra = choice.saved_bytes, choice.extra_s
    all_pieces = [(layer, *piece) for layer, kind in enumerate(kinds) for piece in of_kind[kind]]
    all_pieces.sort(key=lambda piece: piece[2] / piece[1])
    return Pieces(
        tuple(kinds),
        np.array([layer for layer, *_ in all_pieces], dtype=np.int64),
        np.array([more for _, more, _, _ in all_pieces], dtype=np.float64),
        np.array([cost for _, _, cost, _ in all_pieces], dtype=np.float64),
        tuple(policy for *_, policy in all_pieces),
    )


def frontier(counts: tuple[tuple[int, int], ...], choices: dict[int, tuple[Choice, ...]]) -> Frontier:
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
    ranges = np.meshgrid(*[np.arange(number + 1)] * len(choices), indexing="ij")
    counts = np.stack([axis.ravel() for axis in ranges], axis=1)
    counts = counts[counts.sum(axis=1) <= number]
    saved = counts @ np.array([c.saved_bytes for c in choices])
    extra = counts @ np.array([c.extra_s for c in choices])
    kept = _undominated(saved, extra)
    return saved[kept], extra[kept], counts[kept]


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
