"""Interleaved and zero-bubble strategies: their one split, priced exactly.

A rank of an interleaved pipeline holds several stages, so that what the stage solver minimises, one longest period, is
not what such a step takes. A strategy under these schedules therefore has *one* split, the most even one: of all cuts
into S = p x v stages those whose longest stage is shortest, and of these the ones whose stages differ least (exact
dynamic programs over prefix sums). Recompute is one policy a rank: the cheapest that fits. Other cuts are not tried;
the search's proof is over these splits, and a plan says so.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan import schedules
from autoplan.cost_models import communication
from autoplan.cost_models.memory import layer_saved_bytes, stage_memory
from autoplan.cost_models.weight_gradients import put_aside_bytes
from autoplan.layers.types import LayerKind
from autoplan.plan import Strategy
from autoplan.search.space import Space
from autoplan.search.tables import MARGIN, Tables
from autoplan.search.timing import StageTimes

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What the GPUs of one pipeline rank hold: the policy of all their layers, and bytes by term at the peak."""

    policy: str
    terms: dict[str, float]

    @property
    def peak_bytes(self) -> float:
        return sum(self.terms.values())


def is_listed(strategy: Strategy) -> bool:
    """Whether the strategy's stages are split here and not by the stage solver."""
    return strategy.schedule in schedules.EVENLY_SPLIT and strategy.pipeline > 1


def stages_of(strategy: Strategy) -> int:
    """The model's stages."""
    return strategy.pipeline * strategy.virtual_stages


# ------------------------------------------------------------------------------------------------------------- the cuts


def even_cuts(space: Space, strategy: Strategy) -> tuple[int, ...] | None:
    """The strategy's cuts: first layer of each stage and, last, the number of layers. None for too few layers."""
    if space.problem.stages:
        return space.problem.stages if len(space.problem.stages) == stages_of(strategy) + 1 else None
    period = space.chain_of(strategy).period
    return _most_even(period.tobytes(), stages_of(strategy))


@functools.lru_cache(maxsize=4096)
def _most_even(period: bytes, stages: int) -> tuple[int, ...] | None:
    prefix = np.frombuffer(period)
    layers = len(prefix) - 1
    if layers < stages:
        return None
    longest = _shortest_longest(prefix, stages) or 1.0
    # No span that is longer, but for the rounding of sums, ends a stage: starts are looked for in a window.
    window = int(np.max(np.arange(layers + 1) - np.searchsorted(prefix, prefix - longest * (1 + 1e-9))))
    start = np.arange(layers + 1)[:, None] - np.arange(1, window + 1)[None, :]
    span = prefix[:, None] - prefix[np.maximum(start, 0)]
    squares = np.where((start >= 0) & (span <= longest * (1 + 1e-9)), (span / longest) ** 2, math.inf)
    value = np.full(layers + 1, math.inf)
    value[0] = 0.0
    choices = []
    for _ in range(stages):
        through = value[np.maximum(start, 0)] + squares
        best = np.argmin(through, axis=1)
        value = np.take_along_axis(through, best[:, None], axis=1)[:, 0]
        choices.append(best + 1)
    cuts = [layers]
    for back in reversed(choices):
        cuts.append(cuts[-1] - int(back[cuts[-1]]))
    return tuple(reversed(cuts))


def _shortest_longest(prefix: Floats, stages: int) -> float:
    """The least longest span of a split into at most ``stages``. Fewer spans do, because splitting one makes none
    longer. A length at which spans filled from the front don't reach the end rules out all up to the least by which one
    of them grows; one at which they do is no less than the longest of them."""
    last = len(prefix) - 1
    low, high = float(np.diff(prefix).max()), float(prefix[-1])
    tried, halved = max(low, high / stages), True
    while True:
        ends = np.searchsorted(prefix, prefix + tried * (1 + 1e-12), side="right") - 1
        jumps, cuts = ends.tolist(), [0]
        while cuts[-1] < last and len(cuts) <= stages:
            cuts.append(jumps[cuts[-1]])
        first, end = np.array(cuts[:-1]), np.array(cuts[1:])
        if cuts[-1] == last:
            high = min(high, float((prefix[end] - prefix[first]).max()))
        else:
            low = max(low, float((prefix[end + 1] - prefix[first]).min()))
        if low >= high * (1 - 1e-12):
            return high
        halved = not halved
        tried = (low + high) / 2 if halved else low


# --------------------------------------------------------------------------------------------------------------- memory


def rank_memories(space: Space, strategy: Strategy, cuts: Sequence[int]) -> tuple[RankMemory, ...] | None:
    """What each rank holds, each with the cheapest policy that fits; None where a rank fits under none."""
    found = []
    for rank in range(strategy.pipeline):
        memory = _rank_memory(space, strategy, cuts, rank)
        if memory is None:
            return None
        found.append(memory)
    return tuple(found)


