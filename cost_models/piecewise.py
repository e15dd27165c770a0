"""A price at many values, asked for at few: prices of transfers are straight lines in the bytes but for some kinks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# As many distinct values are each asked for; of more, those that a straight line between two others does not tell.
FEW = 6
SMALL = 512  # values that Python sorts out faster than numpy
# Relative to the price: three points on one line.
_STRAIGHT = 1e-12


def at_values(price: Callable[[float], float], values: Floats) -> Floats:
    """``price`` at every value, asking once for equal ones.

    Between two values of which one halfway lies on the line between them, all others are taken to: exact for
    prices that are piecewise straight and bend in one direction, as the cheaper of two algorithms does. A plan is
    priced again exactly in any case.
    """
    flat = np.ravel(values).tolist()
    if len(flat) <= SMALL and len(found := set(flat)) <= FEW:
        by_value = {value: price(value) for value in found}
        return np.array([by_value[value] for value in flat]).reshape(np.shape(values))
    distinct, back = np.unique(values, return_inverse=True)
    prices = np.zeros(len(distinct))
    known = int(np.searchsorted(distinct, 0.0, side="right"))  # nothing to send has a price of its own
    for at in range(known):
        prices[at] = price(float(distinct[at]))
    if len(distinct) - known <= FEW:
        for at in range(known, len(distinct)):
            prices[at] = price(float(distinct[at]))
    else:
        last = len(distinct) - 1
        prices[known], prices[last] = price(float(distinct[known])), price(float(distinct[last]))
        _between(price, distinct, prices, known, last)
    return prices[back].reshape(np.shape(values))


def _between(price: Callable[[float], float], values: Floats, prices: Floats, low: int, high: int) -> None:
    """Fill in the prices between two that are known."""
    if high - low < 2:
        return
    halfway = int(np.searchsorted(values, (values[low] + values[high]) / 2))
    middle = min(max(halfway, low + 1), high - 1)
    prices[middle] = price(float(values[middle]))
    slope = (prices[high] - prices[low]) / (values[high] - values[low])
    straight = prices[low] + slope * (values[middle] - values[low])
    if abs(straight - prices[middle]) <= _STRAIGHT * abs(prices[middle]):
        inner = slice(low + 1, middle), slice(middle + 1, high)
        for part in inner:
            prices[part] = prices[low] + slope * (values[part] - values[low])
        return
    _between(price, values, prices, low, middle)
    _between(price, values, prices, middle, high)
