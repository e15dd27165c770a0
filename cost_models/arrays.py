"""What Python does for numbers and numpy for arrays, so that one formula prices one layer, or many layers at once."""

from __future__ import annotations

from typing import Any

import numpy as np

# A float, or an array of them: as those who call a formula put in.
Number = Any


def larger(one: Number, other: Number) -> Number:
    """The larger of each."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def smaller(one: Number, other: Number) -> Number:
    """The smaller of each."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.minimum(one, other)
    return min(one, other)


def chosen(condition: Number, one: Number, other: Number) -> Number:
    """``one`` where the condition holds, else ``other``."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, other)
    return one if condition else other


def some(values: Number) -> bool:
    """Whether any is there: true, or not 0."""
    return bool(values.any()) if isinstance(values, np.ndarray) else bool(values)
