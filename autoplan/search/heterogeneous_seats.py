"""Where stages may stand: seats on groups of GPUs, the moves between them, and what a move's link takes.

Stages run over the groups one after the other, each group's on consecutive GPUs. A *seat* says where one stage stands:
on which group, as which stage of it, after which group, with which groups behind it. A *move* is one stage on its seat
with the seat of the next: it knows both links that the stage uses, so that its times are known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.cost_models import communication
from autoplan.plan import Strategy
from autoplan.search.chain import Chain
from autoplan.search.heterogeneous_space import GroupTables, MixedSpace, joined_by
from autoplan.search.pricing import at_values

Floats = NDArray[np.float64]

# With more groups than this, stages follow the order of the groups in the cluster; with up to this many, any order.
MOST_PERMUTED = 3


class Seat(NamedTuple):
    """``place``: stages of ``group`` before this one. ``before``: the group of the stage before, -1 for none. ``used``:
    a bit for each group that has stages so far, this one's included."""

    group: int
    place: int
    before: int
    used: int


class Boundary(NamedTuple):
    """The link between two stages: from ``group`` to ``other``, or within ``group`` after its stage ``place`` (up to
    where the pattern of nodes repeats)."""

    group: int
    other: int
    place: int


class Move(NamedTuple):
    """A stage on ``seat`` whose next is on ``following`` (0 after the last stage), both as positions among the seats of
    their stages; the boundaries before and after it, None at the ends."""

    seat: int
    following: int
    into: Boundary | None
    out: Boundary | None


@dataclass(frozen=True, kw_only=True)
class Seats:
    """The seats of one strategy, priced. ``tables``: its arcs on each group."""

    space: MixedSpace
    strategy: Strategy
    tables: tuple[GroupTables, ...]
    _alone: dict[tuple[int, int], tuple[Floats, Floats]] = field(default_factory=dict, init=False)
    _links: dict[tuple[Boundary, bool], Floats] = field(default_factory=dict, init=False)

    @property
    def layers(self) -> int:
        return len(self.space.problem.layers.layers)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Stages that each group can hold."""
        return tuple(self.space.slots(group, self.strategy) for group in range(len(self.space.spaces)))

    @cached_property
    def stages(self) -> tuple[tuple[Seat, ...], ...]:
        """The seats of each stage that a layout can use, in order."""
        last = self.strategy.pipeline - 1
        firsts = {Seat(g, 0, -1, 1 << g) for g, slots in enumerate(self.held) if slots}
        reached = [_in_order(seat for seat in firsts if self._rest(seat.used, seat.group, 0) >= last)]
        for stage in range(last):
            following = {seat for before in reached[-1] for seat in self._next(before, last - stage - 1)}
            reached.append(_in_order(following))
        return tuple(reached)

    @cached_property
    def moves(self) -> tuple[tuple[Move, ...], ...]:
        """The moves of each stage."""
        answer, last = [], self.strategy.pipeline - 1
        for stage, seats in enumerate(self.stages):
            if stage == last:
                answer.append(tuple(Move(i, 0, self._into(seat), None) for i, seat in enumerate(seats)))
                continue
            position = {seat: i for i, seat in enumerate(self.stages[stage + 1])}
            answer.append(
                tuple(
                    Move(i, position[after], self._into(seat), self._into(after))
                    for i, seat in enumerate(seats)
                    for after in self._next(seat, last - stage - 1)
                )
            )
        return tuple(answer)

    def _next(self, seat: Seat, rest: int) -> list[Seat]:
        """Seats for the next stage from which ``rest`` more stages find room."""
        found = []
        if seat.place + 1 < self.held[seat.group]:
            found.append(Seat(seat.group, seat.place + 1, seat.group, seat.used))
        for group, slots in enumerate(self.held):
            if slots and self._may_follow(seat, group):
                found.append(Seat(group, 0, seat.group, seat.used | 1 << group))
        return sorted(after for after in found if self._rest(after.used, after.group, after.place) >= rest)

    def _may_follow(self, seat: Seat, group: int) -> bool:
        if len(self.held) > MOST_PERMUTED:
            return group > seat.group
        return not seat.used >> group & 1

    def _rest(self, used: int, group: int, index: int) -> int:
        """Stages that can follow one on ``group``."""
        ordered = len(self.held) > MOST_PERMUTED
        free = [n for g, n in enumerate(self.held) if (g > group if ordered else not used >> g & 1)]
        return self.held[group] - index - 1 + sum(free)

    def _into(self, seat: Seat) -> Boundary | None:
        if seat.before < 0:
            return None
        if seat.before != seat.group:
            return Boundary(seat.before, seat.group, 0)
        node, width = self.space.clusters[seat.group].gpus_per_node, self.strategy.data * self.strategy.tensor
        return Boundary(seat.group, seat.group, (seat.place - 1) % (math.lcm(node, width) // width))

    def alone(self, stage: int, group: int) -> tuple[Floats, Floats]:
        """Period without sends and tail of every span as ``stage`` on ``group``, remembered."""
        key = (stage, group)
        if key not in self._alone:
            self._alone[key] = self._stage_alone(stage, group)
        return self._alone[key]

    def _stage_alone(self, stage: int, group: int) -> tuple[Floats, Floats]:
        return self.tables[group].alone(stage)

    def priced(self, stage: int, move: Move) -> tuple[Floats, Floats, Floats]:
        """[L + 1, L + 1] period, cost and tail of every span on a move, as :class:`autoplan.search.split.StageTable`
        has them for one kind."""
        period, tail = self.alone(stage, self.stages[stage][move.seat].group)
        cost = period + (self.send_s(move.into, received=True) + self.send_s(move.out, received=False))
        return (period if self.strategy.schedule == "gpipe" else cost), cost, tail

    def send_s(self, boundary: Boundary | None, *, received: bool) -> Floats:
        """Seconds to receive over a boundary by span (or by its first layer, [L + 1, 1]), or to send (or by the layer
        after it, [1, L + 1])."""
        if boundary is None:
            return np.zeros((1, 1))
        key = (boundary, received)
        if key not in self._links:
            self._links[key] = at_values(lambda bytes_: self.price_s(boundary, bytes_), self._crossing(received))
        return self._links[key]

    def crossing_s(
        self, standing: tuple[Seat, ...], cuts: tuple[int, ...]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of one layout: seconds to receive what each stage but the first reads, and to send what each but the last
        makes for later ones; the latter empty where that is what the next stage receives."""
        spans = list(itertools.pairwise(cuts))
        boundaries = [self._into(seat) for seat in standing[1:]]
        received = tuple(
            _at(self.send_s(boundary, received=True), *span)
            for boundary, span in zip(boundaries, spans[1:], strict=True)
        )
        if self._chain.crossing is None:
            return received, ()
        sent = (
            _at(self.send_s(boundary, received=False), *span) for boundary, span in zip(boundaries, spans, strict=False)
        )
        return received, tuple(sent)

    def price_s(self, boundary: Boundary, bytes_: float) -> float:
        """Seconds of one message of every rank of a stage over a boundary."""
        cluster = self.space.clusters[boundary.group]
        if boundary.group != boundary.other:
            link = self.space.link(boundary.group, boundary.other)
            return communication.send_s(joined_by(cluster, link), bytes_, 1)
        width = self.strategy.data * self.strategy.tensor
        return communication.boundary_send_s(cluster, bytes_, stage=boundary.place, distance=width)

    def _crossing(self, received: bool) -> Floats:
        chain = self._chain
        if chain.crossing is not None:
            return chain.crossing.received if received else chain.crossing.sent
        return chain.cut_bytes[:, None] if received else chain.cut_bytes[None, :]

    @property
    def _chain(self) -> Chain:
        """What crosses cuts is the same on every group."""
        return self.space.spaces[0].chain(self.strategy.tensor, self.strategy.micro_batch_size)