def _rank_memory(space: Space, strategy: Strategy, cuts: Sequence[int], rank: int) -> RankMemory | None:
    capacity = space.problem.usable_bytes * (1 - MARGIN)
    for policy in space.policies:
        terms = _rank_terms(space, strategy, cuts, rank, policy)
        if sum(terms.values()) <= capacity:
            return RankMemory(policy=policy, terms=terms)
    return None


def least_rank_terms(space: Space, strategy: Strategy, cuts: Sequence[int], rank: int) -> dict[str, float]:
    """Bytes by term that a rank needs under the policy that needs least."""
    return min((_rank_terms(space, strategy, cuts, rank, policy) for policy in space.policies), key=total)


def total(terms: Mapping[str, float]) -> float:
    """The sum of memory terms."""
    return sum(terms.values())


def _rank_terms(space: Space, strategy: Strategy, cuts: Sequence[int], rank: int, policy: str) -> dict[str, float]:
    """Bytes by term of a rank whose layers follow ``policy``, at the fullest of its moments."""
    model, layers = space.kinds_of(strategy), space.problem.layers.layers
    spans = [
        (cuts[stage], cuts[stage + 1])
        for stage in schedules.stages_of_rank(rank, stages=stages_of(strategy), virtual_stages=strategy.virtual_stages)
    ]
    chunks = [[model[layer.kind] for layer in layers[first:end]] for first, end in spans]
    samples = strategy.micro_batch_size
    tables = space.tables(strategy)
    different = {id(kind): kind for chunk in chunks for kind in chunk}
    saved_of = {
        key: layer_saved_bytes(kind, policy=kind.policy(policy), samples=samples) for key, kind in different.items()
    }
    aside_of = {key: put_aside_bytes(kind, samples=samples) for key, kind in different.items()}
    saved = [
        sum(saved_of[id(kind)] for kind in chunk) + tables.held_bytes(*span)
        for chunk, span in zip(chunks, spans, strict=True)
    ]
    aside = [sum(aside_of[id(kind)] for kind in chunk) for chunk in chunks]
    moment = max(
        schedules.held(
            strategy.schedule,
            rank=rank,
            stages=stages_of(strategy),
            micro_batches=strategy.micro_batches,
            virtual_stages=strategy.virtual_stages,
        ),
        key=lambda held: _weighed(held.activations, saved) + _weighed(held.weight_gradients, aside),
    )
    received = [tables.held_bytes(*span) for span in spans]
    kinds = [kind for chunk in chunks for kind in chunk]
    return stage_memory(
        kinds,
        strategy=strategy,
        stage=rank,
        recipe=tables.recipe,
        device=space.problem.cluster.device,
        recompute=[kind.policy(policy) for kind in kinds],
        in_flight=[count for count, chunk in zip(moment.activations, chunks, strict=True) for _ in chunk],
        put_aside_bytes=_weighed(moment.weight_gradients, aside) + _weighed(moment.activations, received),
    )


def _weighed(counts: Sequence[int], amounts: Sequence[float]) -> float:
    return sum(count * amount for count, amount in zip(counts, amounts, strict=True))


# ----------------------------------------------------------------------------------------------------------------- time


def sends_s(tables: Tables, cuts: Sequence[int]) -> tuple[float, ...]:
    """Seconds of a micro-batch over each boundary of stages; the last rank sends to the first for the next chunk."""
    strategy, chain = tables.strategy, tables.chain
    width, ranks = strategy.data * strategy.tensor, strategy.pipeline
    seconds: dict[tuple[int, float], float] = {}  # the chunks of a rank mostly send alike
    found = []
    for boundary, (first, end) in enumerate(itertools.pairwise(cuts[1:])):
        amount = float(chain.cut_bytes[first] if chain.crossing is None else chain.crossing.received[first, end])
        key = boundary % ranks, amount
        if key not in seconds:
            if key[0] < ranks - 1:
                seconds[key] = communication.boundary_send_s(tables.cluster, amount, stage=key[0], distance=width)
            else:
                seconds[key] = communication.send_s(tables.cluster, amount, (ranks - 1) * width)
        found.append(seconds[key])
    return tuple(found)


def weight_s(space: Space, strategy: Strategy, kinds: Sequence[LayerKind]) -> float:
    """Seconds of a stage's backward that weights' gradients take; 0 where the schedule does not split it."""
    if strategy.schedule != "zero_bubble":
        return 0.0
    seconds = dict(zip(map(id, space.kinds_of(strategy)), space.weight_gradients_s(strategy), strict=True))
    return sum(seconds[id(kind)] for kind in kinds)


def bubble_fraction(times: StageTimes, step_s: float) -> float:
    """The share of ranks x step that no action fills."""
    busy = times.micro_batches * (sum(times.forward_s) + sum(times.backward_s)) + sum(times.tail_s)
    return max(0.0, 1 - busy / (times.ranks * step_s)) if step_s else 0.0
