"""What the one split of an interleaved or zero-bubble candidate takes at least, by its boundaries: without simulating
it, and without knowing all that its GPUs hold.

Memory counts parameters and what a rank keeps of micro-batches ahead of its first backward. Policies under which those
alone don't fit are ruled out; of the others the one that recomputes least is taken.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan import schedules
from autoplan.plan import Strategy
from autoplan.search.chain import Chain
from autoplan.search.listed import even_cuts, sends_s
from autoplan.search.space import Space
from autoplan.search.tables import MARGIN
from autoplan.search.timing import StageTimes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EvenSplitBounds:
    """The bounds of candidates of ``space`` by their boundaries; what several of them share is found once."""

    space: Space
    _splits: dict[tuple[int, ...], _EvenSplit | None] = field(default_factory=dict, init=False)
    _fitting: dict[Strategy, tuple[_EvenSplit, Floats] | None] = field(default_factory=dict, init=False)

    def working_s(self, strategy: Strategy) -> float:
        """Seconds that the rank with the most to do works at least, its data axis and sends aside; inf where there is
        no such split or where it can't fit."""
        fitting = self._fits(strategy)
        if fitting is None:
            return math.inf
        split, again_s = fitting
        ranks = (split.period + again_s).reshape(-1, strategy.pipeline).sum(axis=0)
        return strategy.micro_batches * float(ranks.max())

    def step_s(self, strategy: Strategy) -> float:
        """Seconds that the simulated step takes at least; inf as above."""
        fitting = self._fits(strategy)
        if fitting is None:
            return math.inf
        split, again_s = fitting
        tables, (elements, trainable) = self.space.tables(strategy), split.parameters
        ahead_s, behind_s, synchronise_s = tables.data_axes(
            elements, trainable, np.diff(split.at), backward_s=split.backward
        )
        backward = split.period - split.forward + again_s
        tails = synchronise_s + tables.optimizer_s(trainable)
        weights: tuple[float, ...] = ()
        if strategy.schedule == "zero_bubble":
            each = np.array(self.space.weight_gradients_s(strategy))
            weights = tuple(split.sums(split.chain.prefix(each)).tolist())
        return StageTimes(
            schedule=strategy.schedule,
            micro_batches=strategy.micro_batches,
            forward_s=tuple((split.forward + ahead_s).tolist()),
            backward_s=tuple((backward + behind_s).tolist()),
            send_s=sends_s(tables, split.at.tolist()),
            tail_s=tuple(tails.tolist()),
            weight_s=weights,
            virtual_stages=strategy.virtual_stages,
        ).least_s

    def _fits(self, strategy: Strategy) -> tuple[_EvenSplit, Floats] | None:
        """The split, and seconds that each of its stages recomputes at least beyond the first policy; None where there
        is none, or where a rank fits under no policy."""
        if strategy not in self._fitting:
            split = self._split(strategy)
            again_s = None if split is None else self._least_recompute_s(split, strategy)
            self._fitting[strategy] = None if split is None or again_s is None else (split, again_s)
        return self._fitting[strategy]

    def _split(self, strategy: Strategy) -> _EvenSplit | None:
        key = (
            strategy.tensor,
            strategy.sequence_parallel,
            strategy.micro_batch_size,
            strategy.pipeline,
            strategy.virtual_stages,
        )
        if key not in self._splits:
            cuts = even_cuts(self.space, strategy)
            chain = self.space.chain_of(strategy)
            self._splits[key] = None if cuts is None else _EvenSplit(chain, np.array(cuts), strategy.pipeline)
        return self._splits[key]

    def _least_recompute_s(self, split: _EvenSplit, strategy: Strategy) -> Floats | None:
        states, (elements, trainable) = self.space.states(strategy), split.parameters_of_ranks
        capacity = self.space.problem.usable_bytes * (1 - MARGIN) - states.fixed_bytes
        room = (capacity - states.per_element * elements - states.per_trainable * trainable) / (1 + states.reserve)
        held = _held_at_first(strategy.schedule, strategy.pipeline, strategy.virtual_stages, strategy.micro_batches)
        moment = (held * split.kept).sum(axis=1) + split.windows(states.window_per_element)
        least: Floats = np.where((moment <= room)[:, None], split.more_s, math.inf).min(axis=0)
        return least.ravel() if np.isfinite(least).all() else None


@dataclass(frozen=True)
class _EvenSplit:
    """A chain cut ``at`` the starts of its stages and its end. What stages have is [v p], stage by stage: chunk by
    chunk, each over ``ranks`` p."""

    chain: Chain
    at: Integers
    ranks: int
    _windows: dict[float, Floats] = field(default_factory=dict, init=False)

    def sums(self, prefix: Floats) -> Floats:
        """What each stage has of what ``prefix`` sums."""
        found: Floats = np.diff(prefix[self.at])
        return found

    @cached_property
    def forward(self) -> Floats:
        """Seconds of a micro-batch's forward."""
        return self.sums(self.chain.forward)

    @cached_property
    def backward(self) -> Floats:
        """Seconds of the operators of its backward."""
        return self.sums(self.chain.backward)

    @cached_property
    def period(self) -> Floats:
        """Seconds of both under the first policy."""
        return self.sums(self.chain.period)

    @cached_property
    def parameters(self) -> tuple[Floats, Floats]:
        """Elements of each stage's parameters, and those that train."""
        return self.chain.own_parameters(self.at[:-1], self.at[1:])

    @cached_property
    def parameters_of_ranks(self) -> tuple[Floats, Floats]:
        """[p] the same of each rank."""
        first, end = (cuts.reshape(-1, self.ranks) for cuts in (self.at[:-1], self.at[1:]))
        return self.chain.own_parameters(first, end)

    @cached_property
    def kept(self) -> Floats:
        """[P, v, p] bytes that a micro-batch leaves for the backward under each policy."""
        return self._by_policy(self.chain.saved_sums)

    @cached_property
    def more_s(self) -> Floats:
        """[P, v, p] seconds that each policy recomputes beyond the first."""
        extra = self._by_policy(self.chain.extra_sums)
        return extra - extra[0]

    def _by_policy(self, sums: dict[str, Floats]) -> Floats:
        each = np.stack([self.sums(sums[policy]) for policy in self.chain.policies])
        return each.reshape(len(each), -1, self.ranks)

    def windows(self, each: float) -> Floats:
        """[P, p] the most that one layer of each rank needs while its backward runs, ``each`` byte an element of its
        parameters included."""
        if each not in self._windows:
            kept, policies = self.chain.kept, self.chain.policies
            always = kept.passing_bytes + each * kept.elements
            layers = np.stack([self.chain.per_layer(kept.window_bytes[policy] + always) for policy in policies])
            stages = np.maximum.reduceat(layers, self.at[:-1], axis=1)
            self._windows[each] = stages.reshape(len(layers), -1, self.ranks).max(axis=1)
        return self._windows[each]


@functools.lru_cache(maxsize=4096)
def _held_at_first(schedule: str, ranks: int, virtual: int, count: int) -> Floats:
    """[v, p] micro-batches of which each rank keeps the activations of each of its stages ahead of its first backward:
    whole groups of p, chunk by chunk, the next group's first chunk last."""
    if schedule != "interleaved":
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
    held[0] += np.clip(warm_up - ranks * virtual, 0, ranks)
    return held
