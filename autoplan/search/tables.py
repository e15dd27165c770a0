"""Arcs of one strategy: for every stage and span of layers its period, cost and tail, with the least recompute that
fits.

For a span held by a stage with f micro-batches in flight (:mod:`autoplan.cost_models.memory` in terms of sums):

    states + fixed + (1 + r) max(temporary, f saved + window + passing + gathered) <= capacity
    period = forward + backward + recompute + what sharded state exposes every micro-batch
    tail   = what gradient synchronisation exposes beside the last backward + optimizer step

1F1B alternates with its neighbours, so a send holds up every micro-batch: a stage's period counts the send into it and
the one out of it (w micro-batches in flight make a round trip of w periods, so that over uniform stages this is the
simulator's steady state). Under GPipe sends only lengthen the pipeline.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan import schedules
from autoplan.cost_models import communication, compute
from autoplan.cost_models.arrays import Number, chosen
from autoplan.cost_models.data_parallel import DataParallelTime, data_parallel_time, exposed_times, least_exposed_times
from autoplan.cost_models.recipes import Recipe
from autoplan.search.pricing import StateCosts
from autoplan.search.savings import Needs
from autoplan.search.sends import StageSends
from autoplan.search.timing import StageTimes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Kept free of what the device has, against the rounding of sums.
MARGIN = 1e-6


@dataclass(frozen=True, kw_only=True)
class Tables(StageSends):
    """``period_limit_s``: spans with a longer period (before recompute) are left out. ``only``: the spans of one
    split, and no others."""

    recipe: Recipe
    states: StateCosts
    usable_bytes: float
    period_limit_s: float = math.inf
    only: tuple[tuple[int, int], ...] | None = None

    @cached_property
    def _flights(self) -> Integers:
        """[S] micro-batches that each stage holds."""
        return np.array([self.in_flight(stage) for stage in range(self.strategy.pipeline)])

    @cached_property
    def _alike(self) -> tuple[Integers, Integers, Integers]:
        """Spans that cost the same are priced once: (first, end) of one of each, and for every span its position."""
        first, end = self.spans
        representatives, member = self.chain.alike(first, end)
        return first[representatives], end[representatives], member

    @property
    def rows(self) -> tuple[Integers, Integers]:
        """(first, end) of the spans that are priced: one of each that are alike."""
        return self._alike[:2]

    @property
    def row_of_span(self) -> Integers:
        """Which row each span is priced as."""
        return self._alike[2]

    def of_split(self, cuts: tuple[int, ...]) -> Tables:
        """The same strategy with no spans but those of one split, stage by stage."""
        return dataclasses.replace(self, only=tuple(itertools.pairwise(cuts)))

    @cached_property
    def _split_extra(self) -> Floats:
        """The least recompute seconds of each stage of the only split."""
        flights = np.array([self.in_flight(stage) for stage in range(self.strategy.pipeline)])
        return self._least_extra(self._alike[2], flights)

    def times(self) -> StageTimes:
        """What each stage of the only split takes, for the simulator."""
        forward, backward, tails = [], [], []
        for first, end, row, extra in zip(*self.spans, self._alike[2], self._split_extra, strict=True):
            elements, trainable = float(self.elements[row]), float(self.trainable[row])
            hiding = float(self.chain.backward[end] - self.chain.backward[first])
            data = self.data_axis(elements, trainable, int(end - first), backward_s=hiding)
            ahead = float(self.chain.forward[end] - self.chain.forward[first])
            forward.append(ahead + data.forward_s)
            period = float(self.chain.period[end] - self.chain.period[first] + extra)
            backward.append(period - ahead + data.backward_s)
            tails.append(data.step_s + self.tied_apart_s(int(first), int(end)) + self.optimizer_s(trainable))
        return StageTimes(
            schedule=self.strategy.schedule,
            micro_batches=self.strategy.micro_batches,
            forward_s=tuple(forward),
            backward_s=tuple(backward),
            send_s=self.receives_s(),
            sent_s=self.sent_s(),
            tail_s=tuple(tails),
        )

    def policies(self, stage: int, first: int, end: int) -> tuple[str, ...]:
        """The recompute policy of each layer of a span on ``stage``: the choice behind its least period."""
        one = dataclasses.replace(self, only=((first, end),))
        least_s = float(one.extra(self.in_flight(stage))[0])
        return one._policies(stage, first, end, 0, least_s)

    def split_policies(self) -> tuple[tuple[str, ...], ...]:
        """The recompute policy of each layer of each stage of the only split: the choices behind the least periods."""
        return tuple(
            self._policies(stage, *span)
            for stage, span in enumerate(zip(*self.spans, self._alike[2], self._split_extra, strict=True))
        )

    def _policies(self, stage: int, first: int, end: int, row: int, least_s: float) -> tuple[str, ...]:
        if least_s == 0.0 or not math.isfinite(least_s):
            return (self.chain.policies[0],) * int(end - first)
        span = dataclasses.replace(self, only=((int(first), int(end)),))
        room = np.array([self._moment_bytes[0][row]])
        return self.chain.savings.policies(
            Needs(*span.spans, held=np.array([self.in_flight(stage)]), saved_bytes=span._saved, room_bytes=room)
        )

    def tied_apart_s(self, first: int, end: int) -> float:
        """Seconds to sum the gradients of tied parameters of which a span holds some and another stage the rest."""
        if self.strategy.pipeline == 1:
            return 0.0
        held = [(group, sum(first <= layer < end for layer in group.layers)) for group in self.chain.tied]
        return sum(self.tied_s(g.elements) for g, count in held if g.trainable and 0 < count < len(g.layers))

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations ``stage`` holds."""
        return schedules.in_flight(
            self.strategy.schedule,
            stage=stage,
            stages=self.strategy.pipeline,
            micro_batches=self.strategy.micro_batches,
        )

    @cached_property
    def spans(self) -> tuple[Integers, Integers]:
        """(first, end) of every span that may be a stage, by end and then first."""
        last, stages = self.chain.layers, self.strategy.pipeline
        if self.only is not None:
            first, end = np.array(self.only, dtype=np.int64).reshape(-1, 2).T
            return first, end
        if stages == 1:
            return np.array([0]), np.array([last])
        first, end = self.chain.spans_within(self.period_limit_s)
        # Other stages need a layer each; with two stages a span touches one end of the model.
        sizes = self.chain.sizes
        kept = sizes[end] - sizes[first] <= sizes[-1] - stages + 1
        if stages == 2:
            kept &= (first == 0) | (end == last)
        return first[kept], end[kept]

    @cached_property
    def base_period(self) -> Floats:
        """Seconds of a micro-batch without recompute and sends."""
        first, end = self.rows
        forward_s, backward_s, _ = self._exposed
        return self.chain.period[end] - self.chain.period[first] + (forward_s + backward_s)

    @cached_property
    def tail(self) -> Floats:
        """Seconds after the last backward: synchronisation of gradients, the optimizer, tied copies."""
        first, end = self.rows
        synchronise = self._exposed[2]
        step = self.optimizer_s(self.trainable)
        for group, apart in self.chain.shares_tied(first, end) if self.strategy.pipeline > 1 else ():
            synchronise = synchronise + np.where(apart, self.tied_s(group.elements), 0.0)
        return synchronise + step

    @cached_property
    def _exposed(self) -> tuple[Floats, Floats, Floats]:
        """[R] seconds of the data axis that show in every forward, in every backward, and once a step."""
        first, end = self.rows
        backward = self.chain.backward[end] - self.chain.backward[first]
        layers = self.chain.sizes[end] - self.chain.sizes[first]
        return self.data_axes(self.elements, self.trainable, layers, backward_s=backward)

    @property
    def elements(self) -> Floats:
        return self._own[0]

    @property
    def trainable(self) -> Floats:
        return self._own[1]

    @cached_property
    def _own(self) -> tuple[Floats, Floats]:
        """[R] elements of parameters of every row, and those that train."""
        return self.chain.own_parameters(*self.rows)

    @cached_property
    def resident(self) -> Floats:
        """States and fixed bytes of every span."""
        states = self.states
        return states.per_element * self.elements + states.per_trainable * self.trainable + states.fixed_bytes

    @cached_property
    def _moment_bytes(self) -> tuple[Floats, Floats]:
        """Bytes left for activations of all micro-batches in flight and the recompute window; and whether the optimizer
        step fits (as 0 or inf)."""
        first, end = self.rows
        capacity = self.usable_bytes * (1 - MARGIN)
        left = (capacity - self.resident) / (1 + self.states.reserve)
        step = np.where(self.states.temporary_per_trainable * self.trainable <= left, 0.0, math.inf)
        window = self.states.window_per_element * self.chain.largest[first, end]
        return left - self.chain.passing[first, end] - window, step

    def extra(self, in_flight: int) -> Floats:
        """For every row the least recompute seconds that fit; inf where nothing does."""
        rows = np.arange(len(self.rows[0]))
        return self._least_extra(rows, np.full(len(rows), in_flight))

    @cached_property
    def _saved(self) -> Floats:
        """[R] bytes that a micro-batch leaves for the backward under the first policy."""
        first, end = self.rows
        return self.chain.saved[end] - self.chain.saved[first] + self.chain.held(first, end)

    @cached_property
    def _opened(self) -> Floats:
        """[R] the window of a forced policy."""
        first, end = self.rows
        return self.chain.first_window[first, end]

    @cached_property
    def _optimistic(self) -> Floats:
        """[S, R] no more recompute seconds than fit: layers may recompute in part."""
        stage, row = np.indices((self.strategy.pipeline, len(self.rows[0]))).reshape(2, -1)
        return self.optimistic(stage, row).reshape(self.strategy.pipeline, -1)

    @property
    def least_whole_s(self) -> float:
        """No step of the whole model as one stage takes less; inf where it does not fit."""
        period = float(self.base_period[0] + self._optimistic[0, 0])
        return self.strategy.micro_batches * period + float(self.tail[0])

    def optimistic(self, stage: Integers, rows: Integers) -> Floats:
        """No more recompute seconds than fit for rows on stages: layers may recompute in part."""
        return self._recompute(rows, self._flights[stage], self.chain.savings.least_in_part_s)

    def exact(self, stage: Integers, rows: Integers) -> Floats:
        """The least recompute seconds that fit for rows on stages; inf where nothing does."""
        return self._least_extra(rows, self._flights[stage])

    def _least_extra(self, rows: Integers, in_flight: Integers) -> Floats:
        """The least recompute seconds of ``rows`` with as many micro-batches in flight."""
        return self._recompute(rows, in_flight, self.chain.savings.least_extra_s)

    def _recompute(self, rows: Integers, in_flight: Integers, least_s: Callable[[Needs], Floats]) -> Floats:
        """Nothing where all fits, ``least_s`` where the step does."""
        room, step = self._moment_bytes
        fits = in_flight * self._saved[rows] + self._opened[rows] <= room[rows]
        extra = np.where(fits, step[rows], math.inf)
        short = np.nonzero(~fits & np.isfinite(step[rows]))[0]
        if len(short):
            some = rows[short]
            first, end = self.rows[0][some], self.rows[1][some]
            extra[short] = least_s(Needs(first, end, in_flight[short], self._saved[some], room[some]))
        return extra

    def _dense(self, where: tuple[Integers, Integers], values: Floats) -> Floats:
        answer = np.full((self.chain.layers + 1, self.chain.layers + 1), math.inf)
        answer[where] = values
        return answer

    def least_bytes(self, stage: int) -> Floats:
        """[L + 1, L + 1] bytes that a span needs on ``stage`` where every layer saves the most memory it can."""
        first, end = self.rows
        kept = self.chain.least_saved[end] - self.chain.least_saved[first] + self.chain.held(first, end)
        saved = kept * self.in_flight(stage)
        opened = self.chain.least_window[first, end] + self.chain.passing[first, end]
        opened = opened + self.states.window_per_element * self.chain.largest[first, end]
        moment = np.maximum(saved + opened, self.states.temporary_per_trainable * self.trainable)
        needed = self.resident + (1 + self.states.reserve) * moment
        return self._dense(self.spans, needed[self._alike[2]])

    def optimizer_s(self, trainable: Number) -> Number:
        """Seconds of the optimizer step of a stage, or of many."""
        shards = self.strategy.data if self.strategy.zero_stage else 1
        seconds = compute.optimizer_step_s(
            trainable / shards, self.cluster.device, bytes_per_element=self.recipe.step_bytes
        )
        return chosen(trainable > 0, seconds, 0.0)

    def tied_s(self, elements: int) -> float:
        """Seconds to sum a tied parameter's gradients over the two stages that hold it: first and last in nearly
        every model, so that is the distance."""
        strategy = self.strategy
        distance = strategy.data * strategy.tensor * (strategy.pipeline - 1)
        apart = communication.Group(size=2, stride=distance, ranks=strategy.gpus)
        return communication.all_reduce_s(self.cluster, apart, elements * self.recipe.gradients)

    def data_axis(self, elements: float, trainable: float, layers: int, *, backward_s: float) -> DataParallelTime:
        """The data axis of one stage whose operators' backward takes ``backward_s`` a micro-batch: the runtime sums
        gradients beside the backward that makes them, and gathers with nothing beside. What a layer recomputes, and
        the collectives that a tensor rank waits for, could hide some too, and are taken to hide none; a send that is in
        flight on the same links leaves less room."""
        return data_parallel_time(
            self.cluster,
            strategy=self.strategy,
            weight_bytes=elements * self.recipe.weights,
            gradient_bytes=trainable * self.recipe.gradients,
            layers=layers,
            backward_s=backward_s,
            backward_held=self.sent,
            prefetch=False,
        )

    def data_axes(
        self, elements: Floats, trainable: Floats, layers: Integers, *, backward_s: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """The same of many stages: seconds that show in every forward, in every backward, and once a step."""
        return exposed_times(
            self.cluster,
            strategy=self.strategy,
            weight_bytes=elements * self.recipe.weights,
            gradient_bytes=trainable * self.recipe.gradients,
            layers=layers,
            backward_s=backward_s,
            backward_held=self.sent,
        )

    def least_data_axis(
        self, elements: float | Floats, trainable: float | Floats, backward_s: Floats
    ) -> tuple[Floats, Floats]:
        """What the data axis exposes at least, every micro-batch and once, where these are split into stages."""
        return least_exposed_times(
            self.cluster,
            strategy=self.strategy,
            weight_bytes=elements * self.recipe.weights,
            gradient_bytes=trainable * self.recipe.gradients,
            backward_s=backward_s,
        )

    def held_bytes(self, first: int, end: int) -> float:
        """Bytes a micro-batch that one span keeps of what it receives, beyond what its layers count."""
        return float(self.chain.held(np.array([first]), np.array([end]))[0])

    def receives_s(self) -> tuple[float, ...]:
        """Of the only split: seconds to receive what each stage but the first reads from earlier ones."""
        first, end = self.spans
        return tuple(float(self._receive_s(s, first[s : s + 1], end[s : s + 1])[0]) for s in range(1, len(first)))

    def sent_s(self) -> tuple[float, ...]:
        """Of the only split: seconds to send what each stage but the last makes for later ones, each value once; empty
        where that is what the next stage receives."""
        first, end = self.spans
        if self.chain.crossing is None:
            return ()
        return tuple(float(self._sent_s(s, first[s : s + 1], end[s : s + 1])[0]) for s in range(len(first) - 1))
