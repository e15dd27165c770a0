"""The simulated step of a split, quickly: the schedule simulator's recurrence with all stages of a wave at once.

:func:`autoplan.cost_models.schedule.simulate` walks the action lists one action at a time. Under 1F1B stage s runs the
forward of micro-batch m + S - 1 - s and the backward of micro-batch m in wave m (from 1 - S to M - 1), so that a wave
needs only the wave before it; backwards chain from the last stage to the first, a running maximum once the time
between stages is taken out. Under GPipe the forwards come first, and then the backwards. The lists of other schedules
are put into an order in which they can run, once, and walked through in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan import schedules
from autoplan.cost_models import schedule

Floats = NDArray[np.float64]

# Waves that are simulated for a plan that is only compared, and those at the end of a shorter step that show what each
# takes once all stages are busy.
MOST_WAVES = 256
LAST_WAVES = 16
# Uneven stages under these settle into a rhythm of several micro-batches.
_LAST_OF = {"interleaved": 32, "zero_bubble": 96}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each stage, of what each stage but the first receives (``send_s``, one a boundary),
    and of each stage's tail. ``sent_s``: what each stage but the last sends, each value once; empty where that is what
    the next stage receives. ``weight_s``: the part of ``backward_s`` that weights' gradients take, where the schedule
    splits backwards. With virtual stages a rank holds several stages, and their tails come one after the other."""

    schedule: str
    micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: tuple[float, ...]
    tail_s: tuple[float, ...]
    sent_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    virtual_stages: int = 1

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.forward_s) // self.virtual_stages

    @property
    def closed_form_s(self) -> float:
        """Under GPipe and 1F1B: (M - 1) max period + sum of periods + max tail, with sends as in
        :mod:`autoplan.search.tables`."""
        periods = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        into, out = (0.0, *self.send_s), (*(self.sent_s or self.send_s), 0.0)
        costs = [period + (a + b) for period, a, b in zip(periods, into, out, strict=True)]
        longest = max(periods if self.schedule == "gpipe" else costs)
        return (self.micro_batches - 1) * longest + sum(costs) + max(self.tail_s)

    @property
    def objective_s(self) -> float:
        """What the search minimises: the closed form under GPipe and 1F1B, else the simulated step."""
        return self.closed_form_s if self.schedule in _CLOCKS else brief_step_s(self)

    @property
    def least_s(self) -> float:
        """Seconds that a step under another schedule than GPipe and 1F1B takes at least, without simulating it."""
        steps_s = schedule.lower_bound_s(
            self.schedule,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            send_s=self.send_s,
            weight_s=self.weight_s,
            micro_batches=self.micro_batches,
            virtual_stages=self.virtual_stages,
        )
        # The first rank of an interleaved pipeline ends last, its tail aside.
        tails = self.rank_tails_s
        return steps_s + float(tails[0] if self.schedule == "interleaved" else tails.min())

    @property
    def rank_tails_s(self) -> Floats:
        """Each rank's tail: those of its stages, one after the other."""
        return np.array(self.tail_s).reshape(self.virtual_stages, self.ranks).sum(axis=0)


def step_s(times: StageTimes) -> float:
    """The simulated step, to the last action."""
    return _simulated_s(times, times.micro_batches)


