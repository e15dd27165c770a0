"""A sharper bound, one candidate at a time: what its most repeated layers alone cost, recompute included.

Most models are a block repeated. Let n blocks on stage s take T_s(n) with the least recompute that fits, every other
layer left out. T_s never falls in n, so with a longest period of at most B stage s holds as many blocks as there are
n with T_s(n) <= B. All blocks are held, so B is at least the N-th smallest of all T_s(n), N being the number of blocks.

Let X_s(n) be the recompute in T_s(n). However the blocks are shared out, for any price q of a block all stages together
recompute for at least q N + the sum over s of the least X_s(n) - q n (a Lagrangian bound, concave in q).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoplan.plan import Strategy
from autoplan.search.chain import Chain
from autoplan.search.recompute import Prices, prices_of
from autoplan.search.space import Space
from autoplan.search.tables import MARGIN, Tables

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class BlockBounds:
    """The bounds of candidates of ``space``; what several of them share is found once."""

    space: Space
    _priced: dict[tuple[int, ...], tuple[Floats, Floats]] = field(default_factory=dict, init=False)

    def bottleneck_s(self, strategy: Strategy) -> float:
        """No split of ``strategy`` has a shorter longest period, sends aside; inf where none fits."""
        held = self._held(strategy)
        periods = self._of(strategy, int(held.max()))[0][held - 1].ravel()
        count = _most_repeated(self.space.chain_of(strategy))[1]
        return float(np.partition(periods, count - 1)[count - 1])

    def recompute_s(self, strategy: Strategy) -> float:
        """No split of ``strategy`` recomputes less in a micro-batch, all of its stages together."""
        held, stages = np.unique(self._held(strategy), return_counts=True)
        extra = self._of(strategy, int(held.max()))[1][held - 1]
        return _least_sum_s(np.concatenate((np.zeros((len(held), 1)), extra), axis=1), stages)

    def _held(self, strategy: Strategy) -> Integers:
        """[S] micro-batches in flight on each stage."""
        tables = self.space.tables(strategy)
        return np.array([tables.in_flight(stage) for stage in range(strategy.pipeline)])

    def _of(self, strategy: Strategy, most_held: int) -> tuple[Floats, Floats]:
        """[F, N] seconds of 1, 2, ... blocks with 1, 2, ... micro-batches in flight, and of these the recompute."""
        key = (
            strategy.tensor,
            strategy.sequence_parallel,
            strategy.micro_batch_size,
            strategy.data,
            strategy.zero_stage,
            strategy.pipeline > 1,
        )
        known = self._priced.get(key)
        if known is None or len(known[0]) < most_held:
            tables = self.space.tables(strategy)
            known = self._priced[key] = _periods_s(self.space, tables, *_most_repeated(tables.chain), most_held)
        return known


# Halvings of the interval of a block's prices.
_HALVINGS = 16


def _least_sum_s(extra: Floats, stages: Integers) -> float:
    """Seconds that ``stages`` [H] recompute at least where together they hold N blocks; one that holds 0 to N of them
    recomputes for ``extra`` [H, N + 1]."""
    count = extra.shape[1] - 1
    number = np.arange(count + 1.0)
    finite = extra[:, 1:][np.isfinite(extra[:, 1:])]
    low, high = 0.0, float(finite.max(initial=0.0))  # blocks that cost less than this are all taken
    best = 0.0
    for _ in range(_HALVINGS):
        if not high > low:
            break
        price = (low + high) / 2
        left = extra - price * number
        chosen = np.argmin(left, axis=1)
        best = max(best, price * count + float(stages @ left[np.arange(len(left)), chosen]))
        if int(stages @ chosen) < count:
            low = price
        else:
            high = price
    return best


def _periods_s(space: Space, tables: Tables, kind: int, count: int, most_held: int) -> tuple[Floats, Floats]:
    """[F, N] seconds of 1, 2, ... blocks with 1, 2, ... micro-batches in flight, and of these the recompute."""
    chain, states, costs = tables.chain, tables.states, tables.chain.costs[kind]
    blocks = np.arange(1.0, count + 1)
    # A tied parameter is one for all blocks: left out.
    own = [p for p in space.kinds_of(tables.strategy)[kind].parameters if not p.shared]
    elements = float(sum(p.elements for p in own))
    trainable = float(sum(p.elements for p in own if p.trainable))
    capacity = tables.usable_bytes * (1 - MARGIN) - states.fixed_bytes
    resident = states.per_element * elements + states.per_trainable * trainable
    left = (capacity - blocks * resident) / (1 + states.reserve)
    room = left - costs.passing_bytes - states.window_per_element * elements
    extra = _least_extra_s(chain, kind, blocks, room, most_held)
    extra[:, states.temporary_per_trainable * trainable * blocks > left] = math.inf
    shown, _ = tables.least_data_axis(blocks * elements, blocks * trainable, blocks * costs.backward_s)
    periods: Floats = blocks * (costs.period_s + costs.extra_s[chain.policies[0]]) + extra + shown
    return periods, extra


def _most_repeated(chain: Chain) -> tuple[int, int]:
    """The kind whose layers take longest together, and how many there are."""
    counts = np.bincount(chain.kinds, minlength=len(chain.priced.kinds))
    kind = int(np.argmax(counts * chain.seconds.period_s))
    return kind, int(counts[kind])


def _least_extra_s(chain: Chain, kind: int, blocks: Floats, room: Floats, most_held: int) -> Floats:
    """[F, N] the least recompute of so many layers of a kind, in part where that is less."""
    costs = chain.costs[kind]
    saved, held = blocks * costs.saved_bytes[chain.policies[0]], np.arange(1.0, most_held + 1)
    fits = held[:, None] * saved + costs.window_bytes[chain.policies[0]] <= room
    extra = np.where(fits, 0.0, math.inf)
    row, column = np.nonzero(~fits)
    nothing, all_blocks = np.zeros(len(row), dtype=np.int64), np.arange(len(blocks) + 1.0)
    for own, opened in dict.fromkeys(
        (chain.savings.choices_of(kind, window), chain.savings.opened(kind, window)) for window in chain.savings.windows
    ):
        prices, gains, most = prices_of({0: own})
        relaxed = Prices(prices, all_blocks[:, None] * gains, all_blocks * most)
        deficit = saved[column] - (room[column] - opened) / held[row]
        found = relaxed.least_extra_s(nothing, column + 1, deficit)
        extra[row, column] = np.minimum(extra[row, column], found)
    return extra
