"""Lower bounds of interleaved and zero-bubble candidates: what the simulated step of their one split takes at least.

Ranks r = 0 ... p - 1 hold v chunks each, T_0 ... T_(p-1) are the first chunks' periods, R_r a rank's, P the sum of all,
M micro-batches. A rank can't start before the first forward has come to it, nor can the step end before its last
backward has gone back (:func:`autoplan.cost_models.schedule.lower_bound_s`):

    step >= sum_(i<r) T_i + 2 r send + M R_r + the first rank's tail                              (interleaved)
    step >= sum_(i<r) F_i + r send + M R_r                                                        (zero bubble)

The split is the most even one, so that no chunk takes longer than c, the longest of any split that can be written
down: windows of ceil(L / S) of the L layers in S = p v chunks, or ceil(n / S) of the n most common layers each with
all others at the ends. So the first r chunks take at least P - (S - r) c = c (r - d) with d = S - P / c, and the ranks
from r on work at least P - r v c. The rows hold for the mean over any ranks; taken are the mean over all, over the
second half, and the last rank alone, which is exact where all chunks are alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.schedules import SCHEDULES
from autoplan.search.chain import Chain
from autoplan.search.dag_transfers import is_chain
from autoplan.search.degrees import Candidates
from autoplan.search.space import Space

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Sums of spans differ by their rounding.
_HAIR = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Parts:
    """One entry a tuple of degrees, in seconds: periods of all layers, of the longest, all backwards, the lesser share
    of forward and backward, the cheapest send over one boundary, what the data axis exposes of a micro-batch at least,
    and the least tails of the first stage and of the mean one."""

    period_s: Floats
    longest_s: Floats
    backward_s: Floats
    lesser_share: Floats
    send_s: Floats
    exposed_s: Floats
    first_tail_s: Floats
    even_tail_s: Floats


def even_split_bounds(space: Space, candidates: Candidates, rows: Integers, parts: Parts) -> Floats:
    """Seconds that the simulated steps of ``rows`` of ``candidates`` take at least; ``parts`` has an entry for every
    tuple of degrees (``candidates.of``)."""
    of, ranks = candidates.of[rows], candidates.pipeline[rows]
    virtual, micro_batches = candidates.virtual_stages[rows], candidates.micro_batches[rows].astype(float)
    interleaved = candidates.other[rows] == SCHEDULES.index("interleaved")
    period = parts.period_s[of]
    # Of a model that is no chain a boundary may send less than what crosses it: some values go further.
    send = parts.send_s[of] if is_chain(space.problem.layers) else np.zeros(len(rows))
    chunk, common, forward_share = _chunks(space, candidates, rows)
    stages = ranks * virtual
    with np.errstate(invalid="ignore", divide="ignore"):
        behind = np.where(np.isfinite(chunk), stages - period / chunk, np.inf)
    # Of a zero-bubble rank only the forwards that come first are counted.
    ahead = np.where(interleaved, chunk, chunk * forward_share)
    hops = np.where(interleaved, 2 * send, send)
    tail, even_tail = np.where(interleaved, parts.first_tail_s[of], 0.0), parts.even_tail_s[of]
    works = np.maximum(np.maximum((period + parts.exposed_s[of]) / ranks, parts.longest_s[of]), common)
    found = micro_batches * works + tail
    found = np.maximum(found, micro_batches * (period + parts.exposed_s[of]) / ranks + even_tail)
    way = period.copy()
    way[~interleaved] -= _weight_gradients_s(space, candidates, rows[~interleaved])
    found = np.maximum(found, way + 2 * (stages - virtual) * send + tail)
    for first in (np.zeros_like(ranks), ranks // 2, ranks - 1):
        counted = ranks - first
        waits = _sum_above(behind, first, ranks) * np.where(np.isfinite(ahead), ahead, 0.0)
        waits += hops * (first + ranks - 1) / 2 * counted
        with np.errstate(invalid="ignore"):
            work = np.where(first > 0, period - first * virtual * chunk, period + parts.exposed_s[of])
        work = np.where(np.isfinite(work), np.maximum(work, 0.0), 0.0)
        found = np.maximum(found, (waits + micro_batches * work) / counted + tail)
    return found


def _sum_above(behind: Floats, first: Integers, end: Integers) -> Floats:
    """sum over r from ``first`` to ``end`` - 1 of max(0, r - ``behind``)."""
    least = np.maximum(first, np.ceil(np.minimum(behind, end)))
    counted = np.maximum(0.0, end - least)
    with np.errstate(invalid="ignore"):
        found = counted * ((least + end - 1) / 2 - behind)
    return np.where(counted > 0, found, 0.0)


def _chunks(space: Space, candidates: Candidates, rows: Integers) -> tuple[Floats, Floats, Floats]:
    """For every row: seconds that no chunk takes longer than (inf where boundaries are fixed), seconds that some rank
    works on the most common layers alone, and the least share of its period that a layer's forward takes."""
    longest, common, share = (np.zeros(len(rows)) for _ in range(3))
    for where, chain in _by_chain(space, candidates, rows):
        stages = candidates.pipeline[rows[where]] * candidates.virtual_stages[rows[where]]
        kind, count = _most_common(chain)
        each = float(_periods_s(chain)[kind])
        common[where] = -(-count // candidates.pipeline[rows[where]]) * each
        share[where] = _least_forward_share(chain)
        longest[where] = np.inf if space.problem.stages else _longest_chunks_s(chain, stages) * _HAIR
    return longest, common, share


def _by_chain(space: Space, candidates: Candidates, rows: Integers) -> list[tuple[Integers, Chain]]:
    sizes = candidates.micro_batch_size[rows]
    keys = (2 * candidates.tensor[rows] + candidates.sequence[rows]) * (sizes.max(initial=0) + 1) + sizes
    _, first, back = np.unique(keys, return_index=True, return_inverse=True)
    place = back.reshape(-1)
    return [
        (np.nonzero(place == number)[0], space.chain_of(candidates.strategy(int(rows[row]))))
        for number, row in enumerate(first)
    ]


def _most_common(chain: Chain) -> tuple[int, int]:
    counts = np.bincount(chain.kinds)
    kind = int(np.argmax(counts))
    return kind, int(counts[kind])


def _least_forward_share(chain: Chain) -> float:
    """No run of layers has a forward that takes less than this share of its period."""
    periods, seconds = _periods_s(chain), chain.seconds
    timed = periods > 0
    forward = (seconds.forward_s + seconds.tensor_forward_s)[timed]
    return float((forward / periods[timed]).min(initial=1.0))


def _periods_s(chain: Chain) -> Floats:
    """Forward and backward of a layer of each kind under the first policy."""
    return chain.seconds.period_s + chain.seconds.extra_s[chain.policies[0]]


def _longest_chunks_s(chain: Chain, stages: Integers) -> Floats:
    """The longest chunk of a split into each of ``stages`` that is known without looking for the best."""
    numbers, place = np.unique(stages, return_inverse=True)
    period = chain.period
    kind, count = _most_common(chain)
    where = np.nonzero(chain.kinds == kind)[0]
    each = float(period[where[0] + 1] - period[where[0]])
    apart = where[-1] - where[0] + 1 > count  # other layers stand between
    before, after = float(period[where[0]]), float(period[-1] - period[where[-1] + 1])
    found = []
    for number in numbers.tolist():
        width = -(-chain.layers // number)
        longest = float(np.max(period[width:] - period[:-width]))
        if not apart and number > 1:
            longest = min(longest, -(-count // number) * each + max(before, after))
        found.append(min(longest, float(period[-1]) / number + chain.longest_s))
    return np.array(found)[place.reshape(-1)]


def _weight_gradients_s(space: Space, candidates: Candidates, rows: Integers) -> Floats:
    """Seconds of all layers' weight gradients a micro-batch."""
    found = np.zeros(len(rows))
    for where, chain in _by_chain(space, candidates, rows):
        strategy = candidates.strategy(int(rows[where[0]]))
        each = space.weight_gradients_s(strategy)
        found[where] = sum(each[kind] for kind in chain.kinds.tolist())
    return found
