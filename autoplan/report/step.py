"""One step of a plan, action by action, from the plan alone.

:func:`autoplan.cost_models.schedule.simulate` runs the action lists of the plan's schedule on the stage times that the
plan holds, so that the end is the predicted step. Plan files from before stages held ``send_s``, ``synchronise_s`` and
``optimizer_s`` give those only in ``predicted.time_terms``: there the sends are spread evenly over the boundaries, and
what is then missing of the predicted step follows each stage's last action as *not attributed*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoplan import schedules
from autoplan.cost_models import schedule
from autoplan.cost_models.schedule import Event
from autoplan.errors import StrategyError
from autoplan.plan import Plan, Stage

# Of the step: the rounding of sums of thousands of micro-batches.
AGREEMENT = 1e-6
# About ten seconds of simulation; a plan of 16,384 GPUs has some 30,000.
MOST_ACTIONS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What a stage does after its last micro-batch: ``what`` from ``start_s`` to ``end_s``."""

    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """``kind`` F: activations from rank ``source`` to the next stage, ``reader`` on rank ``target``; B: their gradients
    to the one before. The receiver may still be busy at ``end_s``: it starts on what arrived at ``used_s``."""

    kind: str
    micro_batch: int
    source: int
    target: int
    reader: int
    start_s: float
    end_s: float
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step: ``lanes`` one tuple of events a pipeline rank, ``tails`` likewise, ``unexplained_s`` what the simulated
    end differs from the plan's predicted step by."""

    plan: Plan
    lanes: tuple[tuple[Event, ...], ...]
    tails: tuple[tuple[Tail, ...], ...]
    send_s: tuple[float, ...]
    end_s: float
    unexplained_s: float

    @property
    def actions(self) -> int:
        """Forwards and backwards of all ranks."""
        return sum(len(lane) for lane in self.lanes)

    @property
    def row(self) -> str:
        """What a lane is: a stage, or a pipeline rank that holds several."""
        return "stage" if len(self.lanes) == len(self.plan.stages) else "rank"

    def bubbles(self, stage: int) -> Iterator[tuple[float, float]]:
        """From and to when ``stage`` waits, the end of the step included."""
        at = 0.0
        spans: tuple[Event | Tail, ...] = (*self.lanes[stage], *self.tails[stage])
        for span in spans:
            if span.start_s > at + AGREEMENT * self.end_s * 1e-3:
                yield at, span.start_s
            at = span.end_s
        if self.end_s > at + AGREEMENT * self.end_s:
            yield at, self.end_s

    def idle_share(self, stage: int) -> float:
        """The share of the step that ``stage`` waits."""
        return sum(to - since for since, to in self.bubbles(stage)) / self.end_s if self.end_s else 0.0

    def sends(self) -> Iterator[Send]:
        """Every transfer between ranks, in the order of the sender's actions."""
        begins = {(_way(e), *_place(e)): e.start_s for lane in self.lanes for e in lane}
        ranks, stages = len(self.lanes), len(self.plan.stages)
        for rank, lane in enumerate(self.lanes):
            for event in lane:
                way, (stage, micro_batch) = _way(event), _place(event)
                reader = stage + 1 if way == "F" else stage - 1
                target = schedules.rank_of_stage(reader, ranks=ranks)
                if way == "W" or not 0 <= reader < stages or target == rank:
                    continue
                yield Send(
                    kind=way,
                    micro_batch=micro_batch,
                    source=rank,
                    target=target,
                    reader=reader,
                    start_s=event.end_s,
                    end_s=event.end_s + self.send_s[min(stage, reader)],
                    used_s=begins[way, reader, micro_batch],
                )


def _way(event: Event) -> str:
    """F, B or W: what the gradients of inputs wait for is a backward, whole or not."""
    return "B" if event.action.kind == "I" else event.action.kind


def _place(event: Event) -> tuple[int, int]:
    return event.action.stage, event.action.micro_batch


def simulate(plan: Plan) -> Step:
    """Run one step of ``plan``; raises :class:`StrategyError` for a schedule that is not known or a step too long."""
    strategy = plan.strategy
    stages = len(plan.stages)
    if strategy.schedule not in schedules.SCHEDULES or stages != strategy.pipeline * strategy.virtual_stages:
        raise StrategyError(
            f"this plan's schedule is not one that can be drawn: {strategy.schedule}, {strategy.pipeline} pipeline "
            f"ranks, {stages} stages",
            legal=f"{', '.join(schedules.SCHEDULES)}, pipeline x virtual_stages stages",
        )
    if 2 * stages * strategy.micro_batches > MOST_ACTIONS:
        raise StrategyError(
            f"the step has {2 * stages * strategy.micro_batches:,} actions: too many to draw",
            where="strategy.micro_batches",
            legal=f"{MOST_ACTIONS:,} actions",
            attempt="plan with a larger micro_batch_size",
        )
    whole = _run(plan, _sends(plan.stages), [sum(map(_tail_s, held)) for held in plan.rank_stages])
    missing = plan.predicted.step_time_s - whole.step_s
    sends = _sends(plan.stages)
    if abs(missing) > AGREEMENT * plan.predicted.step_time_s and not any(map(_tail_s, plan.stages)):
        total = plan.predicted.time_terms.get("sends", 0.0)
        sends = (total / (2 * (stages - 1)),) * (stages - 1) if stages > 1 else ()
        whole = _run(plan, sends, [0.0] * strategy.pipeline)
        missing = plan.predicted.step_time_s - whole.step_s
    tails = tuple(
        _tails(held, lane[-1].end_s, max(0.0, missing))
        for held, lane in zip(plan.rank_stages, whole.events, strict=True)
    )
    end = max(tail[-1].end_s if tail else lane[-1].end_s for tail, lane in zip(tails, whole.events, strict=True))
    return Step(
        plan=plan,
        lanes=whole.events,
        tails=tails,
        send_s=sends,
        end_s=end,
        unexplained_s=missing if abs(missing) > AGREEMENT * plan.predicted.step_time_s else 0.0,
    )


def _run(plan: Plan, sends: tuple[float, ...], tails: list[float]) -> schedule.Timeline:
    strategy = plan.strategy
    return schedule.simulate(
        schedules.all_actions(
            strategy.schedule,
            stages=len(plan.stages),
            micro_batches=strategy.micro_batches,
            virtual_stages=strategy.virtual_stages,
        ),
        forward_s=[stage.forward_s for stage in plan.stages],
        backward_s=[stage.backward_s for stage in plan.stages],
        send_s=sends,
        tail_s=tails,
        weight_s=[stage.weight_gradients_s for stage in plan.stages],
    )


def _sends(stages: tuple[Stage, ...]) -> tuple[float, ...]:
    return tuple(stage.send_s for stage in stages[:-1])


def _tail_s(stage: Stage) -> float:
    return stage.synchronise_s + stage.optimizer_s


def _tails(held: tuple[Stage, ...], at: float, missing_s: float) -> tuple[Tail, ...]:
    parts = (
        ("gradient synchronisation", sum(stage.synchronise_s for stage in held)),
        ("optimizer", sum(stage.optimizer_s for stage in held)),
        ("not attributed", missing_s if not any(map(_tail_s, held)) else 0.0),
    )
    made = []
    for what, lasts in parts:
        if lasts > 0:
            made.append(Tail(what=what, start_s=at, end_s=at + lasts))
            at += lasts
    return tuple(made)
