"""Sequence parallelism on or off, where it is left open: the same search again, every tensor axis over the sequence.

It runs only where a lower bound leaves room below the best found without, so that what is found together is proven as
each search is. Shares of the sequence are taken where they gain more than the tolerance, or where nothing fits without.
"""

from __future__ import annotations

import dataclasses
import time

from autoplan.errors import StrategyError
from autoplan.search.engine import Counts, Engine, Found
from autoplan.search.space import open_space


def with_shares(plain: Engine, found: Found | None, tolerance: float) -> tuple[Engine, Found | None]:
    """The search, with or without sequence parallelism, that found the better plan, and what both know together."""
    shares = _over_sequence(plain)
    if shares is None or not _may_gain(shares, found):
        return plain, found
    other = shares.run(tolerance)
    if other is None:
        return plain, found
    if found is None:
        return shares, other
    gains = other.chosen.strategy.sequence_parallel and shares.step_s(other.chosen) < (1 - tolerance) * plain.step_s(
        found.chosen
    )
    return (shares, _together(other, found)) if gains else (plain, _together(found, other))


def _over_sequence(plain: Engine) -> Engine | None:
    """The other search, None where it is not offered or the key is given."""
    problem = plain.space.problem
    if problem.sequence_kinds is None or "sequence_parallel" in problem.forced or time.monotonic() > plain.deadline:
        return None
    try:
        space = open_space(dataclasses.replace(problem, over_sequence=True))
    except StrategyError:  # the forced degree does not divide the sequence
        return None
    return Engine(space=space, solver=plain.solver, deadline=plain.deadline)


def _may_gain(shares: Engine, found: Found | None) -> bool:
    rows = (shares.space.candidates.tensor > 1) & (shares.bounds.short_bytes <= 0)
    limit = float("inf") if found is None else found.best.value_s
    return bool((shares.bounds.step_s[rows] < limit).any())


def _together(chosen: Found, other: Found) -> Found:
    """What was chosen of one search, with the bounds of both."""
    best = min(chosen.best, other.best, key=lambda decision: decision.value_s)
    return dataclasses.replace(
        chosen,
        best=best,
        lower_bound_s=min(chosen.lower_bound_s, other.lower_bound_s),
        simulated_bound_s=min(chosen.simulated_bound_s, other.simulated_bound_s),
        proven=chosen.proven and other.proven,
        confirmed=chosen.confirmed + other.confirmed,
        counts=Counts(
            considered=chosen.counts.considered + other.counts.considered,
            pruned_by_memory=chosen.counts.pruned_by_memory + other.counts.pruned_by_memory,
            pruned_by_bound=chosen.counts.pruned_by_bound + other.counts.pruned_by_bound,
            solved=chosen.counts.solved + other.counts.solved,
        ),
    )
