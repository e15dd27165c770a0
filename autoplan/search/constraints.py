"""Limits that the user sets beside degrees: memory kept free, the most GPUs, ranges of degrees, fixed stage boundaries,
and axes kept inside a node.

They come with the strategy's keys (``memory_headroom``, ``max_gpus``, ``pipeline<=4`` as ``{"pipeline": "<=4"}``,
``stages``, ``inside_node``) and hold whatever else is planned or freed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.errors import StrategyError
from autoplan.plan import Strategy
from autoplan.search.boundaries import read_stages
from autoplan.search.degrees import Candidates
from autoplan.search.problem import Problem
from autoplan.search.ranges import read_range

LIMITS = ("memory_headroom", "max_gpus", "stages", "inside_node")
AXES = ("tensor", "context", "expert", "data", "pipeline")
_MOST_HEADROOM = 0.95


def with_limits(problem: Problem) -> Problem:
    """``problem`` with its limits read from ``forced`` into fields of their own, and said in the assumptions; ``base``
    is the problem as it was asked.

    Raises :class:`StrategyError` for values that are none, and for a limit that forced degrees break.
    """
    ranges = {key: read_range(key, value) for key, value in problem.forced.items() if key not in LIMITS}
    ranged = {key: found for key, found in ranges.items() if found is not None}
    if not ranged and not any(key in problem.forced for key in LIMITS):
        return problem
    rest = {key: value for key, value in problem.forced.items() if key not in LIMITS and key not in ranged}
    changed = dataclasses.replace(problem, forced=rest, ranges={**problem.ranges, **ranged}, base=problem)
    said = [f"{key} {found}, as asked" for key, found in ranged.items()]
    for key, read in (
        ("memory_headroom", _with_headroom),
        ("max_gpus", _with_most),
        ("stages", _with_stages),
        ("inside_node", _inside_node),
    ):
        if key in problem.forced:
            changed, sentence = read(changed, problem.forced[key])
            said.append(sentence)
    if "virtual_stages" in ranged and ranged["virtual_stages"].lowest > 1:  # only this schedule has them
        changed = dataclasses.replace(changed, forced={"schedule": "interleaved", **changed.forced})
    lowest = ranged["tensor"].lowest if "tensor" in ranged else 1
    if lowest > problem.cluster.gpus_per_node and problem.max_tensor is None:
        changed = dataclasses.replace(changed, max_tensor=problem.cluster.gpus)
    return dataclasses.replace(changed, assumptions=(*said, *problem.assumptions))


def asked(problem: Problem) -> Mapping[str, Any]:
    """All that the user forced or limited, as it was given (pairs as lists, as a plan file has them)."""
    given = problem.base.forced if problem.base is not None else problem.forced
    return {key: _listed(value) for key, value in given.items()}


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, (tuple, list)) else value


def freed(problem: Problem) -> Problem:
    """``problem`` without what was forced; its limits stay, but for the stage boundaries."""
    return dataclasses.replace(problem, forced={}, stages=())


def allowed(problem: Problem, candidates: Candidates) -> Candidates:
    """The candidates that keep to the ranges of ``problem``, and to the axes that stay inside a node."""
    if not problem.ranges and not problem.inside_node:
        return candidates
    keep = np.ones(len(candidates), dtype=bool)
    for key, found in problem.ranges.items():
        keep &= found.allows(np.asarray(getattr(candidates, key, np.ones(len(candidates), dtype=np.int64))))
    for axis in problem.inside_node:
        keep &= _stays_inside(candidates, axis, problem.cluster.gpus_per_node)
    columns = {
        column.name: getattr(candidates, column.name)[keep]
        for column in dataclasses.fields(candidates)
        if isinstance(getattr(candidates, column.name), np.ndarray)
    }
    return dataclasses.replace(candidates, **columns)


def permits(problem: Problem, strategy: Strategy) -> bool:
    """Whether one strategy keeps to the ranges of ``problem``, and to the axes that stay inside a node."""
    clusters = problem.cluster.groups or (problem.cluster,)
    in_range = all(found.allows(np.array([getattr(strategy, key)])).all() for key, found in problem.ranges.items())
    node = min(cluster.gpus_per_node for cluster in clusters)
    return in_range and all(bool(_stays_inside(strategy, axis, node)) for axis in problem.inside_node)


def _stays_inside(each: Candidates | Strategy, axis: str, gpus_per_node: int) -> NDArray[np.bool_] | bool:
    """Whether no group of ``axis`` crosses a node: ranks are laid out tensor first, then data, then pipeline."""
    inner: dict[str, Any] = {"tensor": each.tensor, "data": each.tensor * each.data, "pipeline": each.gpus}
    if axis not in inner:
        return True  # it lies inside the data axis, or no candidate has it
    fits = (gpus_per_node % inner[axis] == 0) | (each.gpus <= gpus_per_node)
    return fits | (getattr(each, axis) == 1)


Limited = tuple[Problem, str]


def _with_headroom(problem: Problem, value: Any) -> Limited:
    share = _share(value)
    sentence = f"{share * 100:g}% of every GPU's memory is kept free, as asked"
    return dataclasses.replace(problem, memory_headroom=share), sentence


def _with_most(problem: Problem, value: Any) -> Limited:
    most = _count(value)
    _check_degrees(dict(problem.forced), most)
    return dataclasses.replace(problem, max_gpus=most), f"at most {most} GPUs are used, as asked"


def _with_stages(problem: Problem, value: Any) -> Limited:
    """The pipeline degree follows from the boundaries, and where that is forced the stages a GPU do."""
    cuts = read_stages([layer.name for layer in problem.layers.layers], value)
    degrees = _degrees_of(problem, len(cuts) - 1)
    spans = ", ".join(f"{first}-{end - 1}" for first, end in itertools.pairwise(cuts))
    changed = dataclasses.replace(problem, stages=cuts, forced={**problem.forced, **degrees})
    return changed, f"stage boundaries as asked: layers {spans}"


def _degrees_of(problem: Problem, stages: int) -> dict[str, int]:
    """``pipeline`` and, above 1, ``virtual_stages``, whose product is ``stages``."""
    given = {
        key: int(problem.forced[key])
        for key in ("pipeline", "virtual_stages")
        if str(problem.forced.get(key, "")).isdigit() and int(problem.forced[key]) > 0
    }
    virtual = given.get("virtual_stages", 1)
    if "pipeline" in given and "virtual_stages" not in given:
        virtual = max(1, stages // given["pipeline"])
    pipeline = given.get("pipeline", stages // virtual)
    if pipeline * virtual == stages:
        return {"pipeline": pipeline, **({"virtual_stages": virtual} if virtual > 1 else {})}
    words = " x ".join(f"`{key}` {number}" for key, number in given.items())
    raise StrategyError(
        f"{words} and `stages`, which are {stages}, contradict each other",
        where="strategy keys " + ", ".join(f"`{key}`" for key in (*given, "stages")),
        legal=f"pipeline {stages}, or pipeline x virtual_stages that is {stages}",
        attempt="leave either out",
    )


def _inside_node(problem: Problem, value: Any) -> Limited:
    items = re.split(r"[,|\s]+", value.strip()) if isinstance(value, str) else list(value or ())
    for item in items:
        if item not in AXES:
            raise StrategyError(
                f"`inside_node` cannot hold {item!r}",
                where="strategy key `inside_node`",
                legal=", ".join(AXES),
                attempt="inside_node=tensor",
            )
    if not items:
        raise StrategyError(f"`inside_node` cannot be {value!r}", legal=", ".join(AXES))
    return dataclasses.replace(problem, inside_node=tuple(items)), f"inside a node, as asked: {', '.join(items)}"


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
