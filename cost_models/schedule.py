"""Time of a pipeline schedule: a discrete-event simulation of the action lists that the runtime executes.

A rank runs its actions in order, one at a time. ``F`` of micro-batch m on stage s starts when stage s - 1 has done
and sent it, ``B`` when stage s + 1 has; sends run beside the compute, and chunks of one rank hand over without any. A
backward may be split into ``I``, which the earlier stage waits for, and ``W``, the weights' gradients, which nobody
waits for. With T_s = forward_s + backward_s, M micro-batches and p ranks (Narayanan et al. 2021, section 2.2; Qi et al.
2024, table 1):

    closed form   (M - 1) max_s T_s + sum_s T_s + 2 sum sends            GPipe, 1F1B
                  max_r (sum_{i<r} T_i + M R_r) + 2 sum sends            interleaved; R_r: all stages of rank r
                  max_r ((M - 1) V_r + max(1, M - p + 1) W_r)
                      + sum_s V_s + 2 sum sends                        zero bubble; V_s = T_s - W_s, W_s = weight_s
    lower bound   see :func:`lower_bound_s`                              never above the simulation

The closed forms are exact for uniform stages without sends (interleaved: M a multiple of p; zero bubble: M from p, and
weight gradients that take no longer than a forward, nor than the gradients of the inputs). They may be above or below
the simulation when stages differ; bounds must use the lower bound.
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
    """``events``: one tuple a rank, in order. ``bubble_fraction``: share of ranks x step that no action fills."""

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
    weight_s: Sequence[float] = (),
) -> Timeline:
    """Run the lists, one a rank. Seconds a *stage* and micro-batch; ``weight_s``: the part of ``backward_s`` that
    weights' gradients take, 0 where not given; ``send_s``: one a boundary between stages, taken where these are on
    different ranks; ``tail_s``: what a *rank* does after its last action (gradient synchronisation, optimizer). Raises
    :class:`StrategyError` where lists wait on each other.
    """
    stages = len(forward_s)
    weights = tuple(weight_s) or (0.0,) * stages
    tails = tuple(tail_s) or (0.0,) * len(actions)
    sends = _sends_between_ranks(actions, tuple(send_s) or (0.0,) * (stages - 1))
    inputs = [whole - part for whole, part in zip(backward_s, weights, strict=True)]
    seconds = {"F": forward_s, "B": backward_s, "I": inputs, "W": weights}
    # ends[kind][stage][micro_batch]: when that action is done, as far as other stages wait for it.
    ends: dict[str, list[dict[int, float]]] = {kind: [{} for _ in range(stages)] for kind in ("F", "B")}
    clocks = [0.0] * len(actions)
    events: list[list[Event]] = [[] for _ in actions]
    waiting = set(range(len(actions)))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            lane = events[rank]
            for action in actions[rank][len(lane) :]:
                ready = _ready_s(action, ends, sends)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                end = start + seconds[action.kind][action.stage]
                clocks[rank] = end
                if action.kind != "W":
                    ends["F" if action.kind == "F" else "B"][action.stage][action.micro_batch] = end
                lane.append(Event(action=action, start_s=start, end_s=end))
                moved = True
            if len(lane) == len(actions[rank]):
                waiting.discard(rank)
        if not moved and waiting:
            stuck = ", ".join(str(actions[rank][len(events[rank])]) for rank in sorted(waiting))
            raise StrategyError(f"the schedule deadlocks: {stuck} wait on each other")
    step = max(clock + tail for clock, tail in zip(clocks, tails, strict=True))
    busy = sum(event.end_s - event.start_s for lane in events for event in lane) + sum(tails)
    return Timeline(
        step_s=step,
        events=tuple(tuple(lane) for lane in events),
        bubble_fraction=1.0 - busy / (len(actions) * step) if step else 0.0,
    )


def _sends_between_ranks(actions: Sequence[Sequence[Action]], sends: Sequence[float]) -> tuple[float, ...]:
    """``sends``, nothing between stages of one rank."""
    home = {action.stage: rank for rank, own in enumerate(actions) for action in own}
    return tuple(0.0 if home.get(s) == home.get(s + 1) else send for s, send in enumerate(sends))


def _ready_s(action: Action, ends: dict[str, list[dict[int, float]]], sends: Sequence[float]) -> float | None:
    """When the action's inputs are there, or None while a producer has not run."""
    stage, kind, micro_batch = action
    if kind == "F":
        if stage == 0:
            return 0.0
        end = ends["F"][stage - 1].get(micro_batch)
        return None if end is None else end + sends[stage - 1]
    if kind == "W":
        return ends["B"][stage].get(micro_batch)
    own = ends["F"][stage].get(micro_batch)
    if own is None or stage == len(sends):
        return own
    end = ends["B"][stage + 1].get(micro_batch)
    return None if end is None else max(own, end + sends[stage])


