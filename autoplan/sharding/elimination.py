"""Exact minimum of a pairwise model by min-sum bucket elimination (Dechter 1999): the oracle, and the way for large
graphs. Variables go in the order of fewest neighbours; a transformer's chain has width two or three.

"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoplan.sharding.model import PairwiseModel

Factor = tuple[tuple[int, ...], NDArray[np.float64]]


def minimise(model: PairwiseModel) -> list[int]:
    """The choice of every variable at an exact minimum; the lowest choice among equals."""
    buckets: list[Factor] = [((index,), costs) for index, costs in enumerate(model.costs)]
    buckets += [(pair, table) for pair, table in model.tables.items()]
    around = dict(enumerate(model.neighbours()))
    decided: list[tuple[int, tuple[int, ...], NDArray[np.int64]]] = []
    while around:
        variable = min(around, key=lambda v: (len(around[v]), v))
        neighbours = around.pop(variable)
        scope = (*sorted(neighbours), variable)
        mine = [factor for factor in buckets if variable in factor[0]]
        buckets = [factor for factor in buckets if variable not in factor[0]]
        joint = sum((_spread(factor, scope) for factor in mine), np.zeros(()))
        decided.append((variable, scope[:-1], joint.argmin(axis=-1)))
        buckets.append((scope[:-1], joint.min(axis=-1)))
        for other in neighbours:
            around[other] |= neighbours - {other}
            around[other].discard(variable)
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
