"""The tensor-parallel choice as a pairwise problem, and its exact reduction.

    minimise  sum_i c_i(k_i) + sum_(i,j) t_ij(k_i, k_j)      over one choice k_i for every variable i

Variables are operators (their options), parameters (how they are stored) and demands ("is value v wanted as placement
p by anyone": a conversion is paid once however many consumers share it). Forbidden pairs cost infinity.

:func:`merge_followers` eliminates variables with at most two neighbours exactly: a chain of views and element-wise
operators between two matrix products becomes one table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(slots=True)
class PairwiseModel:
    """``costs[i]``: of each choice of variable i; ``tables[(i, j)]``, i < j: of each pair of choices."""

    costs: list[Table] = field(default_factory=list)
    tables: dict[tuple[int, int], Table] = field(default_factory=dict)

    def variable(self, costs: Sequence[float]) -> int:
        """A new variable with one choice for each of ``costs``."""
        self.costs.append(np.array(costs, dtype=float))
        return len(self.costs) - 1

    def pair(self, first: int, second: int, table: Table) -> None:
        """Add ``table[k_first, k_second]`` to the objective."""
        if first > second:
            first, second, table = second, first, table.T
        known = self.tables.get((first, second))
        self.tables[(first, second)] = table.copy() if known is None else known + table

    def neighbours(self) -> list[set[int]]:
        """For each variable those it shares a table with."""
        found: list[set[int]] = [set() for _ in self.costs]
        for first, second in self.tables:
            found[first].add(second)
            found[second].add(first)
        return found

    def table(self, first: int, second: int) -> Table:
        """The table of a pair with ``first``'s choices as rows."""
        return self.tables[(first, second)] if first < second else self.tables[(second, first)].T

    def objective(self, choices: Sequence[int]) -> float:
        """The exact cost of a full assignment."""
        unary = sum(float(costs[choice]) for costs, choice in zip(self.costs, choices, strict=True))
        return unary + sum(float(table[choices[i], choices[j]]) for (i, j), table in self.tables.items())


@dataclass(frozen=True, slots=True)
class Merged:
    """A smaller model with the same minimum. ``kept[i]`` is the original variable of the model's variable i."""

    model: PairwiseModel
    kept: tuple[int, ...]
    _eliminated: tuple[tuple[int, tuple[int, ...], NDArray[np.int64]], ...]

    def expand(self, choices: Sequence[int]) -> list[int]:
        """The full assignment that belongs to an assignment of the smaller model."""
        full = dict(zip(self.kept, choices, strict=True))
        for variable, neighbours, best in reversed(self._eliminated):
            full[variable] = int(best[tuple(full[other] for other in neighbours)])
        return [full[variable] for variable in range(len(full))]


def merge_followers(model: PairwiseModel, followers: set[int]) -> Merged:
    """Eliminate ``followers`` that have at most two neighbours, leaves and lone variables, until none is left."""
    costs = {index: value.copy() for index, value in enumerate(model.costs)}
    tables = dict(model.tables)
    around = dict(enumerate(model.neighbours()))
    eliminated: list[tuple[int, tuple[int, ...], NDArray[np.int64]]] = []
    queue = deque(sorted(costs))
    while queue:
        variable = queue.popleft()
        if variable not in costs or len(around[variable]) > (2 if variable in followers else 1):
            continue
        neighbours = tuple(sorted(around.pop(variable)))
        joint = costs.pop(variable).reshape((1,) * len(neighbours) + (-1,))
        for axis, other in enumerate(neighbours):
            key = (min(variable, other), max(variable, other))
            table = tables.pop(key) if other < variable else tables.pop(key).T  # rows: the neighbour's choices
            joint = joint + table.reshape([table.shape[0] if at == axis else 1 for at in range(len(neighbours))] + [-1])
            around[other].discard(variable)
        eliminated.append((variable, neighbours, joint.argmin(axis=-1)))
        _put_back(costs, tables, around, neighbours, joint.min(axis=-1))
        queue.extend(neighbours)
    kept = tuple(sorted(costs))
    place = {variable: index for index, variable in enumerate(kept)}
    smaller = PairwiseModel(
        costs=[costs[variable] for variable in kept],
        tables={(place[a], place[b]): table for (a, b), table in tables.items()},
    )
    return Merged(smaller, kept, tuple(eliminated))


def _put_back(
    costs: dict[int, Table],
    tables: dict[tuple[int, int], Table],
    around: dict[int, set[int]],
    neighbours: tuple[int, ...],
    value: Table,
) -> None:
    """What an eliminated variable costs at best, as a cost of its one neighbour or a table of its two."""
    if len(neighbours) == 1:
        costs[neighbours[0]] = costs[neighbours[0]] + value
    elif len(neighbours) == 2:
        first, second = neighbours
        tables[neighbours] = tables[neighbours] + value if neighbours in tables else value
        around[first].add(second)
        around[second].add(first)