class HopefulSeats(Seats):
    """Prices that no layout goes below: what it takes to rule a strategy out before any recompute is chosen."""

    def _stage_alone(self, stage: int, group: int) -> tuple[Floats, Floats]:
        return self.tables[group].at_best(stage)


def seats_of(space: MixedSpace, strategy: Strategy, *, cutoff_s: float = math.inf) -> tuple[HopefulSeats, Seats]:
    """The seats of ``strategy`` without the spans that no layout at ``cutoff_s`` can use: at best, and as they are."""
    steps = strategy.micro_batches - 1
    work = space.work(strategy.tensor, strategy.micro_batch_size)
    limit_s = (cutoff_s - work.period_s) / steps if steps else math.inf
    groups = range(len(space.spaces))
    tables = tuple(space.tables(group, strategy, period_limit_s=limit_s) for group in groups)
    return (
        HopefulSeats(space=space, strategy=strategy, tables=tables),
        Seats(space=space, strategy=strategy, tables=tables),
    )


def _in_order(seats: Iterable[Seat]) -> tuple[Seat, ...]:
    """Of equal layouts the one found first wins, and paths are followed from the last stage: the last groups first, so
    that ranks keep the order of the groups."""
    return tuple(sorted(seats, key=lambda seat: (-seat.group, *seat[1:])))


def _at(prices: Floats, first: int, end: int) -> float:
    """A price by span that may be by its first layer or the layer after it alone."""
    rows, columns = prices.shape
    return float(prices[first if rows > 1 else 0, end if columns > 1 else 0])
