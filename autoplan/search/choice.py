"""Which plan is chosen, once the fastest is known: the least parallelism within the tolerance, and whole state."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from autoplan.plan import Strategy
from autoplan.search.decisions import Decision
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.preferences import preference, preferences

if TYPE_CHECKING:
    from autoplan.search.engine import Engine

# Candidates whose closed form is this close to the best may have the shortest simulated step: the closed form is within
# a few percent of the simulator where stages are nearly even.
CONFIRMED = 0.03
# State that fits whole is sharded only where that gains more than the cost models can be wrong by (median error of
# step times over families of runs: 2 to 9%); what fits one card gets plain data parallelism.
SHARDING_TOLERANCE = 0.10


def choose(engine: Engine, best: Decision, fastest: Decision, tolerance: float) -> Decision:
    """What is preferred of all whose simulated step is within ``tolerance`` of the shortest."""
    return _unsharded(engine, _least_parallel(engine, best, fastest, tolerance), best)


def _least_parallel(engine: Engine, best: Decision, fastest: Decision, tolerance: float) -> Decision:
    """The first group of :func:`preference` that has a step within ``tolerance`` of the shortest: its shortest."""
    limit, limit_s = best.value_s * (1 + CONFIRMED), engine.step_s(fastest) * (1 + tolerance)
    listed = engine.space.candidates.listed
    for group in _preferred_to(engine, fastest.strategy, limit, limit_s):
        found: Decision | None = None
        for index in group:
            if time.monotonic() > engine.deadline:
                return fastest
            least_s = engine.step_s(found) if found else limit_s
            if engine.bounds.simulated_s[index] > least_s:
                continue
            better = engine.open(index, cutoff_s=least_s if listed[index] else limit)
            if better is not None and engine.step_s(better) < least_s:
                found = better
        if found is not None:
            return found
    return fastest


def _preferred_to(engine: Engine, strategy: Strategy, limit: float, limit_s: float) -> Iterator[list[int]]:
    """Candidates under the limits that are less parallel than ``strategy``, grouped by preference, least first."""
    order = np.array(engine.order(step_at_most_s=limit), dtype=np.int64)
    order = order[engine.bounds.simulated_s[order] <= limit_s]
    columns = [column[order].tolist() for column in preferences(engine.space.candidates)]
    ceiling, groups = preference(strategy), defaultdict[tuple[int, ...], list[int]](list)
    for index, key in zip(order.tolist(), zip(*columns, strict=True), strict=True):
        if key < ceiling:
            groups[key].append(index)
    for key in sorted(groups):
        yield groups[key]


def _unsharded(engine: Engine, chosen: Decision, best: Decision) -> Decision:
    """The same degrees with whole state on every rank, where that is not much slower than ``best``, with neither more
    recompute nor smaller micro-batches."""
    strategy = chosen.strategy
    if strategy.zero_stage == 0:
        return chosen
    rows = engine.space.candidates
    alike = (rows.data == strategy.data) & (rows.pipeline == strategy.pipeline) & (rows.tensor == strategy.tensor)
    alike &= (rows.zero_stage == 0) & (rows.sequence == strategy.sequence_parallel)
    alike &= rows.micro_batch_size >= strategy.micro_batch_size
    limit, found = best.value_s * (1 + SHARDING_TOLERANCE), None
    most_s = recompute_s(engine, chosen) if alike.any() else 0.0
    for index in engine.order(alike):
        cutoff = found.value_s if found else limit
        if engine.bounds.step_s[index] > cutoff or time.monotonic() > engine.deadline:
            break
        whole = engine.open(index, cutoff_s=cutoff)
        if whole is not None and recompute_s(engine, whole) <= most_s * (1 + 1e-9):
            found = whole
    return found or chosen


def recompute_s(engine: Engine, decision: Decision) -> float:
    """Seconds that all stages of a decision recompute in a step."""
    space = engine.space.ordered(decision.order)
    priced = evaluate_decision(space, decision.strategy, decision.cuts, step_s=lambda _: 0.0)
    return decision.strategy.micro_batches * sum(stage.again_s for stage in priced.stages)
