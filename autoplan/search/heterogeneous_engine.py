"""Best-first search over pipelines across groups, as :mod:`autoplan.search.engine` does it on one kind."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from autoplan.plan import Strategy
from autoplan.search.choice import CONFIRMED
from autoplan.search.engine import MOST_CONFIRMED, Counts
from autoplan.search.evaluate import Evaluation, StageCosts, StepTime, stage_costs, timed
from autoplan.search.heterogeneous_seats import Seat, seats_of
from autoplan.search.heterogeneous_space import GroupTables, MixedBound, MixedSpace, bound_of
from autoplan.search.heterogeneous_split import Layout, floor_of, solve_seats
from autoplan.search.preferences import preference
from autoplan.search.solver import SolverName
from autoplan.search.timing import StageTimes, brief_step_s, step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDecision:
    """A candidate with its best layout: ``seats`` and ``cuts`` by stage, ``value_s`` the objective in closed form,
    ``simulated_s`` the step that the simulator makes of it (a long step is extrapolated)."""

    strategy: Strategy
    seats: tuple[Seat, ...]
    cuts: tuple[int, ...]
    value_s: float
    simulated_s: float
    proven_by: str

    @property
    def groups(self) -> int:
        """Groups in use."""
        return len({seat.group for seat in self.seats})


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFound:
    """What is least in closed form (``best``), in the simulator (``fastest``), and ``chosen``, as in
    :class:`autoplan.search.engine.Found`; ``lower_bound_s`` and ``simulated_bound_s`` hold for every candidate."""

    chosen: MixedDecision
    best: MixedDecision
    fastest: MixedDecision
    lower_bound_s: float
    simulated_bound_s: float
    proven: bool
    confirmed: int
    counts: Counts


@dataclass(kw_only=True)
class MixedEngine:
    """One search over pipelines across groups. ``others_s`` and ``others_step_s``: closed form and simulated step of
    the best plans on one kind, above which no pipeline is wanted. ``stopped_s``: the bound of the first candidate that
    the deadline left unsearched."""

    space: MixedSpace
    solver: SolverName | None
    deadline: float = math.inf
    others_s: float = math.inf
    others_step_s: float = math.inf
    stopped_s: float = math.inf
    _known: dict[int, tuple[float, MixedDecision | None]] = field(default_factory=dict, init=False)

    @cached_property
    def bounds(self) -> tuple[MixedBound, ...]:
        return tuple(bound_of(self.space, strategy) for strategy in self.space.candidates)

    @cached_property
    def order(self) -> list[int]:
        """Candidates that may fit, by lower bound, then by preference."""
        rows = [i for i, bound in enumerate(self.bounds) if bound.fits]
        return sorted(rows, key=lambda i: (self.bounds[i].step_s, preference(self.space.candidates[i]), i))

    def run(self, tolerance: float) -> MixedFound | None:
        """The search; None where nothing fits, or everything is slower than the others."""
        best, floor_s, proven = self._fastest()
        if best is None:
            return None
        limit_s = min(best.value_s, self.others_s) * (1 + CONFIRMED)
        fastest = self._simulated_fastest(best, limit_s)
        least_s = min(fastest.simulated_s, self.others_step_s)
        chosen = self._least_parallel(fastest, limit_s, least_s * (1 + tolerance)) if tolerance else fastest
        opened = len(self._known)
        return MixedFound(
            chosen=self._confirm(chosen),
            best=self._confirm(best),
            fastest=fastest,
            lower_bound_s=floor_s,
            simulated_bound_s=self._simulated_bound_s(fastest.simulated_s),
            proven=proven,
            confirmed=sum(known is not None for _, known in self._known.values()),
            counts=self.counts(opened),
        )

    def counts(self, opened: int | None = None) -> Counts:
        """What became of the candidates."""
        considered, solved = len(self.bounds), len(self._known) if opened is None else opened
        memory = sum(not bound.fits for bound in self.bounds)
        return Counts(
            considered=considered,
            pruned_by_memory=memory,
            pruned_by_bound=considered - memory - solved,
            solved=solved,
        )

    def glance(self, most: int = 16) -> MixedDecision | None:
        """The best of the first candidates, to compare with: not proven."""
        best: MixedDecision | None = None
        for index in self.order[:most]:
            if best is not None and self.bounds[index].step_s >= best.value_s:
                break
            found = self.open(index, cutoff_s=best.value_s if best else math.inf)
            best = found or best
        return best

    def left_out_s(self) -> float:
        """No candidate that may fit is simulated faster."""
        return min((bound.simulated_s for bound in self.bounds if bound.fits), default=math.inf)

    def _fastest(self) -> tuple[MixedDecision | None, float, bool]:
        best: MixedDecision | None = None
        for index in self.order:
            limit = min(self.others_s, best.value_s if best else math.inf)
            bound = self.bounds[index].step_s
            if bound >= limit:
                break
            if math.isfinite(limit) and time.monotonic() > self.deadline:
                self.stopped_s = bound
                return best, bound, False
            found = self.open(index, cutoff_s=limit * (1 + CONFIRMED))
            if found is not None and (best is None or found.value_s < best.value_s):
                best = found
        return best, min(self.others_s, best.value_s if best else math.inf), True

    def _simulated_fastest(self, best: MixedDecision, limit_s: float) -> MixedDecision:
        fastest, opened = best, 0
        for index in self.order:
            bound = self.bounds[index]
            if bound.step_s > limit_s or opened >= MOST_CONFIRMED or time.monotonic() > self.deadline:
                break
            if bound.simulated_s >= min(fastest.simulated_s, self.others_step_s):
                continue
            opened += 1
            found = self.open(index, cutoff_s=limit_s)
            if found is not None and found.simulated_s < fastest.simulated_s:
                fastest = found
        return fastest

    def _least_parallel(self, fastest: MixedDecision, limit_s: float, step_limit_s: float) -> MixedDecision:
        """The first group of :func:`preference` that has a step within the limit: its shortest."""
        for group in self._preferred_to(fastest.strategy, limit_s):
            found: MixedDecision | None = None
            for index in group:
                if time.monotonic() > self.deadline:
                    return fastest
                most = found.simulated_s if found else step_limit_s
                if self.bounds[index].simulated_s > most:
                    continue
                better = self.open(index, cutoff_s=limit_s)
                if better is not None and better.simulated_s < most:
                    found = better
            if found is not None:
                return found
        return fastest

    def _preferred_to(self, strategy: Strategy, limit_s: float) -> Iterator[list[int]]:
        ceiling = preference(strategy)
        rows = [i for i in self.order if self.bounds[i].step_s <= limit_s]
        keyed = sorted((preference(self.space.candidates[i]), i) for i in rows)
        below = [(key, index) for key, index in keyed if key < ceiling]
        for _, group in itertools.groupby(below, key=lambda each: each[0]):
            yield [index for _, index in group]

    def _simulated_bound_s(self, fastest_s: float) -> float:
        """No candidate can be simulated faster than this."""
        bounds = (bound.simulated_s for bound in self.bounds if bound.fits)
        return min(fastest_s, *bounds)

    def open(self, index: int, *, cutoff_s: float) -> MixedDecision | None:
        """The best layout of one candidate by the dynamic program, if it costs at most ``cutoff_s``; remembered."""
        known = self._known.get(index)
        if known is None or (known[1] is None and known[0] < cutoff_s):
            strategy = self.space.candidates[index]
            known = cutoff_s, decide(self.space, strategy, cutoff_s=cutoff_s, solver=None)
            self._known[index] = known
        decision = known[1]
        return decision if decision is not None and decision.value_s <= cutoff_s else None

    def _confirm(self, decision: MixedDecision) -> MixedDecision:
        """The same decision proven by the MILP, where there is a solver and something to prove."""
        if self.solver is None or decision.proven_by != "dynamic program":
            return decision
        cutoff_s = decision.value_s * (1 + 1e-9)
        confirmed = decide(self.space, decision.strategy, cutoff_s=cutoff_s, solver=self.solver)
        return confirmed if confirmed is not None and confirmed.value_s <= decision.value_s else decision


def decide(
    space: MixedSpace, strategy: Strategy, *, cutoff_s: float = math.inf, solver: SolverName | None = None
) -> MixedDecision | None:
    """The best layout of ``strategy`` if it costs at most ``cutoff_s``."""
    hopeful, seats = seats_of(space, strategy, cutoff_s=cutoff_s)
    if floor_of(hopeful, cutoff_s=cutoff_s) is None:
        return None
    layout = solve_seats(seats, cutoff_s=cutoff_s, solver=solver)
    if layout is None:
        return None
    standing = tuple(seats.stages[s][i] for s, i in enumerate(layout.seats))
    priced = evaluate_layout(space, strategy, standing, layout.cuts, step_s=brief_step_s)
    return MixedDecision(
        strategy=strategy,
        seats=standing,
        cuts=layout.cuts,
        value_s=_exact(layout, priced),
        simulated_s=priced.step_s,
        proven_by=layout.proven_by,
    )


def _exact(layout: Layout, priced: Evaluation) -> float:
    """What the final plan costs; the tables' interpolated prices are within rounding of it."""
    if abs(layout.value_s - priced.objective_s) > 1e-6 * priced.objective_s:
        raise AssertionError(
            f"the search put {priced.strategy.describe()} at {layout.value_s!r} s, and its plan costs "
            f"{priced.objective_s!r} s"
        )
    return priced.objective_s


def evaluate_layout(
    space: MixedSpace,
    strategy: Strategy,
    standing: tuple[Seat, ...],
    cuts: tuple[int, ...],
    *,
    step_s: StepTime = step_s,
) -> Evaluation:
    """Price ``strategy`` with stages at ``cuts`` on ``standing``, each by the cost models on its own group."""
    _, seats = seats_of(space, strategy)
    stages = tuple(
        _stage(space, seats.tables[seat.group], seat.group, stage, first, end)
        for stage, (seat, (first, end)) in enumerate(zip(standing, itertools.pairwise(cuts), strict=True))
    )
    received, sent = seats.crossing_s(standing, cuts)
    times = StageTimes(
        schedule=strategy.schedule,
        micro_batches=strategy.micro_batches,
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        send_s=received,
        tail_s=tuple(stage.tail_s for stage in stages),
        sent_s=sent,
    )
    return timed(strategy, stages, received, times, step_s=step_s)


def _stage(space: MixedSpace, tables: GroupTables, group: int, stage: int, first: int, end: int) -> StageCosts:
    return stage_costs(space.spaces[group], tables, stage, first, end, tables.policies(stage, first, end))
