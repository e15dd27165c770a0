"""Nothing fits: by how much, what fills the GPU, and the nearest changes that do fit, each tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from autoplan.cluster import Cluster, device_kinds
from autoplan.errors import AutoplanError, InfeasibleError, StrategyError
from autoplan.search.engine import Engine, solve_strategy
from autoplan.search.families import gib
from autoplan.search.problem import RECOMPUTE_POLICIES, ZERO_STAGES, Problem
from autoplan.search.shortfall import nearest
from autoplan.search.space import open_space

# Doublings of the GPUs before the search for a count that fits gives up, and counts tried between two doublings.
MOST_DOUBLINGS = 14
MOST_BETWEEN = 16


def infeasible(engine: Engine) -> AutoplanError:
    """The error for a problem none of whose candidates fits, or that has none."""
    space = engine.space
    problem = space.problem
    short = nearest(engine)
    if short is None:
        return _no_candidates(engine)
    cluster, term = problem.cluster, short.largest_term
    suggestions = tuple(_suggestions(problem))
    where = f" on stage {short.stage}" if short.strategy.pipeline > 1 else ""
    what = (
        f"{problem.layers.name} does not fit {cluster.spec} at global batch {problem.global_batch}: the nearest plan "
        f"({short.strategy.describe()}, micro-batch {short.strategy.micro_batch_size}) is {gib(short.short_bytes)} "
        f"short a GPU{where}, {gib(short.peak_bytes)} of {gib(cluster.device.memory_bytes)}; the largest term is "
        f"{term.replace('_', ' ')}, {gib(short.terms[term])}"
    )
    return InfeasibleError(
        what,
        short_by_bytes=short.short_bytes,
        term=term,
        suggestions=suggestions,
        where=f"{problem.layers.name} on {cluster.spec}",
        attempt="; ".join(suggestions) or "a model with smaller layers, or a kind of GPU with more memory",
    )


def _no_candidates(engine: Engine) -> StrategyError:
    """Each forced value is legal by itself, and together they leave nothing."""
    problem, space = engine.space.problem, engine.space
    forced = ", ".join(f"{key} {value}" for key, value in problem.forced.items()) or "nothing"
    reasons = [f"tensor {degree}: {why}" for degree, why in space.refused.items()]
    if problem.batch_coupling:
        reasons.append(f"the batch cannot be split: {problem.batch_coupling}")
    freed = tuple(_freed(problem))
    return StrategyError(
        f"no combination of degrees is legal on {problem.cluster.gpus} GPUs with global batch {problem.global_batch} "
        f"and what was forced ({forced})",
        where="; ".join(reasons),
        legal="data x tensor x pipeline that divides the GPUs, data x micro_batch_size that divides the global batch",
        attempt="; ".join(freed) or "another number of GPUs, or another global batch",
    )


def fits(problem: Problem) -> str:
    """How the problem's nearest candidate that fits is called, "" if none fits. Errors of the problem mean no."""
    try:
        engine = Engine(space=open_space(problem), solver=None)
        for index in engine.order():
            if engine.fits(index):
                strategy = engine.space.candidates.strategy(index)
                solution = solve_strategy(engine.space, strategy)
                if solution is not None and solution.split is not None:
                    return f"{strategy.describe()}, micro-batch {strategy.micro_batch_size}"
    except AutoplanError:
        return ""
    return ""


def _suggestions(problem: Problem) -> Iterator[str]:
    yield from _freed(problem)
    yield from _widened(problem)
    count = smallest_count(problem)
    if count:
        yield f"{count[0]} GPUs of this kind are the fewest that fit ({count[1]})"
    yield from _roomier(problem)


def _freed(problem: Problem) -> Iterator[str]:
    """Each forced key left out in turn."""
    for key in problem.forced:
        rest = {k: v for k, v in problem.forced.items() if k != key}
        found = fits(dataclasses.replace(problem, forced=rest))
        if found:
            yield f"leave `{key}` free: it fits with {found}"


def _widened(problem: Problem) -> Iterator[str]:
    """What can be priced but is not executed here: it tells the user what to wait for, or to plan for."""
    if set(problem.recompute_policies) < set(RECOMPUTE_POLICIES):
        found = fits(dataclasses.replace(problem, recompute_policies=RECOMPUTE_POLICIES))
        if found:
            yield f"with recompute, which this runtime does not execute yet, it would fit ({found})"
    if set(problem.zero_stages) < set(ZERO_STAGES):
        found = fits(dataclasses.replace(problem, zero_stages=ZERO_STAGES))
        if found:
            yield f"with ZeRO-3, which this runtime does not execute yet, it would fit ({found})"


def _roomier(problem: Problem) -> Iterator[str]:
    """The same number of GPUs of the smallest kind with more memory that fits."""
    have = problem.cluster.device
    kinds = []
    for kind in device_kinds():
        cluster = _like(problem.cluster, problem.cluster.gpus, kind)
        if cluster is not None and cluster.device.memory_bytes > have.memory_bytes:
            kinds.append((cluster.device.memory_bytes, kind, cluster))
    for _, kind, cluster in sorted(kinds, key=lambda entry: entry[:2]):
        if fits(dataclasses.replace(problem, cluster=cluster)):
            yield f"{problem.cluster.gpus} {kind} ({gib(cluster.device.memory_bytes)} each) fit"
            return


def smallest_count(problem: Problem) -> tuple[int, str] | None:
    """The fewest GPUs of the cluster's kind that fit, and how: doubling until one fits, then the counts between."""
    tried = problem.cluster.gpus
    for _ in range(MOST_DOUBLINGS):
        found = _fits_on(problem, 2 * tried)
        if found:
            return _between(problem, tried, 2 * tried) or (2 * tried, found)
        tried *= 2
    return None


def _between(problem: Problem, low: int, high: int) -> tuple[int, str] | None:
    """The smallest count above ``low`` and below ``high`` that fits, in steps that keep nodes whole."""
    width = problem.cluster.gpus_per_node if low >= problem.cluster.gpus_per_node and problem.cluster.nodes > 1 else 1
    if low % 8 == 0:
        width = max(width, 8)
    step = max(width, -(-(high - low) // MOST_BETWEEN // width) * width)
    for count in range(low + step, high, step):
        found = _fits_on(problem, count)
        if found:
            return count, found
    return None


def _fits_on(problem: Problem, gpus: int) -> str:
    cluster = _like(problem.cluster, gpus, problem.cluster.device.name)
    return fits(dataclasses.replace(problem, cluster=cluster)) if cluster is not None else ""


def _like(cluster: Cluster, gpus: int, kind: str) -> Cluster | None:
    """``gpus`` GPUs of ``kind`` laid out as that kind usually is; for this cluster's own kind with its own links."""
    try:
        usual = Cluster.parse(f"{gpus}x{kind}")
    except AutoplanError:
        usual = None
    if kind != cluster.device.name:
        return usual
    if cluster.nodes > 1 or usual is None:
        nodes, rest = divmod(gpus, cluster.gpus_per_node)
        return None if rest else dataclasses.replace(cluster, nodes=nodes, spec=f"{gpus}x{kind}")
    return dataclasses.replace(
        usual, device=cluster.device, intra=cluster.intra, inter=cluster.inter if cluster.nodes > 1 else usual.inter
    )
