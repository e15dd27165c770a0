"""Interleaved and zero-bubble schedules, tried after the search under 1F1B has its answer.

Their closed forms don't compare with 1F1B's (one charges sends and bubbles that the other hides), so they stay out of
the search that these order and prove. Once that has chosen, the candidates whose pipelines stand to gain most are
simulated under the other schedules: with M micro-batches on p ranks a step of 1F1B is M + p - 1 slots of which p - 1
are bubble, and v chunks a GPU divide that by v. One of them is taken only where its simulated step is shorter than the
chosen plan's by more than the search's tolerance, and of those near the shortest the simplest. What was not simulated
is not known to be slower: a plan that this changed is called feasible, not optimal.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from autoplan.plan import Strategy
from autoplan.search.constraints import permits
from autoplan.search.degrees import LEAST_BUBBLE, VIRTUAL_STAGES

if TYPE_CHECKING:
    from autoplan.search.engine import Decision, Engine

# Candidates that are tried under other schedules.
MOST_VARIED = 4


def faster_schedule(engine: Engine, chosen: Decision, tolerance: float) -> Decision | None:
    """A decision under another schedule that beats ``chosen`` by more than ``tolerance``; None where there is none."""
    from autoplan.search.engine import preference

    found: list[Decision] = []
    limit_s = engine.step_s(chosen) / (1 + tolerance)
    for strategy in _pool(engine, chosen.strategy):
        for other in variants(strategy, engine.space.problem.schedules, len(engine.space.problem.layers.layers)):
            if not permits(engine.space.problem, other):
                continue
            decision = engine.under(other, limit_s)
            if decision is not None and engine.step_s(decision) < limit_s:
                found.append(decision)
    if not found:
        return None
    near_s = min(map(engine.step_s, found)) * (1 + tolerance)
    near = [decision for decision in found if engine.step_s(decision) <= near_s]
    return min(near, key=lambda decision: (preference(decision.strategy), engine.step_s(decision)))


def variants(strategy: Strategy, schedules: tuple[str, ...], layers: int) -> Iterator[Strategy]:
    """``strategy`` under the other schedules that may gain from its bubble."""
    if not worthwhile(strategy):
        return
    if "interleaved" in schedules:
        for chunks in VIRTUAL_STAGES:
            if strategy.pipeline * chunks <= layers:
                yield dataclasses.replace(strategy, schedule="interleaved", virtual_stages=chunks)
    if "zero_bubble" in schedules:
        yield dataclasses.replace(strategy, schedule="zero_bubble")


def worthwhile(strategy: Strategy) -> bool:
    """Whether 1F1B waits for more of the step than the tolerance, with a micro-batch for every rank."""
    ranks, micro_batches = strategy.pipeline, strategy.micro_batches
    return 1 < ranks <= micro_batches and ranks - 1 > LEAST_BUBBLE * (micro_batches + ranks - 1)


def _pool(engine: Engine, chosen: Strategy) -> list[Strategy]:
    """What was chosen, and the candidates that stand to gain most, the most promising first. State is sharded no
    further than was chosen."""
    candidates, bounds = engine.space.candidates, engine.bounds
    micro_batches, ranks = candidates.micro_batches, candidates.pipeline
    expected = bounds.step_s * (micro_batches + (ranks - 1) / 2) / (micro_batches + ranks - 1)
    kept = (bounds.short_bytes <= 0) & (ranks > 1) & (candidates.zero_stage <= chosen.zero_stage)
    rows = np.nonzero(kept)[0]
    order = rows[np.lexsort((rows, expected[rows]))]
    promising = (candidates.strategy(int(index)) for index in order)
    found = itertools.islice((s for s in promising if worthwhile(s) and s != chosen), MOST_VARIED)
    return [chosen, *found]
