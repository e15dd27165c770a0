"""The simulated step of a split, quickly: the schedule simulator's recurrence with all stages of a wave at once.

:func:`autoplan.cost_models.schedule.simulate` walks the action lists one action at a time. Under 1F1B stage s runs the
forward of micro-batch m + S - 1 - s and the backward of micro-batch m in wave m (from 1 - S to M - 1), so that a wave
needs only the wave before it; backwards chain from the last stage to the first, a running maximum once the time
between stages is taken out. Under GPipe the forwards come first, and then the backwards. Other schedules are simulated
as they are.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on each stage, of a send over each boundary, and of each stage's tail."""

    schedule: str
    micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: tuple[float, ...]
    tail_s: tuple[float, ...]

    @property
    def closed_form_s(self) -> float:
        """(M - 1) max period + sum of periods + max tail, with sends as in :mod:`autoplan.search.tables`."""
        periods = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        around = [sum(self.send_s[max(0, s - 1) : s + 1]) for s in range(len(periods))]
        costs = [period + sends for period, sends in zip(periods, around, strict=True)]
        longest = max(periods if self.schedule == "gpipe" else costs)
        return (self.micro_batches - 1) * longest + sum(costs) + max(self.tail_s)


def step_s(times: StageTimes) -> float:
    """The simulated step, to the last action."""
    return _simulated_s(times, times.micro_batches)


def brief_step_s(times: StageTimes) -> float:
    """The step within half a percent or so: past :data:`MOST_WAVES` a shorter step is simulated, and each micro-batch
    that is left out takes what one takes at its end."""
    total, few = times.micro_batches, len(times.forward_s) + 2 * LAST_WAVES
    if total <= max(MOST_WAVES, few):
        return _simulated_s(times, total)
    long, short = (_simulated_s(times, count) for count in (few, few - LAST_WAVES))
    return long + (total - few) * (long - short) / LAST_WAVES


def _simulated_s(times: StageTimes, micro_batches: int) -> float:
    if len(times.forward_s) == 1:
        return micro_batches * (times.forward_s[0] + times.backward_s[0]) + times.tail_s[0]
    clock = _CLOCKS.get(times.schedule, _walked)(times, micro_batches)
    return float(np.max(clock + np.array(times.tail_s)))


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


def _walked(times: StageTimes, micro_batches: int) -> Floats:
    """When each stage has done its last action, by the simulator itself."""
    timeline = schedule.simulate(
        schedules.all_actions(times.schedule, stages=len(times.forward_s), micro_batches=micro_batches),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        send_s=times.send_s,
    )
    return np.array([lane[-1].end_s for lane in timeline.events])


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
