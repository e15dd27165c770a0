"""Which of nearly equal plans is preferred: the least parallelism, the simplest schedule."""

from __future__ import annotations

import numpy as np

from autoplan.plan import Strategy
from autoplan.schedules import SCHEDULES
from autoplan.search.degrees import Candidates, Integers

_SIMPLEST = ("1f1b", "gpipe", "interleaved", "zero_bubble")


def preference(strategy: Strategy) -> tuple[int, ...]:
    """Smaller is less parallel: shares of the sequence last, then axes of the mesh in use, then degrees (tensor weighs
    most, data least), then GPUs.

    Sharded state adds no axis of its own but comes after plain data parallelism, so that with equal times the order is
    one GPU, data, sharded state, pipeline, tensor, and then combinations. Of equal degrees the simplest schedule.
    """
    return (
        int(strategy.sequence_parallel),
        sum(degree > 1 for degree in (strategy.data, strategy.pipeline, strategy.tensor)),
        strategy.tensor,
        strategy.pipeline,
        strategy.zero_stage,
        strategy.data,
        strategy.gpus,
        _SIMPLEST.index(strategy.schedule),
        strategy.virtual_stages,
    )


def preferences(candidates: Candidates) -> tuple[Integers, ...]:
    """The same of all candidates, one column an entry."""
    axes = (candidates.data, candidates.pipeline, candidates.tensor)
    schedules = np.array([_SIMPLEST.index(name) for name in (*SCHEDULES, candidates.schedule)])
    return (
        candidates.sequence.astype(np.int64),
        sum((degree > 1).astype(np.int64) for degree in axes),  # type: ignore[return-value]
        candidates.tensor,
        candidates.pipeline,
        candidates.zero_stage,
        candidates.data,
        candidates.gpus,
        schedules[candidates.other],  # -1 is the last
        candidates.virtual_stages,
    )


def degrees(strategy: Strategy) -> tuple[int, int, int]:
    """What the mesh is made of."""
    return strategy.data, strategy.pipeline, strategy.tensor
