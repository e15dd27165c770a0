"""A bound on the simulated step of every candidate, whatever its split: what the closed form can't promise.

On stage s of S, with M micro-batches of which w are in flight, T the stage's period (F forward, B backward), A the
periods of the stages after it (:func:`autoplan.cost_models.schedule.lower_bound_s`; P all periods, D all sends):

    step >= P + D + (M - 1) T - A + max(0, A - (w - 1) F) + max(0, A - (w - 1) B)          (M > w)
    step >= P + D + (M - 1) T - A + max(0, A - (w - 1) min(F, B))                         (any M)

With F <= f T and B <= b T (the largest shares that any layer has under any recompute) both are linear in T and A:

    step - P - D >= A + g T,   g = M - 1 - (w - 1) (f + b)         where g >= 1
    step - P - D >=     h T,   h = M - 1 - (w - 1) min(f, b)

For a given step, the most that all stages can hold is found from the last stage to the first, each taking all that both
rows allow (g >= 1: what a stage takes costs those before it no more than it holds). It grows in proportion to
u = step - P - D; it must be P. So step >= P + D + P / K with K what u = 1 holds. With f + b = 1 all stages hold
u / (M - 1) and the bound is the closed form of even stages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    forward_share: Floats,
    backward_share: Floats,
) -> Floats:
    """Seconds that no split of a candidate can beat in the simulator, without its tail; one entry a candidate.

    ``period_s``: periods of all layers; ``longest_s``: of the longest layer; ``sends_s``: the least time of all sends,
    there and back; ``forward_share``, ``backward_share``: the largest shares of a period.
    """
    steps = (micro_batches - 1).astype(float)
    both, lesser = forward_share + backward_share, np.minimum(forward_share, backward_share)
    held = np.zeros(len(stages))  # in units of u, by the stages after this one
    least = np.full(len(stages), np.inf)  # of max(g, h) over stages: what the longest layer weighs at least
    for behind in range(int(stages.max(initial=0))):
        there = stages > behind
        window = micro_batches if schedule == "gpipe" else np.minimum(micro_batches, behind + 1)
        full = steps - (window - 1) * both
        part = steps - (window - 1) * lesser
        usable = (full >= 1) & (micro_batches > window)
        with np.errstate(divide="ignore"):
            takes = np.where(part > 0, 1 / part, np.inf)
            takes = np.where(usable, np.minimum(takes, np.maximum(0.0, 1 - held) / np.where(usable, full, 1.0)), takes)
        held = np.where(there, held + takes, held)
        least = np.where(
            there, np.minimum(least, np.where(usable, np.maximum(full, part), np.maximum(part, 0.0))), least
        )
    with np.errstate(invalid="ignore"):
        even = np.where(np.isfinite(held) & (held > 0), period_s / held, 0.0)
    above = np.maximum(even, longest_s * np.where(np.isfinite(least), least, 0.0))
    return np.maximum(micro_batches * longest_s, period_s + sends_s + above)
