"""The best plan on a cluster of several kinds of GPUs: three ways to use it compete.

- *alone*: each group of nodes by itself, every other GPU idle; the search for one kind as it is.
- *alike*: all GPUs as one kind, every one of them taken at the pace and memory of the weakest: data parallelism over
  kinds, where a step waits for the slowest.
- *across*: a pipeline over the groups, each stage on GPUs of one kind, with as many layers as its kind does in the time
  of the others (:mod:`autoplan.search.heterogeneous_engine`).

The shortest simulated step wins; within 2% of it the least parallelism, and of equals the fewest kinds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.cluster.mixed import join
from autoplan.errors import AutoplanError, InfeasibleError, StrategyError
from autoplan.search.constraints import with_limits
from autoplan.search.engine import Engine, Found
from autoplan.search.forced import read_forced
from autoplan.search.heterogeneous_engine import MixedEngine, MixedFound
from autoplan.search.heterogeneous_space import MixedSpace, open_mixed_space
from autoplan.search.infeasible import infeasible
from autoplan.search.preferences import preference
from autoplan.search.problem import Problem, check
from autoplan.search.shortfall import nearest
from autoplan.search.solver import SolverName
from autoplan.search.space import open_space

# Units that nothing emulates at a useful rate: a kind without them is left idle.
_UNITS = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The search on one kind: ``groups`` are the positions of the groups whose GPUs it may use (all: at the pace of the
    weakest). ``found`` None: nothing fits."""

    name: str
    groups: tuple[int, ...]
    engine: Engine
    found: Found | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """Everything that was searched: the ways that use GPUs as one kind, and pipelines across groups."""

    problem: Problem
    alone: tuple[Alone, ...]
    space: MixedSpace
    engine: MixedEngine
    across: MixedFound | None

    @property
    def founds(self) -> list[Found | MixedFound]:
        found = [each.found for each in self.alone if each.found is not None]
        return [*found, self.across] if self.across is not None else [*found]

    @property
    def fastest_s(self) -> float:
        """The shortest simulated step."""
        return min((_step_s(found) for found in self.founds), default=math.inf)

    def chosen(self, tolerance: float) -> Alone | MixedFound:
        """The way whose plan is the least parallel of those within ``tolerance`` of the fastest."""
        limit_s = self.fastest_s * (1 + tolerance)
        ways: list[tuple[tuple[int, ...], int, float, int, Alone | MixedFound]] = []
        for number, each in enumerate(self.alone):
            if each.found is not None and _step_s(each.found) <= limit_s:
                taken = preference(each.found.chosen.strategy) if tolerance else ()
                ways.append((taken, len(each.groups), _step_s(each.found), number, each))
        if self.across is not None and _step_s(self.across) <= limit_s:
            chosen = self.across.chosen
            taken = preference(chosen.strategy) if tolerance else ()
            ways.append((taken, chosen.groups, _step_s(self.across), len(self.alone), self.across))
        return min(ways, key=lambda way: way[:4])[-1]


def _step_s(found: Found | MixedFound) -> float:
    return found.fastest.simulated_s


def search_groups(problem: Problem, *, solver: SolverName | None, deadline: float, tolerance: float) -> Searched:
    """Search all three ways; raises :class:`StrategyError` for forced keys that none can take, and
    :class:`InfeasibleError` where nothing fits."""
    problem = with_limits(problem)
    check(problem)
    forced = read_forced(problem)
    usable = usable_groups(problem)
    alone = _search_alone(problem, usable, solver=solver, deadline=deadline, tolerance=tolerance)
    founds = [each.found for each in alone if each.found is not None]
    space = open_mixed_space(problem, forced, usable)
    engine = MixedEngine(
        space=space,
        solver=solver,
        deadline=deadline,
        others_s=min((found.best.value_s for found in founds), default=math.inf),
        others_step_s=min((_step_s(found) for found in founds), default=math.inf),
    )
    across = engine.run(tolerance)
    searched = Searched(problem=problem, alone=alone, space=space, engine=engine, across=across)
    if not searched.founds:
        raise _nothing_fits(searched)
    return _narrowed(searched, tolerance)