def brief_step_s(times: StageTimes) -> float:
    """The step within half a percent or so: past :data:`MOST_WAVES` a shorter step is simulated, and each micro-batch
    that is left out takes what one takes at its end."""
    total, ranks = times.micro_batches, times.ranks
    last = _LAST_OF.get(times.schedule, LAST_WAVES)
    if times.schedule in schedules.CHUNKED:
        last = -(-last // ranks) * ranks  # whole groups
    few = ranks + 2 * last
    few += (total - few) % ranks if times.schedule in schedules.CHUNKED else 0
    if total <= max(MOST_WAVES // times.virtual_stages, few):
        return _simulated_s(times, total)
    long, short = (_simulated_s(times, count) for count in (few, few - last))
    return long + (total - few) * (long - short) / last


def _simulated_s(times: StageTimes, micro_batches: int) -> float:
    if len(times.forward_s) == 1:
        return micro_batches * (times.forward_s[0] + times.backward_s[0]) + times.tail_s[0]
    clock = _CLOCKS.get(times.schedule, _walked)(times, micro_batches)
    return float(np.max(clock + times.rank_tails_s))


def _one_forward_one_backward(times: StageTimes, micro_batches: int) -> Floats:
    """When each stage has done its last action."""
    stages = len(times.forward_s)
    forward, backwards = np.array(times.forward_s), _Backwards(times)
    arrival = np.array([0.0, *times.send_s])
    clock, sent = np.zeros(stages), np.zeros(stages)  # sent[s]: when the last forward of stage s was done
    index = np.arange(stages)
    for wave in range(1 - stages, micro_batches):
        micro_batch = wave + stages - 1 - index
        start = np.maximum(clock, np.concatenate(([0.0], sent[:-1])) + arrival)
        done = start + forward
        if wave < 0 or wave + stages > micro_batches:
            active = (micro_batch >= 0) & (micro_batch < micro_batches)
            sent = np.where(active, done, sent)
            clock = np.where(active, done, clock)
        else:
            clock = sent = done
        if wave >= 0:
            clock = backwards.after(clock)
    return clock


def _gpipe(times: StageTimes, micro_batches: int) -> Floats:
    """When each stage has done its last action."""
    forward, backwards = _Forwards(times), _Backwards(times)
    clock = np.zeros(len(times.forward_s))
    for _ in range(micro_batches):
        clock = forward.after(clock)
    for _ in range(micro_batches):
        clock = backwards.after(clock)
    return clock


# One action: its rank, the number of its duration, its own number, and those of the action on another stage and of the
# boundary that it waits for (the last of each for none).
_Visit = tuple[int, int, int, int, int]


def _walked(times: StageTimes, micro_batches: int) -> Floats:
    """When each rank has done its last action."""
    stages = len(times.forward_s)
    weights = times.weight_s or (0.0,) * stages
    inputs = [whole - part for whole, part in zip(times.backward_s, weights, strict=True)]
    durations = [*times.forward_s, *times.backward_s, *inputs, *weights]
    sends = [*(times.send_s if times.ranks > 1 else [0.0] * (stages - 1)), 0.0]
    ends = [0.0] * (3 * stages * micro_batches + 1)
    clock = [0.0] * times.ranks
    for rank, duration, own, producer, boundary in _visits(times.schedule, stages, times.virtual_stages, micro_batches):
        start = clock[rank]
        ready = ends[producer] + sends[boundary]
        clock[rank] = ends[own] = (ready if ready > start else start) + durations[duration]
    return np.array(clock)


# Position of a kind's durations, and of its ends: a split backward is done with the gradients of its inputs.
_DURATION = {"F": 0, "B": 1, "I": 2, "W": 3}
_END = {"F": 0, "B": 1, "I": 1, "W": 2}


@functools.lru_cache(maxsize=64)
def _visits(schedule: str, stages: int, virtual_stages: int, micro_batches: int) -> tuple[_Visit, ...]:
    """All actions, each after what it waits for. What it waits for on its own rank comes before it in the list."""
    nothing = 3 * stages * micro_batches
    lanes: list[list[_Visit]] = []
    for rank in range(stages // virtual_stages):
        lanes.append([])
        for stage, kind, m in schedules.rank_actions(
            schedule, rank=rank, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages
        ):
            end = _END[kind]
            own = (end * stages + stage) * micro_batches + m
            producer, boundary = nothing, stages - 1
            if end == 0 and stage > 0:
                producer, boundary = own - micro_batches, stage - 1
            elif end == 1 and stage < stages - 1:
                producer, boundary = own + micro_batches, stage
            lanes[-1].append((rank, _DURATION[kind] * stages + stage, own, producer, boundary))
    found: list[_Visit] = []
    done = bytearray(nothing + 1)
    done[nothing] = 1
    positions = [0] * len(lanes)
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(lanes):
            start = at = positions[rank]
            while at < len(lane) and done[lane[at][3]]:
                done[lane[at][2]] = 1
                at += 1
            if at > start:
                found += lane[start:at]
                positions[rank], moved = at, True
    return tuple(found)


_CLOCKS: dict[str, Callable[[StageTimes, int], Floats]] = {"1f1b": _one_forward_one_backward, "gpipe": _gpipe}


class _Forwards:
    """One micro-batch through all stages: end[s] = max(clock[s], end[s - 1] + send) + forward[s]."""

    def __init__(self, times: StageTimes) -> None:
        self.seconds = np.array(times.forward_s)
        self.before = np.cumsum([0.0, *(f + s for f, s in zip(times.forward_s, times.send_s, strict=False))])

    def after(self, clock: Floats) -> Floats:
        return np.maximum.accumulate(clock - self.before) + self.before + self.seconds


class _Backwards:
    """One micro-batch back through all stages: end[s] = max(clock[s], end[s + 1] + send) + backward[s]."""

    def __init__(self, times: StageTimes) -> None:
        self.seconds = np.array(times.backward_s)
        behind = np.cumsum([0.0, *(b + s for b, s in zip(times.backward_s[:0:-1], times.send_s[::-1], strict=True))])
        self.behind = behind[::-1]

    def after(self, clock: Floats) -> Floats:
        return np.maximum.accumulate((clock - self.behind)[::-1])[::-1] + self.behind + self.seconds
