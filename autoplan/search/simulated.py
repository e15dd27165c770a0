"""A bound on the simulated step of every candidate, whatever its split: what the closed form can't promise.

On stage s of S, with M micro-batches of which w are in flight, T the stage's period (F forward, B backward), A the
periods of the stages after it (:func:`autoplan.cost_models.schedule.lower_bound_s`; P all periods, D all sends):

    step >= P + D + (M - 1) T - A + (A - (w - 1) F) + (A - (w - 1) B)          (M > w)
    step >= P + D + (M - 1) T - A + (A - (w - 1) min(F, B))                    (any M)

F and B sum to T, and the smaller is at most x T with x the smaller of the largest shares that any layer has (and at
most 1/2). So both rows are linear in T and A:

    step - P - D >= A + g T,   g = M - w                where g >= 1
    step - P - D >=     h T,   h = M - 1 - (w - 1) x

For a given step, the most that all stages can hold is found from the last stage to the first, each taking all that both
rows allow (g >= 1: what a stage takes costs those before it no more than it holds). It grows in proportion to
u = step - P - D; it must be P. So step >= P + D + P / K with K what u = 1 holds. With M > S every stage holds
u / (M - 1), and the bound is the closed form of even stages. If besides some stage holds at least t more than that,
its rows and those of the stages before it give

    step >= 2 P + D + (M - S - 1) t
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from autoplan.plan import Strategy
from autoplan.search.arcs import StageArcs
from autoplan.search.milp import Solution

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def simulated_bound_s(
    *,
    schedule: str,
    stages: Integers,
    micro_batches: Integers,
    period_s: Floats,
    longest_s: Floats,
    sends_s: Floats,
    lesser_share: Floats,
) -> Floats:
    """Seconds that no split of a candidate can beat in the simulator, without its tail; one entry a candidate.

    ``period_s``: periods of all layers; ``longest_s``: of the longest layer; ``sends_s``: the least time of all sends,
    there and back; ``lesser_share``: no stage's forward and backward both take a larger share of its period.
    """
    held, least = _weights(schedule, stages, micro_batches, lesser_share)
    with np.errstate(invalid="ignore"):
        even = np.where(np.isfinite(held) & (held > 0), period_s / held, 0.0)
    above = np.maximum(even, longest_s * np.where(np.isfinite(least), least, 0.0))
    beyond = micro_batches - stages - 1
    above = np.maximum(above, np.where(beyond >= 0, period_s + beyond * longest_s, 0.0))
    return np.maximum(micro_batches * longest_s, period_s + sends_s + above)


def _weights(schedule: str, stages: Integers, micro_batches: Integers, lesser_share: Floats) -> tuple[Floats, Floats]:
    """What the periods of all stages weigh in units of the longest wait, and what the longest layer weighs at least
    (inf where no stage is full), of each candidate."""
    order = np.argsort(-stages, kind="stable")  # those that still have a stage are then the first
    counts = np.searchsorted(-stages[order], -np.arange(int(stages.max(initial=0))), side="left").tolist()
    batches, share = micro_batches[order], lesser_share[order]
    steps = (batches - 1).astype(float)
    held = np.zeros(len(stages))  # in units of u, by the stages after this one
    least = np.full(len(stages), np.inf)  # of max(g, h) over stages: what the longest layer weighs at least
    for behind, count in enumerate(counts):
        own = batches[:count]
        window = own if schedule == "gpipe" else np.minimum(own, behind + 1)
        full = (own - window).astype(float)
        part = steps[:count] - (window - 1) * share[:count]
        usable = full >= 1
        with np.errstate(divide="ignore"):
            takes = np.where(part > 0, 1 / part, np.inf)
            fills = np.maximum(0.0, 1 - held[:count]) / np.where(usable, full, 1.0)
            takes = np.where(usable, np.minimum(takes, fills), takes)
        held[:count] += takes
        weight = np.where(usable, np.maximum(full, part), np.maximum(part, 0.0))
        least[:count] = np.minimum(least[:count], weight)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return held[back], least[back]


def with_simulated_bound(arcs: StageArcs, solution: Solution | None, left_out_s: float) -> Solution | None:
    """``solution`` with the bound of every split of its strategy: of those in the table from the least sum and the
    least longest period that any has, recompute included; ``left_out_s`` is that of the others."""
    if solution is None or solution.bound is None:
        if math.isinf(left_out_s):
            return solution
        return Solution(split=None, lower_bound_s=math.inf, proven_by="bound", simulated_bound_s=left_out_s)
    strategy, bound = arcs.tables.strategy, solution.bound
    sends = arcs.most_sends_s
    period = bound.sum_s - sum(sends)
    longest = bound.bottleneck_s - (max(sends) if strategy.schedule != "gpipe" else 0.0)
    found = simulated_bound_s(
        schedule=strategy.schedule,
        stages=np.array([strategy.pipeline]),
        micro_batches=np.array([strategy.micro_batches]),
        period_s=np.array([max(0.0, period)]),
        longest_s=np.array([max(0.0, longest)]),
        sends_s=np.zeros(1),
        lesser_share=np.array([0.5 if strategy.zero_stage > 1 else arcs.tables.chain.lesser_share]),
    )
    return dataclasses.replace(solution, simulated_bound_s=min(float(found[0]), left_out_s))


def simulated_with_longer_s(strategy: Strategy, period_s: float, longer_than_s: float) -> float:
    """Seconds that no split beats in which some stage takes longer than ``longer_than_s``; inf where none can."""
    if longer_than_s >= period_s:
        return math.inf
    return simulated_with_longest_s(strategy, period_s, longer_than_s)


def simulated_with_longest_s(strategy: Strategy, period_s: float, longest_s: float) -> float:
    """Seconds that no split beats in which some stage takes at least ``longest_s``."""
    beyond = strategy.micro_batches - strategy.pipeline - 1
    whole = 2 * period_s + beyond * longest_s if beyond >= 0 else period_s
    return max(strategy.micro_batches * longest_s, whole)
