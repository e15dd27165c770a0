"""What the one split of an interleaved or zero-bubble candidate takes at least, by its boundaries: without simulating
it, and without knowing all that its GPUs hold.

Memory counts parameters and what a rank keeps of micro-batches ahead of its first backward. Policies under which those
alone don't fit are ruled out; of the others the one that recomputes least is taken.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autoplan import schedules
from autoplan.plan import Strategy
from autoplan.search.chain import Chain
from autoplan.search.listed import even_cuts, sends_s, stages_of
from autoplan.search.space import Space
from autoplan.search.tables import MARGIN
from autoplan.search.timing import StageTimes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def least_step_s(space: Space, strategy: Strategy) -> float:
    """Seconds that the simulated step takes at least; inf where there is no such split or where it can't fit."""
    cuts = even_cuts(space, strategy)
    if cuts is None:
        return math.inf
    tables, at = space.tables(strategy), np.array(cuts)
    chain, first, end = tables.chain, at[:-1], at[1:]
    elements, trainable = (
        np.diff(values[at]) - chain.tied_surplus(first, end, trainable_only=only)
        for values, only in ((chain.elements, False), (chain.trainable, True))
    )
    again_s = _least_recompute_s(space, strategy, at, elements, trainable)
    if again_s is None:
        return math.inf
    forward = np.diff(chain.forward[at])
    backward = np.diff(chain.period[at]) - forward + again_s
    ahead_s, behind_s, synchronise_s = tables.data_axes(
        elements, trainable, end - first, backward_s=np.diff(chain.backward[at])
    )
    tails = synchronise_s + tables.optimizer_s(trainable)
    weights: tuple[float, ...] = ()
    if strategy.schedule == "zero_bubble":
        weights = tuple(np.diff(chain.prefix(np.array(space.weight_gradients_s(strategy)))[at]).tolist())
    return StageTimes(
        schedule=strategy.schedule,
        micro_batches=strategy.micro_batches,
        forward_s=tuple((forward + ahead_s).tolist()),
        backward_s=tuple((backward + behind_s).tolist()),
        send_s=sends_s(tables, cuts),
        tail_s=tuple(tails.tolist()),
        weight_s=weights,
        virtual_stages=strategy.virtual_stages,
    ).least_s


def _least_recompute_s(
    space: Space, strategy: Strategy, at: Integers, elements: Floats, trainable: Floats
) -> Floats | None:
    """Seconds that each stage recomputes at least beyond the first policy; None where a rank fits under none."""
    chain, states, ranks = space.chain_of(strategy), space.states(strategy), strategy.pipeline
    held = _held_at_first(strategy)
    # A tied parameter on several of a rank's stages is one.
    tied = sum(group.elements for group in chain.tied) if strategy.virtual_stages > 1 else 0
    own = [np.maximum(0.0, _by_rank(values, ranks) - tied) for values in (elements, trainable)]
    capacity = space.problem.usable_bytes * (1 - MARGIN) - states.fixed_bytes
    room = (capacity - states.per_element * own[0] - states.per_trainable * own[1]) / (1 + states.reserve)
    least, first_s = np.full((strategy.virtual_stages, ranks), math.inf), _extra_s(chain, chain.policies[0], at)
    for policy in chain.policies:
        kept = np.diff(chain.saved_sums[policy][at]).reshape(-1, ranks)
        moment = (held * kept).sum(axis=0) + _window_bytes(chain, policy, states.window_per_element, at, ranks)
        more_s = (_extra_s(chain, policy, at) - first_s).reshape(-1, ranks)
        least = np.where(moment <= room, np.minimum(least, more_s), least)
    return least.ravel() if np.isfinite(least).all() else None


def _extra_s(chain: Chain, policy: str, at: Integers) -> Floats:
    found: Floats = np.diff(chain.extra_sums[policy][at])
    return found


def _window_bytes(chain: Chain, policy: str, each: float, at: Integers, ranks: int) -> Floats:
    """The most that one layer of each rank needs while its backward runs."""
    kept = chain.kept
    layers = chain.per_layer(kept.window_bytes[policy] + kept.passing_bytes + each * kept.elements)
    found: Floats = np.maximum.reduceat(layers, at[:-1]).reshape(-1, ranks).max(axis=0)
    return found


def _by_rank(values: Floats, ranks: int) -> Floats:
    found: Floats = values.reshape(-1, ranks).sum(axis=0)
    return found


def _held_at_first(strategy: Strategy) -> Floats:
    """[v, p] micro-batches of which each rank keeps the activations of each of its stages ahead of its first backward:
    whole groups of p, chunk by chunk, the next group's first chunk last."""
    ranks, virtual, count = strategy.pipeline, strategy.virtual_stages, strategy.micro_batches
    if strategy.schedule != "interleaved":
        return np.array([[min(count, ranks - rank) for rank in range(ranks)]], dtype=float)
    missing = -count % ranks
    warm_up = np.array(
        [
            schedules.chunks_in_flight(rank=rank, ranks=ranks, virtual_stages=virtual, micro_batches=count)
            for rank in range(ranks)
        ]
    )
    chunk = np.arange(virtual)[:, None]
    held = np.maximum(0, np.clip(warm_up - chunk * ranks, 0, ranks) - missing).astype(float)
    held[0] += np.clip(warm_up - stages_of(strategy), 0, ranks)
    return held
