"""Whether a strategy can be one: the plan's own, and those that it was compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoplan.consistency.problems import Problem
from autoplan.schedules import CHUNKED, EVENLY_SPLIT, SCHEDULES

if TYPE_CHECKING:
    from autoplan.plan import Plan, Strategy

DEGREES = ("data", "tensor", "pipeline", "virtual_stages", "context", "expert", "micro_batch_size", "micro_batches")
_ZERO_STAGES = (0, 1, 2, 3)


def strategies(plan: Plan) -> Iterator[Problem]:
    """All strategies of a plan."""
    for where, strategy in named(plan):
        for field, problem in _problems(strategy):
            yield f"{where}.{field}", problem


def named(plan: Plan) -> Iterator[tuple[str, Strategy]]:
    """Every strategy of a plan with its path, the plan's own first."""
    yield "strategy", plan.strategy
    for name in ("alternatives", "other_answers", "crossings"):
        for index, other in enumerate(getattr(plan, name)):
            if other.strategy is not None:
                yield f"{name}.{index}.strategy", other.strategy


def _problems(strategy: Strategy) -> Iterator[Problem]:
    for name in DEGREES:
        if getattr(strategy, name) < 1:
            yield name, f"{getattr(strategy, name)} is not 1 or more"
    if strategy.zero_stage not in _ZERO_STAGES:
        yield "zero_stage", f"{strategy.zero_stage} is not one of {_ZERO_STAGES}"
    if strategy.schedule not in SCHEDULES:
        yield "schedule", f"{strategy.schedule!r} is not one of {', '.join(SCHEDULES)}"
    sharers = strategy.data * strategy.context
    if sharers % strategy.expert:
        axes = "data" if strategy.context == 1 else "data x context"
        yield "expert", f"{strategy.expert} does not divide {axes} = {sharers}"
    if strategy.zero_stage and sharers == 1:
        yield "zero_stage", f"{strategy.zero_stage}, but there is no data axis to share state over: it must be 0"
    if strategy.sequence_parallel and strategy.tensor == 1:
        yield "sequence_parallel", "true, but there is no tensor axis to split the sequence over: it must be false"
    if strategy.virtual_stages > 1 and strategy.schedule not in CHUNKED:
        yield (
            "schedule",
            f"{strategy.schedule!r}, but a GPU has {strategy.virtual_stages} virtual stages: it must be "
            f"{' or '.join(CHUNKED)}",
        )
    if strategy.pipeline == 1 and (strategy.schedule in EVENLY_SPLIT or strategy.virtual_stages > 1):
        yield "schedule", f"{strategy.schedule!r}, but there is one stage: it must be 1f1b or gpipe"
