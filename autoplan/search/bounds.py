"""Lower bounds of every candidate at once: no split of a candidate takes less time, nor needs less memory.

Time. Some stage takes at least the average period, and at least the longest layer's; every stage's period counts once
in the length of the pipeline; some stage synchronises at least the average gradient:

    (M - 1) max(P / S, p_max) + P + Y(G / S)

with P the periods of all layers plus the sends between S stages and what sharded state exposes (transfers of a sum
never take longer than the sum of transfers: latency counts once a piece; and all that hides is no more than all that it
hides behind). Memory. Some GPU holds at least the average
of what all hold with the least activations kept, one micro-batch in flight; and some GPU holds each layer.

The simulated step has a bound of its own (:mod:`autoplan.search.simulated`).

:func:`fits_greedily` is sharper, one candidate at a time: stages filled to the brim from the front reach furthest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.cost_models import communication
from autoplan.cost_models.piecewise import at_values
from autoplan.cost_models.weight_gradients import weight_gradient_s
from autoplan.plan import Strategy
from autoplan.schedules import SCHEDULES
from autoplan.search.chain import Chain
from autoplan.search.degrees import Candidates
from autoplan.search.simulated import simulated_bound_s
from autoplan.search.space import Space
from autoplan.search.tables import MARGIN, Tables

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """One entry a candidate: seconds of a step in closed form, bytes above the memory of a GPU (negative: free),
    seconds of a simulated step, of the longest period, and of the busiest rank's work, whatever the schedule."""

    step_s: Floats
    short_bytes: Floats
    simulated_s: Floats
    longest_s: Floats
    works_s: Floats


def lower_bounds(space: Space, candidates: Candidates) -> LowerBounds:
    """Bounds of all ``candidates``, priced once for each value that differs."""
    rows = len(candidates)
    period, longest, backward = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    sends, lesser_share = np.zeros(rows), np.zeros(rows)
    for where, strategy in _alike(candidates, ("tensor", "micro_batch_size")):
        chain = space.chain(strategy.tensor, strategy.micro_batch_size)
        period[where] = chain.period[-1]
        backward[where] = chain.backward[-1]
        longest[where] = chain.longest_s
        lesser_share[where] = chain.lesser_share
    far = candidates.data * candidates.tensor >= space.problem.cluster.gpus_per_node
    for where, strategy in _alike(candidates, ("tensor", "micro_batch_size", "staged"), far):
        sends[where] = 2 * (candidates.pipeline[where] - 1) * _least_send_s(space, strategy)
    short = _short_bytes(space, candidates)
    exposed, tail, first_tail, even_tail = _data_axis(space, candidates, backward, short <= 0)
    simulated = simulated_bound_s(
        schedule=candidates.schedule,
        stages=candidates.pipeline,
        micro_batches=candidates.micro_batches,
        period_s=period + exposed,
        longest_s=longest,
        sends_s=sends,
        # Sharded weights are gathered in forward and in backward, so that shares are other than the layers' own.
        lesser_share=np.where(exposed > 0, 0.5, lesser_share),
    )
    works = candidates.micro_batches.astype(float) * np.maximum((period + exposed) / candidates.pipeline, longest)
    whole = period + sends + exposed
    bottleneck = np.maximum(whole / candidates.pipeline, longest)
    if candidates.schedule == "gpipe":  # its sends only lengthen the pipeline
        bottleneck = longest
    step = (candidates.micro_batches - 1) * bottleneck + whole + tail
    simulated += np.where(candidates.pipeline > 1, first_tail, tail)
    if np.any(candidates.other >= 0):
        weights = _weight_gradients_s(space, candidates)
        for name in ("interleaved", "zero_bubble"):
            runs = candidates.runs(name)
            step[runs], simulated[runs] = _listed_bounds(
                candidates, runs, period + exposed, longest, sends, even_tail, weights
            )
    return LowerBounds(step, short, simulated, bottleneck, works)


