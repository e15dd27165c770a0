"""Questions beside "which plan?": does it fit, on how few GPUs, and how do the families compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, StrategyError
from autoplan.plan import Plan, Strategy
from autoplan.search.engine import Engine
from autoplan.search.evaluate import Evaluation, predicted
from autoplan.search.families import FamilyBest, best_of_families, best_where, family_of
from autoplan.search.heterogeneous_plan import Way, compare_groups
from autoplan.search.infeasible import fits, infeasible, like, smallest_count
from autoplan.search.planner import search
from autoplan.search.problem import Problem
from autoplan.search.shortfall import nearest
from autoplan.search.space import open_space

SHARDED = "data with sharded state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model fits: ``plan`` is what would be chosen and leaves ``headroom_bytes`` of its fullest GPU free;
    ``roomiest`` is the strategy that needs least memory, and leaves ``most_headroom_bytes``."""

    plan: Plan
    headroom_bytes: float
    roomiest: Strategy
    most_headroom_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewest:
    """The fewest GPUs of a kind that hold a model: ``cluster``, the strategy that fits it, and its global batch."""

    cluster: Cluster
    strategy: Strategy
    global_batch: int

    @property
    def gpus(self) -> int:
        return self.cluster.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """The best plan of a family, or (``short_by_bytes`` above 0, the other figures None) how none of it fits."""

    family: str
    strategy: Strategy
    chosen: bool
    step_time_s: float | None
    tokens_per_s: float | None
    peak_memory_bytes: float
    bubble_fraction: float | None
    exposed_communication_s: float | None
    short_by_bytes: float


def fit(problem: Problem) -> Fit:
    """Whether ``problem`` fits its cluster, with how much to spare. Raises :class:`InfeasibleError` where it does not,
    with what is missing and the nearest changes that fit."""
    plan = search(problem)
    if problem.cluster.groups:  # each stage against the GPUs that it stands on
        free = min(plan.cluster.memory_of(stage) - stage.peak_memory_bytes for stage in plan.stages)
        return Fit(plan=plan, headroom_bytes=free, roomiest=plan.strategy, most_headroom_bytes=free)
    roomy = nearest(Engine(space=open_space(problem), solver=None))
    capacity = problem.cluster.device.memory_bytes
    free = capacity - plan.predicted.peak_memory_bytes
    if roomy is None or -roomy.short_bytes < free:
        return Fit(plan=plan, headroom_bytes=free, roomiest=plan.strategy, most_headroom_bytes=free)
    return Fit(plan=plan, headroom_bytes=free, roomiest=roomy.strategy, most_headroom_bytes=-roomy.short_bytes)


def min_gpus(problem: Problem, *, batch_of: Callable[[int], int] | None = None) -> Fewest:
    """The fewest GPUs of the kind of ``problem.cluster`` that fit, whatever their number there.

    Counts are tried by doubling and then between the last two, whole nodes at a time past one node. ``batch_of`` gives
    the global batch for a count (the problem's own unless given). Raises :class:`InfeasibleError` where no count fits.
    """
    if problem.cluster.groups:
        kinds = tuple(dict.fromkeys(group.device.name for group in problem.cluster.groups))
        raise StrategyError(
            "the fewest GPUs are counted of one kind, and this cluster has several",
            where=problem.cluster.spec,
            legal=", ".join(kinds),
            attempt=f"--gpu {kinds[0]}",
        )
    alone = like(problem.cluster, 1, problem.cluster.device.name)
    if alone is None:
        raise StrategyError(f"one {problem.cluster.device.name} is no cluster", where=problem.cluster.spec)
    single = dataclasses.replace(problem, cluster=alone, global_batch=batch_of(1) if batch_of else problem.global_batch)
    found = fits(single)
    if found is not None:
        return Fewest(cluster=alone, strategy=found.strategy, global_batch=single.global_batch)
    counted = smallest_count(problem, above=1, batch_of=batch_of)
    if counted is None:
        raise infeasible(Engine(space=open_space(single), solver=None))
    return Fewest(cluster=counted.problem.cluster, strategy=counted.strategy, global_batch=counted.problem.global_batch)


