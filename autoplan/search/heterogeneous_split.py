"""Layers to stages and stages to groups of GPUs, exactly: a dynamic program, and the same as a MILP in PuLP.

An *arc* (s, move, i, j) says "stage s stands on the move's seat and holds layers i to j - 1". With its period T, cost C
and tail Y (:meth:`autoplan.search.heterogeneous_seats.Seats.priced`) a path of S arcs from a first seat and layer 0 to
layer L costs, as on one kind,

    (M - 1) * max T + sum C + max Y

Dynamic program: least sums over (seat, layer), under a limit on periods that is lowered to the path's own until no
better path can be left; the same for tails outside. MILP, f[a] in {0, 1} for each useful arc (so sum over arcs of n
layers on group g is the u[s, g, n] of the usual formulation); b, d >= 0 are how far the longest period and tail are
above the least possible B* and Y*:

    minimise    (M - 1) (B* + b) + sum_a C_a f_a + (Y* + d)
    subject to  sum_{a of stage s} f_a = 1                                        one arc a stage
                sum_{a into (s, seat, j)} f_a = sum_{a from (s, seat, j)} f_a     layers and seats follow each other
                sum_{a of stage s} max(0, T_a - B*) f_a <= b,  and Y with d
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pulp
from numpy.typing import NDArray

from autoplan.search.heterogeneous_seats import Seats
from autoplan.search.solver import MilpFailure, SolverName, solve

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MILLISECONDS = 1e3
TIME_LIMIT_S = 20.0
# More arcs than this and the dynamic program is the quicker proof; it is exact too.
MOST_ARCS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``seats``: for each stage the position of its seat; ``cuts``: first layers and, last, the number of layers.
    ``value_s`` is the objective. ``proven_by``: whose proof closes the gap."""

    seats: tuple[int, ...]
    cuts: tuple[int, ...]
    value_s: float
    proven_by: str = "dynamic program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arcs:
    """Arcs by stage, then where they lead, then where they come from. A place is a seat's position x (L + 1) + a
    layer."""

    stage: Integers
    origin: Integers
    target: Integers
    period_s: Floats
    cost_s: Floats
    tail_s: Floats

    def __len__(self) -> int:
        return len(self.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least possible max T, sum C and max Y, each by itself."""

    bottleneck_s: float
    sum_s: float
    tail_s: float


def solve_seats(
    seats: Seats, *, cutoff_s: float, solver: SolverName | None, time_limit_s: float | None = TIME_LIMIT_S
) -> Layout | None:
    """The best layout, if it costs at most ``cutoff_s``; None where nothing fits or everything costs more. ``solver``
    None: the dynamic program alone."""
    floor = floor_of(seats, cutoff_s=cutoff_s)
    if floor is None:
        return None
    steps = seats.strategy.micro_batches - 1
    # A hair above, so that rounding never drops the path that gives the bound.
    first = _least_sum(seats, floor.bottleneck_s * (1 + 1e-12))
    limit = min(cutoff_s, first) * (1 + 1e-9)
    arcs = useful_arcs(seats, floor, limit)
    best = shortest(seats, floor, arcs)
    if best is None or best.value_s > cutoff_s:
        return None
    if best.value_s <= (steps * floor.bottleneck_s + floor.sum_s + floor.tail_s) * (1 + 1e-12):
        return dataclasses.replace(best, proven_by="bound")
    if solver is None or len(arcs) > MOST_ARCS:
        return best
    return _confirm(seats, floor, arcs, best, solver, time_limit_s)


def _forward(
    seats: Seats, table: Callable[[int, int], Floats], join: Callable[[Floats, Floats], Floats]
) -> list[Floats]:
    """For every stage [seats, L + 1], and at last [1, L + 1]: the least over paths of ``join``-ed tables."""
    width = seats.layers + 1
    start = np.full((len(seats.stages[0]), width), math.inf)
    start[:, 0] = 0.0
    reached = [start]
    for stage, moves in enumerate(seats.moves):
        places = len(seats.stages[stage + 1]) if stage + 1 < len(seats.stages) else 1
        following = np.full((places, width), math.inf)
        for number, move in enumerate(moves):
            least = np.min(join(reached[-1][move.seat][:, None], table(stage, number)), axis=0)
            np.minimum(following[move.following], least, out=following[move.following])
        reached.append(following)
    return reached


def floor_of(seats: Seats, *, cutoff_s: float = math.inf) -> Floor | None:
    """The least of each term; None where no layout fits or they cost more than ``cutoff_s`` together."""
    if not seats.stages[0]:
        return None
    steps = seats.strategy.micro_batches - 1
    least: list[float] = []
    spent = 0.0
    for term, join in ((0, np.maximum), (1, np.add), (2, np.maximum)):
        ends = _forward(seats, _term(seats, term), join)
        least.append(float(ends[-1][0, -1]))
        spent += steps * least[0] if term == 0 else least[-1]
        if not math.isfinite(least[-1]) or spent > cutoff_s:
            return None
    return Floor(bottleneck_s=least[0], sum_s=least[1], tail_s=least[2])


def _term(seats: Seats, term: int) -> Callable[[int, int], Floats]:
    return lambda stage, number: seats.priced(stage, seats.moves[stage][number])[term]


def _least_sum(seats: Seats, period_at_most_s: float) -> float:
    """An upper bound: the least sum of costs with every period at most the given one, and any tails."""

    def table(stage: int, number: int) -> Floats:
        period, cost, _ = seats.priced(stage, seats.moves[stage][number])
        return np.where(period <= period_at_most_s, cost, math.inf)

    total = float(_forward(seats, table, np.add)[-1][0, -1])
    most = max(
        float(np.max(tail, where=np.isfinite(tail), initial=0.0))
        for stage, standing in enumerate(seats.stages)
        for tail in {seat.group: seats.alone(stage, seat.group)[1] for seat in standing}.values()
    )
    return (seats.strategy.micro_batches - 1) * period_at_most_s + total + most


def useful_arcs(seats: Seats, floor: Floor, value_at_most_s: float) -> Arcs:
    """Arcs on some path whose lower bound, (M - 1) max(B*, T) + least sum through it + max(Y*, Y), is low enough."""
    steps, width = seats.strategy.micro_batches - 1, seats.layers + 1
    forward = _forward(seats, lambda s, m: seats.priced(s, seats.moves[s][m])[1], np.add)
    behind = np.full((1, width), math.inf)
    behind[0, -1] = 0.0
    kept: list[tuple[NDArray[np.generic], ...]] = []
    for stage in reversed(range(len(seats.stages))):
        before = np.full((len(seats.stages[stage]), width), math.inf)
        for move in seats.moves[stage]:
            period, cost, tail = seats.priced(stage, move)
            through = forward[stage][move.seat][:, None] + cost + behind[move.following][None, :]
            exists = np.isfinite(through)
            longest = np.where(exists, np.maximum(period, floor.bottleneck_s), 0.0)
            lower = steps * longest + through + np.where(exists, np.maximum(tail, floor.tail_s), 0.0)
            first, end = np.nonzero(exists & (lower <= value_at_most_s))
            origin, target = move.seat * width + first, move.following * width + end
            values = (period[first, end], cost[first, end], tail[first, end])
            kept.append((np.full(len(first), stage), origin, target, *values))
            least = np.min(cost + behind[move.following][None, :], axis=1)
            np.minimum(before[move.seat], least, out=before[move.seat])
        behind = before
    stage_, origin, target, period, cost, tail = (np.concatenate(column) for column in zip(*kept, strict=True))
    order = np.lexsort((origin, target, stage_))
    return Arcs(
        stage=stage_[order].astype(np.int64),
        origin=origin[order].astype(np.int64),
        target=target[order].astype(np.int64),
        period_s=period[order].astype(np.float64),
        cost_s=cost[order].astype(np.float64),
        tail_s=tail[order].astype(np.float64),
    )


def shortest(seats: Seats, floor: Floor, arcs: Arcs) -> Layout | None:
    """The exact dynamic program over ``arcs``; None where they make no path."""
    best: Layout | None = None
    tail_limit = math.inf
    while True:
        found = _shortest_below(seats, floor, arcs, tail_limit, best)
        if found is None:
            return best
        least_s, tail_s, candidate = found
        if best is None or candidate.value_s < best.value_s:
            best = candidate
        if least_s + floor.tail_s >= best.value_s:
            return best
        # Whatever its tail, a path under this limit costs `least_s` plus its tail: only smaller tails can be better.
        tail_limit = min(tail_s, best.value_s - least_s)


def _shortest_below(
    seats: Seats, floor: Floor, arcs: Arcs, tail_limit: float, best: Layout | None
) -> tuple[float, float, Layout] | None:
    """Least (M - 1) max T + sum C over paths with tails below ``tail_limit``, the tail of the path that has it, and the
    best layout met on the way; stops where no further path can beat ``best``."""
    steps = seats.strategy.micro_batches - 1
    period_limit, least = math.inf, (math.inf, math.inf)
    candidate: Layout | None = None
    while (path := _least_path(seats, arcs, period_limit, tail_limit)) is not None:
        period, tail = float(arcs.period_s[path].max()), float(arcs.tail_s[path].max())
        total = math.fsum(arcs.cost_s[path])
        least = min(least, (steps * period + total, tail))
        if candidate is None or steps * period + total + tail < candidate.value_s:
            candidate = _layout(seats, arcs, path)
        limit = min(candidate.value_s, best.value_s if best else math.inf)
        if steps * floor.bottleneck_s + total + floor.tail_s >= limit:
            break
        period_limit = period
    return None if candidate is None else (*least, candidate)


def _least_path(seats: Seats, arcs: Arcs, period_below_s: float, tail_below_s: float) -> Integers | None:
    """Arcs of the path of least sum with periods and tails strictly below the limits."""
    allowed = np.nonzero((arcs.period_s < period_below_s) & (arcs.tail_s < tail_below_s))[0]
    stages, width = len(seats.stages), seats.layers + 1
    edges = np.searchsorted(arcs.stage[allowed], np.arange(stages + 1))
    total = np.full(len(seats.stages[0]) * width, math.inf)
    total[::width] = 0.0
    back = []
    for stage in range(stages):
        mine = allowed[edges[stage] : edges[stage + 1]]
        if not len(mine):
            return None
        sums = total[arcs.origin[mine]] + arcs.cost_s[mine]
        order = np.lexsort((np.arange(len(mine)), sums, arcs.target[mine]))
        targets, firsts = np.unique(arcs.target[mine][order], return_index=True)
        places = (len(seats.stages[stage + 1]) if stage + 1 < stages else 1) * width
        total, chosen = np.full(places, math.inf), np.full(places, -1)
        total[targets] = sums[order][firsts]
        chosen[targets] = mine[order][firsts]
        back.append(chosen)
    if not math.isfinite(total[-1]):
        return None
    path, at = [], seats.layers
    for chosen in reversed(back):
        path.append(int(chosen[at]))
        at = int(arcs.origin[path[-1]])
    return np.array(path[::-1])


def _layout(seats: Seats, arcs: Arcs, path: Integers) -> Layout:
    width = seats.layers + 1
    steps = seats.strategy.micro_batches - 1
    places = [divmod(int(origin), width) for origin in arcs.origin[path]]
    value = steps * float(arcs.period_s[path].max()) + math.fsum(arcs.cost_s[path]) + float(arcs.tail_s[path].max())
    return Layout(
        seats=tuple(seat for seat, _ in places),
        cuts=(*(layer for _, layer in places), seats.layers),
        value_s=value,
    )


def _confirm(
    seats: Seats, floor: Floor, arcs: Arcs, best: Layout, solver: SolverName, time_limit_s: float | None
) -> Layout:
    """Solve the MILP; its name goes on the proof where it has one that agrees with the dynamic program."""
    try:
        found, proven = milp_layout(seats, floor, arcs, solver=solver, time_limit_s=time_limit_s)
    except MilpFailure:
        return best
    if found is not None and found.value_s < best.value_s:
        best = found
    agrees = proven and found is not None and found.value_s <= best.value_s * (1 + 1e-9)
    return dataclasses.replace(best, proven_by=solver) if agrees else best


def milp_layout(
    seats: Seats, floor: Floor, arcs: Arcs, *, solver: SolverName, time_limit_s: float | None = None
) -> tuple[Layout | None, bool]:
    """The MILP's layout, priced exactly, and whether it is proven optimal; raises :class:`MilpFailure`."""
    model = pulp.LpProblem("stages_on_groups", pulp.LpMinimize)
    use = [model.add_variable(f"f_{a:06d}", 0, 1, cat=pulp.LpInteger) for a in range(len(arcs))]
    excess = model.add_variable("b", 0.0), model.add_variable("d", 0.0)
    steps = seats.strategy.micro_batches - 1
    terms = [(f, float(cost) * MILLISECONDS) for f, cost in zip(use, arcs.cost_s, strict=True)]
    fixed = (steps * floor.bottleneck_s + floor.tail_s) * MILLISECONDS
    model += pulp.LpAffineExpression([*terms, (excess[0], float(steps)), (excess[1], 1.0)], constant=fixed)
    _path_rows(model, arcs, use, last=len(seats.stages) - 1)
    for name, values, least, most in (
        ("period", arcs.period_s, floor.bottleneck_s, excess[0]),
        ("tail", arcs.tail_s, floor.tail_s, excess[1]),
    ):
        _excess_rows(model, name, arcs.stage, (values - least) * MILLISECONDS, use, most)
    outcome = solve(model, solver=solver, time_limit_s=time_limit_s)
    if outcome.values is None:
        return None, False
    path = np.array([a for a in range(len(arcs)) if outcome.values[use[a].name] > 0.5], dtype=np.int64)
    follows = len(path) == len(seats.stages) and bool(np.all(arcs.target[path][:-1] == arcs.origin[path][1:]))
    if not follows or list(arcs.stage[path]) != list(range(len(seats.stages))):
        raise MilpFailure(f"{solver} returned arcs that are no path")
    return _layout(seats, arcs, path), outcome.proven


def _path_rows(model: pulp.LpProblem, arcs: Arcs, use: list[pulp.LpVariable], *, last: int) -> None:
    """One arc a stage, each from the place that the one before it leads to."""
    of_stage: dict[int, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
    at_place: dict[tuple[int, int], list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
    for a, f in enumerate(use):
        stage = int(arcs.stage[a])
        of_stage[stage].append((f, 1.0))
        if stage:
            at_place[stage, int(arcs.origin[a])].append((f, -1.0))
        if stage < last:
            at_place[stage + 1, int(arcs.target[a])].append((f, 1.0))
    for stage in sorted(of_stage):
        model += pulp.LpAffineExpression(of_stage[stage]) == 1, f"one_{stage:04d}"
    for stage, place in sorted(at_place):
        model += pulp.LpAffineExpression(at_place[stage, place]) == 0, f"flow_{stage:04d}_{place:07d}"


def _excess_rows(
    model: pulp.LpProblem,
    name: str,
    stages: Integers,
    excess_ms: Floats,
    use: list[pulp.LpVariable],
    most: pulp.LpVariable,
) -> None:
    """No stage's arc is further above the floor than ``most``."""
    above: dict[int, list[tuple[pulp.LpVariable, float]]] = defaultdict(list)
    for a in (excess_ms > 0).nonzero()[0]:
        above[int(stages[a])].append((use[int(a)], float(excess_ms[a])))
    for stage in sorted(above):
        model += pulp.LpAffineExpression([*above[stage], (most, -1.0)]) <= 0, f"{name}_{stage:04d}"