def _listed_bounds(
    candidates: Candidates,
    where: NDArray[np.bool_],
    period_s: Floats,
    longest_s: Floats,
    sends_s: Floats,
    tail_s: Floats,
    weights_s: Floats,
) -> tuple[Floats, Floats]:
    """Interleaved: some rank works at least an even share, M (P / p); zero bubble: at least an even share of what its
    closed form charges for V = P - W and for the weight gradients W. A micro-batch's whole way is a bound too."""
    micro_batches, ranks = candidates.micro_batches[where], candidates.pipeline[where]
    period, weights, sends = period_s[where], weights_s[where], sends_s[where]
    works = micro_batches * np.maximum(period / ranks, longest_s[where])
    way = period - weights
    simulated = np.maximum(works, way + sends)
    kept = np.maximum(1, micro_batches - ranks + 1)
    split = way + sends + ((micro_batches - 1) * (way + sends) + kept * weights) / ranks
    step = np.where(candidates.other[where] == SCHEDULES.index("interleaved"), works + sends, split)
    return step + tail_s[where], simulated


def _weight_gradients_s(space: Space, candidates: Candidates) -> Floats:
    """Seconds of all layers' weight gradients a micro-batch."""
    found = np.zeros(len(candidates))
    for where, strategy in _alike(candidates, ("tensor", "micro_batch_size")):
        kinds = space.kinds(strategy.tensor)
        each = [
            weight_gradient_s(kind, space.problem.cluster.device, micro_batch=strategy.micro_batch_size)
            for kind in kinds
        ]
        found[where] = sum(each[layer.kind] for layer in space.problem.layers.layers)
    return found


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
    least = space.convex_chain(strategy.tensor, strategy.micro_batch_size).least_crossing
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
    for where, strategy in _alike(candidates, ("tensor", "data", "zero_stage")):
        if not fits[where].any():
            continue
        elements, trainable = space.totals(strategy.tensor)
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
    return once + at_values(tables.optimizer_s, trainable)


def _short_bytes(space: Space, candidates: Candidates) -> Floats:
    """Bytes above the memory of a GPU that every candidate needs at least; negative where some are free."""
    capacity = space.problem.usable_bytes * (1 - MARGIN)
    short = np.zeros(len(candidates))
    for where, strategy in _alike(candidates, ("tensor", "data", "zero_stage", "staged")):
        sizes, place = np.unique(candidates.micro_batch_size[where], return_inverse=True)
        chains = [space.chain(strategy.tensor, int(size)) for size in sizes]
        share, alone = (needed[place.reshape(-1)] for needed in _least_bytes(space, strategy, chains))
        fixed = space.states(strategy).fixed_bytes
        short[where] = fixed + np.maximum(share / candidates.pipeline[where], alone) - capacity
    return short


def least_bytes(space: Space, strategy: Strategy) -> tuple[float, float]:
    """Bytes that all stages of one rank hold at least, and that some stage holds for one layer; without what is there
    whatever the layers."""
    chain = space.chain(strategy.tensor, strategy.micro_batch_size)
    share, alone = _least_bytes(space, strategy, [chain])
    return float(share[0]), float(alone[0])


def _least_bytes(space: Space, strategy: Strategy, chains: Sequence[Chain]) -> tuple[Floats, Floats]:
    """The same for each of some micro-batch sizes, given by their chains."""
    states, (elements, trainable) = space.states(strategy), space.totals(strategy.tensor)
    resident = states.per_element * elements + states.per_trainable * trainable
    saved = np.array([float(chain.least_saved[-1]) for chain in chains])
    share = resident + (1 + states.reserve) * np.maximum(saved, states.temporary_per_trainable * trainable)
    kept = np.stack([chain.least_kept for chain in chains])
    own_elements, own_trainable = chains[0].elements_of_kinds
    moment = np.maximum(kept + states.window_per_element * own_elements, states.temporary_per_trainable * own_trainable)
    own = states.per_element * own_elements + states.per_trainable * own_trainable
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
