"""Limits that the user sets beside degrees: memory kept free on every GPU, and the most GPUs to use.

They come with the strategy's keys (``memory_headroom``, ``max_gpus``) and hold whatever else is planned or freed.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from autoplan.errors import StrategyError
from autoplan.search.problem import Problem

LIMITS = ("memory_headroom", "max_gpus")
_MOST_HEADROOM = 0.95


def with_limits(problem: Problem) -> Problem:
    """``problem`` with its limits read from ``forced`` into fields of their own, and said in the assumptions.

    Raises :class:`StrategyError` for values that are none, and for a limit that forced degrees break.
    """
    if not any(key in problem.forced for key in LIMITS):
        return problem
    rest = {key: value for key, value in problem.forced.items() if key not in LIMITS}
    headroom, most = problem.memory_headroom, problem.max_gpus
    said = []
    if "memory_headroom" in problem.forced:
        headroom = _share(problem.forced["memory_headroom"])
        said.append(f"{headroom * 100:g}% of every GPU's memory is kept free, as asked")
    if "max_gpus" in problem.forced:
        most = _count(problem.forced["max_gpus"])
        said.append(f"at most {most} GPUs are used, as asked")
        _check_degrees(rest, most)
    return dataclasses.replace(
        problem,
        forced=rest,
        memory_headroom=headroom,
        max_gpus=most,
        assumptions=(*said, *problem.assumptions),
    )


def _share(value: Any) -> float:
    """0.1, "0.1" or "10%" as 0.1."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", str(value))
    share = float(match[1]) / (100 if match[2] else 1) if match and not isinstance(value, bool) else -1.0
    if not 0 <= share <= _MOST_HEADROOM:
        raise StrategyError(
            f"`memory_headroom` cannot be {value!r}",
            where="strategy key `memory_headroom`",
            legal=f"a share of each GPU's memory from 0 to {_MOST_HEADROOM:.0%}",
            attempt="memory_headroom=10%",
        )
    return share


def _count(value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"\s*[1-9]\d*\s*", str(value)):
        raise StrategyError(
            f"`max_gpus` cannot be {value!r}", where="strategy key `max_gpus`", legal="a whole number from 1"
        )
    return int(value)


def _check_degrees(forced: dict[str, Any], most: int) -> None:
    degrees = {key: int(forced[key]) for key in ("data", "tensor", "pipeline") if str(forced.get(key, "")).isdigit()}
    product = 1
    for degree in degrees.values():
        product *= degree
    if product > most:
        words = " x ".join(f"{key} {degree}" for key, degree in degrees.items())
        raise StrategyError(
            f"{words} needs {product} GPUs, and `max_gpus` is {most}",
            where=", ".join(f"strategy key `{key}`" for key in (*degrees, "max_gpus")),
            legal=f"degrees whose product is at most {most}",
            attempt=f"max_gpus={product}, or smaller degrees",
        )
