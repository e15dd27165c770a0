"""Interleaved and zero-bubble schedules, tried after the search under 1F1B has its answer.

Their closed forms don't compare with 1F1B's (one charges sends and bubbles that the other hides), so they stay out of
the search that these order and prove. Once that has chosen, the candidates that promise the shortest steps under the
other schedules are simulated: with M micro-batches on p ranks a step of 1F1B is M + p - 1 slots of which p - 1 are
bubble, and v chunks a GPU divide that by v. One of them is taken only where its simulated step is shorter than the
chosen plan's by more than the search's tolerance, and of those near the shortest the simplest. What was not simulated
and has no bound above the shortest is not known to be slower: where there is such a candidate, a plan that this changed
is called feasible, not optimal.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from autoplan.plan import Strategy
from autoplan.search.constraints import permits
from autoplan.search.degrees import LEAST_BUBBLE, VIRTUAL_STAGES, Integers

if TYPE_CHECKING:
    from autoplan.search.chain import Chain
    from autoplan.search.engine import Decision, Engine
    from autoplan.search.space import Space

# Strategies that are simulated under other schedules however long that takes, and actions that are simulated for more.
MOST_VARIED = 24
MOST_ACTIONS = 200_000


def faster_schedule(engine: Engine, chosen: Decision, tolerance: float) -> tuple[Decision, bool] | None:
    """A decision under another schedule that beats ``chosen`` by more than ``tolerance``, and whether every candidate
    that may be faster than those found was simulated; None where there is none."""
    from autoplan.search.engine import preference

    found: list[Decision] = []
    limit_s = engine.step_s(chosen) / (1 + tolerance)
    pool = (s for s in _pool(engine, chosen.strategy, limit_s) if permits(engine.space.problem, s))
    actions, complete = 0, True
    for tried, other in enumerate(pool):
        least_s = min([limit_s, *map(engine.step_s, found)])
        if time.monotonic() > engine.deadline:
            complete = False
            break
        if tried >= MOST_VARIED and actions > MOST_ACTIONS:
            complete = engine.rules_out(other, least_s)
            if not complete:
                break
            continue
        actions += 2 * other.pipeline * other.virtual_stages * other.micro_batches
        decision = engine.under(other, limit_s)
        if decision is not None and engine.step_s(decision) < limit_s:
            found.append(decision)
    if not found:
        return None
    near_s = min(map(engine.step_s, found)) * (1 + tolerance)
    near = [decision for decision in found if engine.step_s(decision) <= near_s]
    return min(near, key=lambda decision: (preference(decision.strategy), engine.step_s(decision))), complete


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


def _pool(engine: Engine, chosen: Strategy, limit_s: float) -> Iterator[Strategy]:
    """What was chosen under the other schedules, and then what promises the shortest step of all candidates under each
    of them. State is sharded no further than was chosen."""
    problem, candidates = engine.space.problem, engine.space.candidates
    own = tuple(variants(chosen, problem.schedules, len(problem.layers.layers)))
    yield from own
    ranks, micro_batches = candidates.pipeline, candidates.micro_batches
    kept = (engine.bounds.short_bytes <= 0) & (ranks > 1) & (ranks <= micro_batches)
    kept &= (ranks - 1 > LEAST_BUBBLE * (micro_batches + ranks - 1)) & (candidates.zero_stage <= chosen.zero_stage)
    kept &= engine.bounds.works_s < limit_s  # a rank has to do its work under any schedule
    rows = np.nonzero(kept)[0]
    if not len(rows):
        return
    promised = [
        (expected_s, index, name, chunks)
        for name, chunks in _ways(problem.schedules)
        for expected_s, index in zip(_expected_s(engine, rows, name, chunks), rows, strict=True)
    ]
    varied = (
        dataclasses.replace(candidates.strategy(int(index)), schedule=name, virtual_stages=chunks)
        for expected_s, index, name, chunks in sorted(promised)
        if math.isfinite(expected_s)
    )
    yield from (strategy for strategy in varied if strategy not in own)


def _ways(schedules: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Schedules with the chunks a rank that are tried."""
    interleaved = tuple(("interleaved", chunks) for chunks in VIRTUAL_STAGES) if "interleaved" in schedules else ()
    return (*interleaved, *((("zero_bubble", 1),) if "zero_bubble" in schedules else ()))


def _expected_s(engine: Engine, rows: Integers, name: str, chunks: int) -> list[float]:
    """About what each row's step takes: M v + p - 1 turns of the longest chunk (Narayanan et al. 2021, section 2.2), or
    M turns and a third of the p - 1 (Qi et al. 2023), and the end of the step as its bound has it. A chunk is at least
    as long as the longest layer, the mean, and the share of the most common layer that some chunk must hold; and it
    recomputes what memory asks for."""
    space, expected = engine.space, []
    for index in rows:
        strategy = space.candidates.strategy(int(index))
        ranks, micro_batches = strategy.pipeline, strategy.micro_batches
        chain = space.chain(strategy.tensor, strategy.micro_batch_size)
        if ranks * chunks > chain.layers:
            expected.append(math.inf)
            continue
        plain_s, chunk_s = _longest_s(chain, ranks), _longest_s(chain, ranks * chunks)
        end_s = float(engine.bounds.step_s[index]) - (micro_batches + ranks - 1) * plain_s
        waits = (ranks - 1) / (3 if name == "zero_bubble" else 1)
        held = 1 + (ranks - 1) / (ranks * chunks) if name == "interleaved" else 1.0
        again_s = _again_s(space, strategy, chain, held) / (ranks * chunks)
        expected.append((micro_batches * chunks + waits) * (chunk_s + again_s) + max(0.0, end_s))
    return expected


def _again_s(space: Space, strategy: Strategy, chain: Chain, held: float) -> float:
    """Seconds that a micro-batch recomputes in all layers where a rank holds ``held`` times the activations of one
    through the whole model: under the first policy that fits by its mean rank."""
    states, ranks = space.states(strategy), strategy.pipeline
    elements, trainable = space.totals(strategy.tensor)
    resident = states.fixed_bytes + (states.per_element * elements + states.per_trainable * trainable) / ranks
    again_s = 0.0
    for policy in space.policies:
        again_s, saved = chain.whole[policy]
        if resident + (1 + states.reserve) * held * saved <= space.problem.usable_bytes:
            break
    return again_s


def _longest_s(chain: Chain, stages: int) -> float:
    """No split into ``stages`` has a shorter longest stage."""
    counted = np.bincount(chain.kinds)
    common = int(np.argmax(counted))
    layer_s = float(np.diff(chain.period)[chain.kinds == common][0])
    return max(float(chain.period[-1]) / stages, chain.longest_s, -(-int(counted[common]) // stages) * layer_s)