def usable_groups(problem: Problem) -> tuple[int, ...]:
    """Positions of the groups that have the units of the precision."""
    units = _UNITS.get(problem.precision)
    groups = problem.cluster.groups
    return tuple(i for i, group in enumerate(groups) if units is None or units in group.device.peak_flops)


def _search_alone(
    problem: Problem, usable: tuple[int, ...], *, solver: SolverName | None, deadline: float, tolerance: float
) -> tuple[Alone, ...]:
    searched = []
    for name, groups, cluster in _ways(problem.cluster, usable):
        try:
            space = open_space(dataclasses.replace(problem, cluster=cluster))
            engine = Engine(space=space, solver=solver, deadline=deadline)
            if not len(space.candidates):
                continue
            searched.append(_alone(name, groups, engine, tolerance))
        except StrategyError:
            continue  # forced degrees that this part of the cluster has no GPUs for
    return tuple(searched)


def _alone(name: str, groups: tuple[int, ...], engine: Engine, tolerance: float) -> Alone:
    return Alone(name=name, groups=groups, engine=engine, found=engine.run(tolerance))


def _ways(cluster: Cluster, usable: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], Cluster]]:
    for index in usable:
        group = cluster.groups[index]
        yield f"{group.name} alone", (index,), group
    if len(usable) > 1:
        kept = cluster if len(usable) == len(cluster.groups) else _joined(cluster, usable)
        yield "all GPUs alike", usable, dataclasses.replace(kept, groups=(), between=())


def _joined(cluster: Cluster, usable: tuple[int, ...]) -> Cluster:
    pairs = [(i, j) for i in range(len(usable)) for j in range(i + 1, len(usable))]
    links = {(i, j): cluster.link_between(usable[i], usable[j]) for i, j in pairs}
    return join([cluster.groups[i] for i in usable], spec=cluster.spec, where=cluster.spec, links=links)


def _narrowed(searched: Searched, tolerance: float) -> Searched:
    """The searches of one kind again, within ``tolerance`` of the shortest step of all and not of their own."""
    if not tolerance:
        return searched
    limit_s = searched.fastest_s * (1 + tolerance)
    alone = []
    for each in searched.alone:
        room = limit_s / _step_s(each.found) - 1 if each.found is not None else 0.0
        if each.found is not None and 0 < room < tolerance * (1 - 1e-9):
            each = _alone(each.name, each.groups, each.engine, room)
        alone.append(each)
    return dataclasses.replace(searched, alone=tuple(alone))


def _nothing_fits(searched: Searched) -> AutoplanError:
    """Why nothing fits, of the kind that comes nearest."""
    problem = searched.problem
    single = [each for each in searched.alone if len(each.groups) == 1]
    shorts = [(nearest(each.engine), each) for each in single or searched.alone]
    known = [(short.short_bytes, number, each) for number, (short, each) in enumerate(shorts) if short is not None]
    if not known:
        return _no_candidates(searched)
    _, _, each = min(known, key=lambda way: way[:2])
    error = infeasible(each.engine)
    if not isinstance(error, InfeasibleError):
        return error
    also = ", nor does a pipeline across the kinds" if searched.space.candidates else ""
    return InfeasibleError(
        f"{problem.layers.name} fits no part of {problem.cluster.spec}{also}. Nearest is {each.name}: {error.what}",
        short_by_bytes=error.short_by_bytes,
        term=error.term,
        suggestions=error.suggestions,
        where=error.where,
        legal=error.legal,
        attempt=error.attempt,
    )


def _no_candidates(searched: Searched) -> StrategyError:
    problem = searched.problem
    forced = ", ".join(f"{key} {value}" for key, value in problem.forced.items()) or "nothing"
    held = "; ".join(f"{g.name}: {g.nodes} x {g.gpus_per_node} GPUs" for g in problem.cluster.groups)
    return StrategyError(
        f"no combination of degrees is legal on {problem.cluster.spec} with global batch {problem.global_batch} and "
        f"what was forced ({forced})",
        where=held,
        legal="degrees for the GPUs of one group, or stages of data x tensor GPUs that each stand in one group",
        attempt="force fewer keys, or plan for one of the groups",
    )
