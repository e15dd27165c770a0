"""Ranges of a strategy key: what the user leaves open, but not wholly.

``"<=4"``, ``">=2"``, ``"!=3"``, several of them joined by spaces, or the values to choose from, ``"1|2|4"``. A plain
number forces the key and is no range.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.errors import StrategyError

RANGED = ("data", "tensor", "pipeline", "virtual_stages", "context", "expert", "zero_stage", "micro_batch_size")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(<=|>=|!=|<|>)\s*(\d+)")
_RANGE = re.compile(r"\s*(\d+(?:\s*\|\s*\d+)+)?[\s,&]*((?:(?:<=|>=|!=|<|>)\s*\d+[\s,&]*)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """All of ``conditions`` (operator, number) hold, and the value is one of ``among`` where that is not empty."""

    conditions: tuple[tuple[str, int], ...] = ()
    among: tuple[int, ...] = ()

    def allows(self, values: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``values`` lie in the range."""
        allowed = np.isin(values, self.among) if self.among else np.ones(values.shape, dtype=bool)
        for sign, number in self.conditions:
            allowed &= _COMPARE[sign](values, number)
        return allowed

    @property
    def lowest(self) -> int:
        """No value below is allowed."""
        least = [number + (sign == ">") for sign, number in self.conditions if sign in (">=", ">")]
        return max([*least, min(self.among, default=0)])

    def __str__(self) -> str:
        choices = ["|".join(map(str, self.among))] if self.among else []
        return " ".join((*choices, *(f"{sign}{number}" for sign, number in self.conditions)))


def read_range(key: str, value: Any) -> Range | None:
    """The range that ``value`` writes, None where it is none. Raises :class:`StrategyError` for a malformed one."""
    if not isinstance(value, str) or not re.search(r"[<>|]|!=", value):
        return None
    if key not in RANGED:
        raise StrategyError(
            f"`{key}` cannot be {value!r}: it has no range",
            where=f"strategy key `{key}`",
            legal=f"one value; ranges are for {', '.join(RANGED)}",
        )
    found = _RANGE.fullmatch(value)
    if found is not None:
        return Range(
            conditions=tuple((sign, int(number)) for sign, number in _CONDITION.findall(found[2])),
            among=tuple(sorted({int(number) for number in re.findall(r"\d+", found[1] or "")})),
        )
    raise StrategyError(
        f"`{key}` cannot be {value!r}",
        where=f"strategy key `{key}`",
        legal="a number, a range such as <=4 or >=2 <=8, or values to choose from such as 1|2|4",
    )