def compare(problem: Problem) -> tuple[Contender, ...]:
    """The best plan of every family of parallelism, the chosen plan's family marked; on several kinds of GPUs the best
    plan of every way to use them. Raises :class:`StrategyError`."""
    if problem.cluster.groups:
        return tuple(_way(way) for way in compare_groups(problem))
    engine = Engine(space=open_space(problem), solver=None)
    families = best_of_families(engine)
    if not families:
        raise infeasible(engine)
    try:
        plan: Plan | None = search(problem)
    except InfeasibleError:
        plan = None
    return tuple(_with_zero_3(engine, [_contender(engine, family, chosen=plan) for family in families]))


def _with_zero_3(engine: Engine, contenders: list[Contender]) -> list[Contender]:
    """With fully sharded state beside the best of sharded state, where that is another stage."""
    place = next((i for i, contender in enumerate(contenders) if contender.family == SHARDED), None)
    if place is None or contenders[place].strategy.zero_stage == 3:
        return contenders
    rows = engine.space.candidates
    chosen = (rows.pipeline == 1) & (rows.tensor == 1) & (rows.zero_stage == 3)
    best = best_where(engine, "data with ZeRO-3", chosen)
    if best is None:
        return contenders
    return [*contenders[: place + 1], _contender(engine, best, chosen=None), *contenders[place + 1 :]]


def _way(way: Way) -> Contender:
    """One way to use a cluster of several kinds."""
    figures, short = way.figures, way.short
    return Contender(
        family=way.name,
        strategy=way.strategy,
        chosen=way.chosen,
        step_time_s=figures.step_time_s if figures else None,
        tokens_per_s=figures.tokens_per_s if figures else None,
        peak_memory_bytes=figures.peak_memory_bytes if figures else short.peak_bytes if short else 0.0,
        bubble_fraction=figures.bubble_fraction if figures else None,
        exposed_communication_s=figures.exposed_communication_s if figures else None,
        short_by_bytes=max(0.0, short.short_bytes) if short else 0.0,
    )


def _contender(engine: Engine, family: FamilyBest, chosen: Plan | None) -> Contender:
    if chosen is not None and family_of(chosen.strategy) == family.family:
        return _planned(family.family, chosen)
    if family.evaluation is not None:
        return _priced(engine, family.family, family.evaluation)
    short = family.shortfall
    if short is None:
        raise ValueError(f"family {family.family} has neither a plan nor a shortfall")
    return Contender(
        family=family.family,
        strategy=short.strategy,
        chosen=False,
        step_time_s=None,
        tokens_per_s=None,
        peak_memory_bytes=short.peak_bytes,
        bubble_fraction=None,
        exposed_communication_s=None,
        short_by_bytes=max(0.0, short.short_bytes),
    )


def _planned(family: str, plan: Plan) -> Contender:
    figures = plan.predicted
    return Contender(
        family=family,
        strategy=plan.strategy,
        chosen=True,
        step_time_s=figures.step_time_s,
        tokens_per_s=figures.tokens_per_s,
        peak_memory_bytes=figures.peak_memory_bytes,
        bubble_fraction=figures.bubble_fraction,
        exposed_communication_s=figures.exposed_communication_s,
        short_by_bytes=0.0,
    )


def _priced(engine: Engine, family: str, evaluation: Evaluation) -> Contender:
    figures = predicted(engine.space, evaluation)
    return Contender(
        family=family,
        strategy=evaluation.strategy,
        chosen=False,
        step_time_s=figures.step_time_s,
        tokens_per_s=figures.tokens_per_s,
        peak_memory_bytes=figures.peak_memory_bytes,
        bubble_fraction=figures.bubble_fraction,
        exposed_communication_s=figures.exposed_communication_s,
        short_by_bytes=0.0,
    )
