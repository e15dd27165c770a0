"""Exact minimum of a pairwise model by min-sum bucket elimination (Dechter 1999): the oracle, and the way for large
graphs. Variables go in the order of fewest neighbours; a transformer's chain has width two or three.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoplan.sharding.model import PairwiseModel

Factor = tuple[tuple[int, ...], NDArray[np.float64]]


def order(model: PairwiseModel, *, largest: float = math.inf) -> list[int] | None:
    """Variables, always one with the fewest neighbours next; None where that makes a table of more than ``largest``
    numbers."""
    sizes = [len(costs) for costs in model.costs]
    around = dict(enumerate(model.neighbours()))
    queue = [(len(neighbours), variable) for variable, neighbours in around.items()]
    heapq.heapify(queue)
    found: list[int] = []
    while queue:
        degree, variable = heapq.heappop(queue)
        if variable not in around or degree != len(around[variable]):
            continue  # an entry from before its neighbours changed
        neighbours = around.pop(variable)
        if math.prod(sizes[other] for other in (variable, *neighbours)) > largest:
            return None
        found.append(variable)
        for other in neighbours:
            around[other] |= neighbours - {other}
            around[other].discard(variable)
            heapq.heappush(queue, (len(around[other]), other))
    return found


def minimise(model: PairwiseModel, ordered: Sequence[int] | None = None) -> list[int]:
    """The choice of every variable at an exact minimum; the lowest choice among equals. ``ordered``: see
    :func:`order`."""
    buckets: list[list[Factor]] = [[((index,), costs)] for index, costs in enumerate(model.costs)]
    when = {variable: at for at, variable in enumerate(ordered if ordered is not None else order(model) or ())}
    for pair, table in model.tables.items():
        buckets[min(pair, key=when.__getitem__)].append((pair, table))
    decided: list[tuple[int, tuple[int, ...], NDArray[np.int64]]] = []
    for variable in when:
        scope = (*sorted({other for factor in buckets[variable] for other in factor[0]} - {variable}), variable)
        joint = sum((_spread(factor, scope) for factor in buckets[variable]), np.zeros(()))
        decided.append((variable, scope[:-1], joint.argmin(axis=-1)))
        if len(scope) > 1:
            buckets[min(scope[:-1], key=when.__getitem__)].append((scope[:-1], joint.min(axis=-1)))
    chosen: dict[int, int] = {}
    for variable, scope, best in reversed(decided):
        chosen[variable] = int(best[tuple(chosen[other] for other in scope)])
    return [chosen[variable] for variable in range(len(model.costs))]


def _spread(factor: Factor, scope: tuple[int, ...]) -> NDArray[np.float64]:
    """A factor's table with one axis for each variable of ``scope``, in its order."""
    variables, table = factor
    order = sorted(range(len(variables)), key=lambda axis: scope.index(variables[axis]))
    sizes = {variable: table.shape[axis] for axis, variable in enumerate(variables)}
    return table.transpose(order).reshape([sizes.get(variable, 1) for variable in scope])
