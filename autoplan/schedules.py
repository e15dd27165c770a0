"""Pipeline schedules as data: for each stage the ordered list of actions that it executes.

The same lists are executed by :mod:`autoplan.runtime`, priced by :mod:`autoplan.cost_models.schedule` and printed
in torch's compact notation (``0F1``: stage 0, forward, micro-batch 1). Plain data: imports nothing of ours.

- GPipe (Huang et al. 2019): all forwards, then all backwards; every micro-batch is in flight at once.
- 1F1B (PipeDream-flush, Narayanan et al. 2021): stage s warms up with min(M, S - s) forwards and then alternates, so
  at most min(M, S - s) micro-batches are in flight.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b"]
SCHEDULES: tuple[str, ...] = ("gpipe", "1f1b")


class Action(NamedTuple):
    """One cell of a schedule: ``kind`` is "F" or "B"."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


def in_flight(schedule: str, *, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations stage ``stage`` holds at once."""
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


def stage_actions(schedule: str, *, stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """The ordered actions of one stage."""
    warm_up = in_flight(schedule, stage=stage, stages=stages, micro_batches=micro_batches)
    actions = [Action(stage, "F", m) for m in range(warm_up)]
    forward = warm_up
    for backward in range(micro_batches):
        actions.append(Action(stage, "B", backward))
        if forward < micro_batches:
            actions.append(Action(stage, "F", forward))
            forward += 1
    return tuple(actions)


def all_actions(schedule: str, *, stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """One action list a stage; ``schedule`` is one of :data:`SCHEDULES`."""
    return tuple(stage_actions(schedule, stage=s, stages=stages, micro_batches=micro_batches) for s in range(stages))
