"""Stage boundaries that the user fixes: read from layer numbers or names, and priced as the only split."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoplan.errors import StrategyError
from autoplan.plan import Strategy
from autoplan.search.split import Split
from autoplan.search.timing import step_s

if TYPE_CHECKING:
    from autoplan.search.milp import Solution
    from autoplan.search.space import Space

Cuts = tuple[int, ...]
_WHERE = "strategy key `stages`"
_LEGAL = "first and last layer of each stage, 0-15,16-31; or the first layers, by number or name"


def read_stages(names: Sequence[str], value: Any) -> Cuts:
    """``value`` as cuts: the first layer of each stage and, last, the number of layers.

    ``"0-15,16-31"`` gives spans (a number beside spans is a stage of one layer); without a span every item is the first
    layer of a stage, by number or by name (``layers.16`` of ``model.layers.16``). A list of items is read alike, a pair
    as a span. Raises :class:`StrategyError` where the stages do not hold every layer once, in order.
    """
    items = _items(value)
    spans = [_span(item) for item in items]
    if any(span is not None for span in spans):
        return _joined(names, [span or (_layer(names, item),) * 2 for span, item in zip(spans, items, strict=True)])
    firsts = [_layer(names, item) for item in items]
    if firsts and firsts[0] != 0:
        firsts = [0, *firsts]
    for before, after in itertools.pairwise(firsts):
        if after <= before:
            raise _wrong(f"the stages are not in order: layer {after} comes after layer {before}")
    return (*firsts, len(names))


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        items: list[Any] = [item.strip() for item in re.split(r"[,|]", value) if item.strip()]
    elif isinstance(value, Sequence):
        items = list(value)
    else:
        items = []
    if not items:
        raise _wrong(f"`stages` cannot be {value!r}")
    return items


def _span(item: Any) -> tuple[int, int] | None:
    if isinstance(item, str) and (match := re.fullmatch(r"(\d+)\s*-\s*(\d+)", item)):
        return int(match[1]), int(match[2])
    if isinstance(item, (tuple, list)) and len(item) == 2 and all(type(end) is int for end in item):
        return item[0], item[1]
    return None


def _layer(names: Sequence[str], item: Any) -> int:
    if type(item) is int or (isinstance(item, str) and item.isdigit()):
        number = int(item)
        if not 0 <= number < len(names):
            raise _wrong(f"there is no layer {number}: the model has {len(names)}, 0 to {len(names) - 1}")
        return number
    found = [index for index, name in enumerate(names) if name == item or name.endswith(f".{item}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise _wrong(f"{item!r} names {len(found)} layers: {', '.join(names[index] for index in found[:4])}")
    near = difflib.get_close_matches(str(item), names, n=3)
    raise _wrong(f"the model has no layer {item!r}", f"did you mean {' or '.join(near)}?" if near else "")


def _joined(names: Sequence[str], spans: Sequence[tuple[int, int]]) -> Cuts:
    at = 0
    for first, last in spans:
        if first != at or last < first:
            raise _wrong(f"the stages do not hold every layer once, in order: {first}-{last} where layer {at} is next")
        at = last + 1
    if at != len(names):
        raise _wrong(f"the stages hold layers 0 to {at - 1}, and the model has {len(names)}, 0 to {len(names) - 1}")
    return (*(first for first, _ in spans), len(names))


def _wrong(what: str, attempt: str = "") -> StrategyError:
    return StrategyError(what, where=_WHERE, legal=_LEGAL, attempt=attempt)


def fixed_split(space: Space, strategy: Strategy, cuts: Cuts, *, cutoff_s: float) -> Solution | None:
    """The split at ``cuts``, with the least recompute that fits; None where none does, it costs more, or the strategy
    has another number of stages."""
    from autoplan.search.milp import Solution

    if strategy.pipeline * strategy.virtual_stages != len(cuts) - 1:
        return None
    times = space.tables(strategy).of_split(cuts).times()
    value_s = times.closed_form_s
    if not math.isfinite(value_s) or value_s > cutoff_s:
        return None
    periods = (f + b for f, b in zip(times.forward_s, times.backward_s, strict=True))
    split = Split(cuts=cuts, value_s=value_s, bottleneck_s=max(periods), tail_s=max(times.tail_s))
    return Solution(split=split, lower_bound_s=value_s, proven_by="enumeration", simulated_bound_s=step_s(times))
