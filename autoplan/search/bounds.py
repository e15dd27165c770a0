"""Lower bounds of every candidate at once: no split of a candidate takes less time, nor needs less memory.

Time. Some stage takes at least the average period, and at least the longest layer's; every stage's period counts once
in the length of the pipeline; some stage synchronises at least the average gradient:

    (M - 1) max(P / S, p_max) + P + Y(G / S)

with P the periods of all layers plus the sends between S stages and what sharded state exposes (transfers of a sum
never take longer than the sum of transfers: latency counts once a piece; and all that hides is no more than all that it
hides behind). Memory. Some GPU holds at least the average
of what all hold with the least activations kept, one micro-batch in flight; and some GPU holds each layer.

The simulated step has a bound of its own (:mod:`autoplan.search.simulated`), and so have rows under interleaved and
zero-bubble schedules (:mod:`autoplan.search.listed_bounds`), of which the simulated step is what the search minimises.

:func:`fits_greedily` is sharper, one candidate at a time: stages filled to the brim from the front reach furthest.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.cost_models import communication
from autoplan.plan import Strategy
from autoplan.search.degrees import Candidates
from autoplan.search.listed_bounds import Parts, even_split_bounds
from autoplan.search.simulated import simulated_bound_s
from autoplan.search.space import Space
from autoplan.search.tables import MARGIN, Tables

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """One entry a candidate: seconds of what the search minimises, bytes above the memory of a GPU (negative: free),
    seconds of a simulated step, and of the longest period of a row under 1F1B or GPipe."""

    step_s: Floats
    short_bytes: Floats
    simulated_s: Floats
    longest_s: Floats


# What a row's priced layers depend on.
_PRICED = ("tensor", "micro_batch_size", "sequence")


def lower_bounds(space: Space, candidates: Candidates) -> LowerBounds:
    """Bounds of all ``candidates``, priced once for each value that differs."""
    base = candidates.base or candidates
    short = _short_bytes(space, base)
    parts = _parts(space, base, short <= 0)
    exposed, tail, first_tail, even_tail = _data_axis(space, base, parts.backward_s, short <= 0)
    parts = dataclasses.replace(parts, exposed_s=exposed, first_tail_s=first_tail, even_tail_s=even_tail)
    rows, plain = np.nonzero(short <= 0)[0], np.zeros((3, len(base)))
    plain[:, rows] = _plain_bounds(base, parts, tail, rows)
    step, simulated, bottleneck = plain
    of = candidates.of
    found = LowerBounds(*(values[of] for values in (step, short, simulated, bottleneck)))
    even = np.nonzero(candidates.listed & (found.short_bytes <= 0))[0]
    if len(even):
        found.step_s[even] = found.simulated_s[even] = even_split_bounds(space, candidates, even, parts)
    return found


def _parts(space: Space, base: Candidates, fits: NDArray[np.bool_]) -> Parts:
    """What the layers of every row of ``base`` take, its data axis aside; 0 where no row of equal layers ``fits``."""
    rows = len(base)
    period, longest, backward, lesser_share = (np.zeros(rows) for _ in range(4))
    send = np.zeros(rows)
    for where, strategy in _alike(base, _PRICED):
        if not fits[where].any():
            continue
        chain = space.chain_of(strategy)
        period[where] = chain.period[-1]
        backward[where] = chain.backward[-1]
        longest[where] = chain.longest_s
        lesser_share[where] = chain.lesser_share
    far = base.data * base.tensor >= space.problem.cluster.gpus_per_node
    for where, strategy in _alike(base, (*_PRICED, "staged"), far):
        send[where] = _least_send_s(space, strategy)
    none = np.zeros(rows)
    return Parts(period, longest, backward, lesser_share, send, none, none, none)


def _plain_bounds(base: Candidates, parts: Parts, tail_s: Floats, rows: Integers) -> tuple[Floats, Floats, Floats]:
    """The step in closed form, the simulated step and the longest period of ``rows`` under 1F1B or GPipe."""
    stages, micro_batches, tail = base.pipeline[rows], base.micro_batches[rows], tail_s[rows]
    period, longest = (parts.period_s + parts.exposed_s)[rows], parts.longest_s[rows]
    sends = 2 * (stages - 1) * parts.send_s[rows]
    simulated = simulated_bound_s(
        schedule=base.schedule,
        stages=stages,
        micro_batches=micro_batches,
        period_s=period,
        longest_s=longest,
        sends_s=sends,
        # Sharded weights are gathered in forward and in backward, so that shares are other than the layers' own.
        lesser_share=np.where(parts.exposed_s[rows] > 0, 0.5, parts.lesser_share[rows]),
    )
    whole = period + sends
    bottleneck = np.maximum(whole / stages, longest)
    if base.schedule == "gpipe":  # its sends only lengthen the pipeline
        bottleneck = longest
    step = (micro_batches - 1) * bottleneck + whole + tail
    return step, simulated + np.where(stages > 1, parts.first_tail_s[rows], tail), bottleneck


def _alike(
    candidates: Candidates, columns: tuple[str, ...], *more: NDArray[Any]
) -> list[tuple[NDArray[np.int64], Strategy]]:
    """Positions of the candidates that share ``columns`` (and values of ``more``), with one of them."""
    if not len(candidates):
        return []
    keys = np.zeros(len(candidates), dtype=np.int64)
    for values in (*(getattr(candidates, name) for name in columns), *more):
        distinct, place = np.unique(values, return_inverse=True)
        keys = keys * len(distinct) + place.reshape(-1)
    _, first, back = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(back.reshape(-1), kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(back.reshape(-1)))[:-1])
    return [(part, candidates.strategy(int(index))) for part, index in zip(parts, first, strict=True)]


def _least_send_s(space: Space, strategy: Strategy) -> float:
    """Seconds of the cheapest send between two stages."""
    least = space.convex_chain(strategy).least_crossing
    if strategy.pipeline == 1 or math.isinf(least):
        return 0.0
    distance = strategy.data * strategy.tensor
    return communication.send_s(space.problem.cluster, least, distance)


def _data_axis(
    space: Space, candidates: Candidates, backward_s: Floats, fits: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats, Floats]:
    """For every candidate the seconds a micro-batch that its data axis exposes at least over all stages, the tail that
    some stage has at least, the least tail of a layer that may come first, and an even share of all tails; 0 where no
    candidate of the same degrees ``fits``."""
    exposed, tail, first_tail, even = (np.zeros(len(candidates)) for _ in range(4))
    for where, strategy in _alike(candidates, ("tensor", "sequence", "data", "zero_stage")):
        if not fits[where].any():
            continue
        elements, trainable = space.totals(strategy)
        tables = space.tables(strategy)
        stages = candidates.pipeline[where]
        every, once = tables.least_data_axis(float(elements), float(trainable), backward_s[where])
        exposed[where] = every
        average = (once + tables.optimizer_s(trainable)) / stages
        # The stage with the most parameters has at least an even share, and may hide what can be hidden.
        counts, place = np.unique(stages, return_inverse=True)
        kinds = {int(tables.chain.kinds[layer]) for layer in space.first_layers}
        costs = [tables.chain.costs[kind] for kind in sorted(kinds)]
        tails = _hidden_tails_s(
            tables,
            np.concatenate((elements / counts, [c.elements for c in costs])),
            np.concatenate((trainable / counts, [c.trainable for c in costs])),
        )
        tail[where], even[where] = np.maximum(average, tails[place.reshape(-1)]), average
        first_tail[where] = tails[len(counts) :].min()
    return exposed, tail, first_tail, even


def _hidden_tails_s(tables: Tables, elements: Floats, trainable: Floats) -> Floats:
    """The least tails of stages with so many parameters, however long their backward."""
    _, once = tables.least_data_axis(elements, trainable, np.full(len(elements), math.inf))
    seconds: Floats = once + tables.optimizer_s(trainable)
    return seconds


def _short_bytes(space: Space, candidates: Candidates) -> Floats:
    """Bytes above the memory of a GPU that every candidate needs at least; negative where some are free."""
    capacity = space.problem.usable_bytes * (1 - MARGIN)
    short = np.zeros(len(candidates))
    kept = {
        (strategy.tensor, strategy.sequence_parallel): _LeastKept.of(
            space, strategy, candidates.micro_batch_size[where]
        )
        for where, strategy in _alike(candidates, ("tensor", "sequence"))
    }
    for where, strategy in _alike(candidates, ("tensor", "sequence", "data", "zero_stage", "staged")):
        least = kept[strategy.tensor, strategy.sequence_parallel]
        place = np.searchsorted(least.sizes, candidates.micro_batch_size[where])
        share, alone = (needed[place] for needed in _least_bytes(space, strategy, least))
        fixed = space.states(strategy).fixed_bytes
        short[where] = fixed + np.maximum(share / candidates.pipeline[where], alone) - capacity
    return short


@dataclass(frozen=True, slots=True)
class _LeastKept:
    """What layers under one tensor degree hold at least, by micro-batch ``sizes`` [Z], ascending: ``saved_bytes`` [Z]
    of all layers, ``kept_bytes`` [Z, K] of one of each kind, and its parameters, all and those that train, [K]."""

    sizes: Integers
    saved_bytes: Floats
    kept_bytes: Floats
    elements: Floats
    trainable: Floats

    @classmethod
    def of(cls, space: Space, strategy: Strategy, sizes: Integers) -> _LeastKept:
        """Under the tensor degree of ``strategy``; of equal ``sizes`` one."""
        distinct = np.unique(sizes)
        chains = [space.chain(strategy.tensor, int(s), sequence=strategy.sequence_parallel) for s in distinct]
        saved = np.array([float(chain.least_saved[-1]) for chain in chains])
        return cls(distinct, saved, np.stack([chain.least_kept for chain in chains]), *chains[0].elements_of_kinds)


def least_bytes(space: Space, strategy: Strategy) -> tuple[float, float]:
    """Bytes that all stages of one rank hold at least, and that some stage holds for one layer; without what is there
    whatever the layers."""
    least = _LeastKept.of(space, strategy, np.array([strategy.micro_batch_size]))
    share, alone = _least_bytes(space, strategy, least)
    return float(share[0]), float(alone[0])


def _least_bytes(space: Space, strategy: Strategy, least: _LeastKept) -> tuple[Floats, Floats]:
    """The same for every micro-batch size of ``least``."""
    states, (elements, trainable) = space.states(strategy), space.totals(strategy)
    resident = states.per_element * elements + states.per_trainable * trainable
    share = resident + (1 + states.reserve) * np.maximum(least.saved_bytes, states.temporary_per_trainable * trainable)
    moment = np.maximum(
        least.kept_bytes + states.window_per_element * least.elements,
        states.temporary_per_trainable * least.trainable,
    )
    own = states.per_element * least.elements + states.per_trainable * least.trainable
    return share, (own + (1 + states.reserve) * moment).max(axis=1)


def fits_greedily(tables: Tables) -> bool:
    """Whether the layers fit when every stage keeps the least and takes all that it can: a necessary condition."""
    chain, states, strategy = tables.chain, tables.states, tables.strategy
    # A tied parameter is counted where it is first held: another stage may hold it too, and needs no less for it.
    elements, trainable = chain.elements.copy(), chain.trainable.copy()
    for group in chain.tied:
        for layer in group.layers[1:]:
            elements[layer + 1 :] -= group.elements
            trainable[layer + 1 :] -= group.elements if group.trainable else 0
    resident = states.per_element * elements + states.per_trainable * trainable
    capacity = tables.usable_bytes * (1 - MARGIN) - states.fixed_bytes
    at = 0
    for stage in range(strategy.pipeline):
        held = resident + (1 + states.reserve) * tables.in_flight(stage) * chain.least_saved
        reach = int(np.searchsorted(held, held[at] + capacity, side="right")) - 1
        at = max(at, reach)
        if at >= chain.layers:
            return True
    return False
