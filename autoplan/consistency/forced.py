"""What was forced is what the plan does."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from autoplan.consistency.problems import EXACT, Problem

if TYPE_CHECKING:
    from autoplan.plan import Plan

_NUMBERS = ("data", "tensor", "pipeline", "virtual_stages", "context", "expert", "zero_stage", "micro_batch_size")
_LIMITS = ("memory_headroom", "max_gpus", "stages", "inside_node")
_KEYS = (*_NUMBERS, "schedule", "recompute", "sequence_parallel", *_LIMITS)
_AXES = ("tensor", "context", "expert", "data", "pipeline")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(<=|>=|!=|<|>)\s*(\d+)")
_RANGE = re.compile(r"\s*(\d+(?:\s*\|\s*\d+)+)?[\s,&]*((?:(?:<=|>=|!=|<|>)\s*\d+[\s,&]*)*)")


def forced(plan: Plan) -> Iterator[Problem]:
    """Every key that was given, and the strategy."""
    strategy = plan.strategy
    for key, value in plan.forced.items():
        where = f"forced.{key}"
        if key not in _KEYS:
            yield where, f"is no key of a strategy: {', '.join(_KEYS)}"
        elif key in _NUMBERS and not _allows(value, getattr(strategy, key)):
            yield where, f"{value!r}, but the plan's strategy has {key} = {getattr(strategy, key)}"
        elif key == "schedule" and value != strategy.schedule and strategy.pipeline > 1:  # one stage runs all alike
            yield where, f"{value!r}, but the plan's strategy has schedule = {strategy.schedule}"
        elif key == "sequence_parallel" and str(value).lower() != str(strategy.sequence_parallel).lower():
            yield where, f"{value!r}, but the plan's strategy has sequence_parallel = {strategy.sequence_parallel}"
        elif key == "recompute" and (others := _policies(plan) - {value}):
            yield where, f"{value!r}, but layers of the plan recompute {', '.join(sorted(others))}"
        elif key in _LIMITS:
            yield from ((where, problem) for problem in _limit(plan, key, value))
    yield from _said(plan)


def _said(plan: Plan) -> Iterator[Problem]:
    """The reason of the plan says what was forced; limits and ranges alone force nothing."""
    items = [f"{key} {value}" for key, value in plan.forced.items()]
    written = ", ".join(items)
    _, there, rest = plan.case.partition("Forced: ")
    values = [value for key, value in plan.forced.items() if key not in _LIMITS]
    must = any(not isinstance(value, str) or not re.search(r"[<>|]|!=", value) for value in values)
    # In any order: not every tool that writes JSON keeps that of keys.
    same = rest[len(written) : len(written) + 1] in (".", ";") and all(item in rest[: len(written)] for item in items)
    if same != bool(there) or (must and not there):
        yield "forced", f"{written or 'nothing'}, but the plan's reason is: {plan.case}"


def _policies(plan: Plan) -> set[str]:
    return {policy for stage in plan.stages for policy, number in stage.recompute.items() if number}


def _allows(value: Any, number: int) -> bool:
    """Whether ``value``, a number or a range as :mod:`autoplan.search.ranges` reads it, allows ``number``. The search
    is not asked: it takes seconds to import, and a plan is shown in one."""
    if isinstance(value, bool):
        return False
    if not isinstance(value, str):
        return bool(value == number)
    if value.strip().isdigit():
        return int(value) == number
    found = _RANGE.fullmatch(value)
    if found is None or not (found[1] or found[2]):
        return False
    among = [int(choice) for choice in re.findall(r"\d+", found[1] or "")]
    conditions = [(_COMPARE[sign], int(than)) for sign, than in _CONDITION.findall(found[2])]
    return (not among or number in among) and all(holds(number, than) for holds, than in conditions)


def _limit(plan: Plan, key: str, value: Any) -> Iterator[str]:
    if key == "memory_headroom":
        share = headroom(value)
        if share is None:
            yield f"{value!r} is no share of a GPU's memory"
            return
        for stage in plan.stages:
            if stage.peak_memory_bytes > (usable := plan.cluster.memory_of(stage) * (1 - share)) * (1 + EXACT):
                yield f"{value!r}, which leaves {usable} bytes, but a stage takes {stage.peak_memory_bytes}"
    elif key == "max_gpus":
        if isinstance(value, bool) or not str(value).strip().isdigit() or int(value) < plan.gpus_used:
            yield f"{value!r}, but the plan uses {plan.gpus_used} GPUs"
    elif key == "inside_node":
        names = re.split(r"[,|\s]+", value.strip()) if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not set(map(str, names)) <= set(_AXES):
            yield f"{value!r}, but it must name axes: {', '.join(_AXES)}"
        else:
            yield from _inside(plan, [str(name) for name in names])
    else:
        yield from _boundaries(plan, value)


def _inside(plan: Plan, names: list[str]) -> Iterator[str]:
    strategy = plan.strategy
    node = max([group.gpus_per_node for group in plan.cluster.groups] or [plan.cluster.gpus_per_node])
    widths = {"tensor": strategy.tensor, "data": strategy.tensor * strategy.data, "pipeline": strategy.gpus}
    for name in names:
        width = widths.get(name, 1)
        if getattr(strategy, name) > 1 and node % width and strategy.gpus > node:
            yield f"{name!r}, but its groups of {width} GPUs cross nodes of {node}"


def headroom(value: Any) -> float | None:
    """0.1, "0.1" or "10%" as 0.1; None for what is no share."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", str(value))
    if match is None or isinstance(value, bool):
        return None
    share = float(match[1]) / (100 if match[2] else 1)
    return share if 0 <= share < 1 and math.isfinite(share) else None


def _boundaries(plan: Plan, value: Any) -> Iterator[str]:
    """Spans of layers, or first layers by number or name, as :mod:`autoplan.search.boundaries` reads them."""
    items = re.split(r"\s*[,|]\s*", value.strip(" ,|")) if isinstance(value, str) else value
    spans = [(stage.first_layer, stage.last_layer) for stage in plan.stages]
    read = [_span(plan, item) for item in items] if isinstance(items, list) else []
    given = [(first, last) for first, last in read if first is not None]
    if given and all(last is None for _, last in given) and given[0][0] != 0:
        given = [(0, None), *given]  # the first stage may go unsaid
    one_by_one = any(last is not None for _, last in given)
    asked = [(first, first if last is None and one_by_one else last) for first, last in given]
    agrees = len(given) >= len(read) and len(asked) == len(spans)
    if not agrees or any(
        first != s[0] or last not in (None, s[1]) for (first, last), s in zip(asked, spans, strict=True)
    ):
        yield f"{value!r}, but the plan's stages are layers {', '.join(f'{first}-{last}' for first, last in spans)}"


def _span(plan: Plan, item: Any) -> tuple[int | None, int | None]:
    """The first layer of a stage, None for what names none, and its last where that is said."""
    if isinstance(item, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", item)):
        return int(match[1]), int(match[2])
    if isinstance(item, list) and len(item) == 2 and all(type(end) is int for end in item):
        return item[0], item[1]
    if type(item) is int or (isinstance(item, str) and item.isdigit()):
        return int(item), None
    found = [i for i, name in enumerate(plan.model.layers) if name == item or name.endswith(f".{item}")]
    return (found[0] if len(found) == 1 else None), None
