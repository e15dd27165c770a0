"""Time of a pipeline schedule: a discrete-event simulation of the action lists that the runtime executes.

A stage runs its actions in order, one at a time. ``F`` of micro-batch m on stage s starts when stage s - 1 has done
and sent it, ``B`` when stage s + 1 has; sends run beside the compute. With T_s = forward_s + backward_s and M
micro-batches (Narayanan et al. 2021, section 2.2):

    closed form   (M - 1) max_s T_s + sum_s T_s + 2 sum sends      exact for uniform stages without sends
    lower bound   see :func:`lower_bound_s`                        never above the simulation

The closed form may be above or below the simulation when stages differ; bounds must use the lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan import schedules
from autoplan.errors import StrategyError
from autoplan.schedules import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action with its time."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """``events``: one tuple a stage, in order. ``bubble_fraction``: share of stages x step that no action fills."""

    step_s: float
    events: tuple[tuple[Event, ...], ...]
    bubble_fraction: float


def simulate(
    actions: Sequence[Sequence[Action]],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float] = (),
    tail_s: Sequence[float] = (),
) -> Timeline:
    """Run the lists. Seconds a stage and micro-batch; ``send_s``: one a boundary; ``tail_s``: what a stage does after
    its last action (gradient synchronisation, optimizer). Raises :class:`StrategyError` where lists wait on each other.
    """
    stages = len(actions)
    sends = tuple(send_s) or (0.0,) * (stages - 1)
    tails = tuple(tail_s) or (0.0,) * stages
    # ends[kind][stage][micro_batch]: when that action is done.
    ends: dict[str, list[dict[int, float]]] = {kind: [{} for _ in actions] for kind in ("F", "B")}
    seconds = {"F": forward_s, "B": backward_s}
    clocks = [0.0] * stages
    events: list[list[Event]] = [[] for _ in actions]
    waiting = set(range(stages))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            lane = events[stage]
            for action in actions[stage][len(lane) :]:
                ready = _ready_s(action, ends, sends)
                if ready is None:
                    break
                start = max(clocks[stage], ready)
                end = start + seconds[action.kind][stage]
                clocks[stage] = ends[action.kind][stage][action.micro_batch] = end
                lane.append(Event(action=action, start_s=start, end_s=end))
                moved = True
            if len(lane) == len(actions[stage]):
                waiting.discard(stage)
        if not moved and waiting:
            stuck = ", ".join(str(actions[stage][len(events[stage])]) for stage in sorted(waiting))
            raise StrategyError(f"the schedule deadlocks: {stuck} wait on each other")
    step = max(clock + tail for clock, tail in zip(clocks, tails, strict=True))
    busy = sum(event.end_s - event.start_s for lane in events for event in lane) + sum(tails)
    return Timeline(
        step_s=step,
        events=tuple(tuple(lane) for lane in events),
        bubble_fraction=1.0 - busy / (stages * step) if step else 0.0,
    )


def _ready_s(action: Action, ends: dict[str, list[dict[int, float]]], sends: Sequence[float]) -> float | None:
    """When the action's inputs are there, or None while a producer has not run."""
    stage, kind, micro_batch = action
    if kind == "F":
        if stage == 0:
            return 0.0
        end = ends["F"][stage - 1].get(micro_batch)
        return None if end is None else end + sends[stage - 1]
    own = ends["F"][stage].get(micro_batch)
    if own is None or stage == len(sends):
        return own
    end = ends["B"][stage + 1].get(micro_batch)
    return None if end is None else max(own, end + sends[stage])


def closed_form_s(
    *, forward_s: Sequence[float], backward_s: Sequence[float], send_s: Sequence[float] = (), micro_batches: int
) -> float:
    """(M - 1) max_s T_s + sum_s T_s + 2 sum sends: the objective of the stage solver."""
    totals = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    return (micro_batches - 1) * max(totals) + sum(totals) + 2 * sum(send_s)


def lower_bound_s(
    schedule: str,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float] = (),
    micro_batches: int,
) -> float:
    """A bound that :func:`simulate` never beats, equal to it for uniform stages without sends.

    Stage s can't start before the earlier stages' first forward, nor end after their last backward:
    sum_{i<s} T_i. It works M x T_s. Between its first forward and first backward it has only w - 1 more forwards to
    do (w micro-batches in flight), yet the later stages need D = sum_{i>s} T_i: it idles D - (w - 1) F_s; likewise
    between its last forward and last backward, D - (w - 1) B_s. When M > w the two waits don't overlap.
    """
    stages = len(forward_s)
    sends = tuple(send_s) or (0.0,) * (stages - 1)
    totals = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    best = 0.0
    for s in range(stages):
        window = schedules.in_flight(schedule, stage=s, stages=stages, micro_batches=micro_batches)
        before = sum(totals[:s]) + 2 * sum(sends[:s])
        after = sum(totals[s + 1 :]) + 2 * sum(sends[s:])
        first = max(0.0, after - (window - 1) * forward_s[s])
        last = max(0.0, after - (window - 1) * backward_s[s])
        idle = first + last if micro_batches > window else max(first, last)
        best = max(best, before + micro_batches * totals[s] + idle)
    return best