def closed_form_s(
    schedule: str = "1f1b",
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float] = (),
    weight_s: Sequence[float] = (),
    micro_batches: int,
    virtual_stages: int = 1,
) -> float:
    """About the step, in seconds; GPipe's and 1F1B's is the objective of the stage solver. Arguments as
    :func:`simulate`'s."""
    totals = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    if schedule == "interleaved":
        ranks = len(totals) // virtual_stages
        steps = (sum(totals[:r]) + micro_batches * sum(totals[r::ranks]) for r in range(ranks))
        return max(steps) + 2 * sum(send_s)
    if schedule == "zero_bubble":
        weights = tuple(weight_s) or (0.0,) * len(totals)
        ways = [total - weight for total, weight in zip(totals, weights, strict=True)]
        kept = max(1, micro_batches - len(totals) + 1)
        longest = max((micro_batches - 1) * way + kept * weight for way, weight in zip(ways, weights, strict=True))
        return longest + sum(ways) + 2 * sum(send_s)
    return (micro_batches - 1) * max(totals) + sum(totals) + 2 * sum(send_s)


def lower_bound_s(
    schedule: str,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float] = (),
    weight_s: Sequence[float] = (),
    micro_batches: int,
    virtual_stages: int = 1,
) -> float:
    """Seconds that :func:`simulate` never beats, equal to it wherever the closed form is exact.

    A rank that holds several stages can't start before the first forward has come to its first stage, nor end before
    its last backward has gone back from there: sum_{i<r} T_i. It works M x R_r. For the others see
    :func:`_one_stage_a_rank_s` and :func:`_split_backward_s`.
    """
    sends = tuple(send_s) or (0.0,) * (len(forward_s) - 1)
    totals = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    if schedule == "zero_bubble":
        weights = tuple(weight_s) or (0.0,) * len(totals)
        return _split_backward_s(forward_s, totals, sends, weights, micro_batches)
    if schedule == "interleaved":
        ranks = len(totals) // virtual_stages
        alone = sum(totals) + (2 * sum(sends) if ranks > 1 else 0.0)
        works = (sum(totals[:r]) + 2 * sum(sends[:r]) + micro_batches * sum(totals[r::ranks]) for r in range(ranks))
        return max(alone, *works)
    return _one_stage_a_rank_s(schedule, forward_s, backward_s, sends, micro_batches)


def _one_stage_a_rank_s(
    schedule: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    sends: Sequence[float],
    micro_batches: int,
) -> float:
    """GPipe and 1F1B: stage s can't start before the earlier stages' first forward, nor end after their last backward:
    sum_{i<s} T_i. It works M x T_s. Between its first forward and first backward it has only w - 1 more forwards to
    do (w micro-batches in flight), yet the later stages need D = sum_{i>s} T_i: it idles D - (w - 1) F_s; likewise
    between its last forward and last backward, D - (w - 1) B_s. When M > w the two waits don't overlap.
    """
    stages = len(forward_s)
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


def _split_backward_s(
    forward_s: Sequence[float],
    totals: Sequence[float],
    sends: Sequence[float],
    weights: Sequence[float],
    micro_batches: int,
) -> float:
    """Zero bubble. With V_s = T_s - W_s, what a micro-batch takes there and back: rank r waits for its first forward,
    and with w micro-batches in flight for the first gradient, sum_{i>r} V_i - (w - 1) F_r; it works M x T_r. Or: all
    but r + 1 of its weight gradients come before its last input gradient, which goes back from there, and rank 0 ends
    with one weight gradient more."""
    ranks = len(totals)
    ways = [total - weight for total, weight in zip(totals, weights, strict=True)]
    best = 0.0
    for r in range(ranks):
        window = min(micro_batches, ranks - r)
        idle = max(0.0, sum(ways[r + 1 :]) + 2 * sum(sends[r:]) - (window - 1) * forward_s[r])
        ends_here = sum(forward_s[:r]) + sum(sends[:r]) + micro_batches * totals[r]
        kept = min(micro_batches, min(r, micro_batches - min(micro_batches, ranks - 1 - r)) + 1)
        goes_back = sum(ways[:r]) + 2 * sum(sends[:r]) + micro_batches * ways[r]
        goes_back += (micro_batches - kept) * weights[r] + weights[0]
        best = max(best, idle + ends_here, idle + goes_back)
    return best
