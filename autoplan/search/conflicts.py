"""Which of the user's constraints contradict each other, found by leaving each out in turn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from autoplan.search.problem import Problem

Holds = Callable[[Problem], bool]


def without(problem: Problem, key: str) -> Problem:
    """The problem as it was asked, less one of its keys."""
    base = problem.base or problem
    return dataclasses.replace(base, forced={k: v for k, v in base.forced.items() if k != key})


def conflict(problem: Problem, holds: Holds) -> tuple[str, ...]:
    """The constraints of ``problem`` that cannot hold together, as text; any one of them left out leaves the others
    possible. () where even without all of them ``holds`` says no.

    Each key is left out in turn and stays out where the others are impossible without it: what remains cannot be made
    smaller. One key alone contradicts the global batch if a larger batch would do, or else the model or the cluster.
    """
    base = problem.base or problem
    if not base.forced or not holds(dataclasses.replace(base, forced={})):
        return ()
    kept = dict(base.forced)
    for key in base.forced:
        fewer = {k: v for k, v in kept.items() if k != key}
        if not holds(dataclasses.replace(base, forced=fewer)):
            kept = fewer
    named = tuple(f"`{key}` {_worded(value)}" for key, value in kept.items())
    if len(kept) == 1 and holds(dataclasses.replace(base, forced=kept, global_batch=_larger(base))):
        return (*named, f"the global batch {base.global_batch}")
    return named


def contradiction(parts: tuple[str, ...]) -> str:
    """A sentence of what :func:`conflict` found."""
    if not parts:
        return ""
    if len(parts) == 1:
        return f"{parts[0]} cannot be kept here"
    return f"{', '.join(parts[:-1])} and {parts[-1]} contradict each other"


def _worded(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _larger(problem: Problem) -> int:
    """A batch that the numbers among the forced values divide, as small as that goes."""
    numbers = [int(value) for value in problem.forced.values() if str(value).isdigit() and int(value)]
    return problem.global_batch * math.lcm(1, *numbers)
