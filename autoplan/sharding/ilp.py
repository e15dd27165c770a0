"""The pairwise model as an integer program, in PuLP with HiGHS.

    x[i,k] in {0,1}        variable i takes choice k                   sum_k x[i,k] = 1
    e[i,j,k,l] >= 0        both choices of a pair with a table         sum_l e[i,j,k,l] = x[i,k]
                                                                       sum_k e[i,j,k,l] = x[j,l]
    minimise  sum c_i(k) x[i,k] + sum t_ij(k,l) e[i,j,k,l]

The flow rows make e the exact product of the two choices once x is integer, with a far tighter relaxation than big-M
rows (Zheng et al. 2022, section 4.2, linearised). Forbidden pairs have no column. Costs are in microseconds. The
solver's answer counts only when it is proven (``sol_status`` 1 at a gap of zero) and is priced again exactly.
"""

from __future__ import annotations

import warnings
from collections.abc import Set
from typing import Any

import highspy
import numpy as np
import pulp

from autoplan.sharding import elimination
from autoplan.sharding.model import PairwiseModel, merge_followers


def minimise(model: PairwiseModel, followers: Set[int] = frozenset()) -> list[int]:
    """The choice of every variable at a proven minimum; ``followers`` may be merged into their neighbours first."""
    merged = merge_followers(model, set(followers))
    return merged.expand(choices(merged.model))


def choices(model: PairwiseModel) -> list[int]:
    """The choice of every variable at a proven minimum. Falls back on exact elimination where the solver proves
    nothing."""
    with warnings.catch_warnings():  # PuLP 3.3 announces 4.0 at every variable
        warnings.simplefilter("ignore", DeprecationWarning)
        proven = _solve(model) if model.costs else []
    return elimination.minimise(model) if proven is None else proven


# The class that highspy.Highs wraps: the wrapper's constructor prints a banner to standard output, which belongs to the
# caller's results.
_Highs: Any = highspy.Highs.__bases__[0]
_OPTIONS = {"output_flag": False, "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0}


class _QuietHiGHS(pulp.HiGHS):
    """PuLP's HiGHS without the banner, proven to a gap of zero, on one thread."""

    def createAndConfigureSolver(self, lp: pulp.LpProblem) -> None:
        lp.solverModel = _Highs()
        for option, value in _OPTIONS.items():
            lp.solverModel.setOptionValue(option, value)


def _solve(model: PairwiseModel) -> list[int] | None:
    problem = pulp.LpProblem("tensor_parallel", pulp.LpMinimize)
    objective: list[tuple[pulp.LpVariable, float]] = []
    chosen: list[dict[int, pulp.LpVariable]] = []
    for index, costs in enumerate(model.costs):
        columns = {
            choice: pulp.LpVariable(f"x_{index:05d}_{choice:03d}", 0, 1, cat="Integer")
            for choice, cost in enumerate(costs)
            if np.isfinite(cost)
        }
        problem += _sum([(column, 1.0) for column in columns.values()]) == 1
        objective += [(column, float(costs[choice])) for choice, column in columns.items()]
        chosen.append(columns)
    for pair, table in model.tables.items():
        objective += _add_pair(problem, chosen, pair, table)
    problem += _sum(objective)
    _Highs.resetGlobalScheduler(True)  # HiGHS keeps one thread count a process; others may have set another
    problem.solve(_QuietHiGHS(msg=False))
    if problem.sol_status != pulp.LpSolutionOptimal:
        return None
    return [max(columns, key=lambda choice: columns[choice].value() or 0.0) for columns in chosen]


def _add_pair(
    problem: pulp.LpProblem, chosen: list[dict[int, pulp.LpVariable]], pair: tuple[int, int], table: np.ndarray
) -> list[tuple[pulp.LpVariable, float]]:
    """Columns and flow rows of one table; returns its terms of the objective."""
    first, second = pair
    columns = {
        (a, b): pulp.LpVariable(f"e_{first:05d}_{second:05d}_{a:03d}_{b:03d}", 0)
        for a in chosen[first]
        for b in chosen[second]
        if np.isfinite(table[a, b])
    }
    for choice, taken in chosen[first].items():
        row = [(column, 1.0) for (a, _), column in columns.items() if a == choice]
        problem += _sum([*row, (taken, -1.0)]) == 0
    for choice, taken in chosen[second].items():
        row = [(column, 1.0) for (_, b), column in columns.items() if b == choice]
        problem += _sum([*row, (taken, -1.0)]) == 0
    return [(column, float(table[key])) for key, column in columns.items()]


def _sum(terms: list[tuple[pulp.LpVariable, float]]) -> pulp.LpAffineExpression:
    return pulp.LpAffineExpression(terms)
