"""Nothing fits: by how much, what fills the GPU, and the nearest changes that do fit, each tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoplan.cluster import Cluster, device_kinds
from autoplan.errors import AutoplanError, InfeasibleError, StrategyError
from autoplan.plan import Strategy
from autoplan.search.conflicts import conflict, contradiction, without
from autoplan.search.constraints import asked
from autoplan.search.decisions import solve_strategy
from autoplan.search.engine import Engine
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.families import gib
from autoplan.search.problem import RECOMPUTE_POLICIES, ZERO_STAGES, Problem
from autoplan.search.shortfall import Shortfall, nearest
from autoplan.search.space import open_space

# Doublings of the GPUs before the search for a count that fits gives up, and counts tried between two doublings.
MOST_DOUBLINGS = 14
MOST_BETWEEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A candidate of ``problem`` that fits, and what its layers recompute."""

    problem: Problem
    strategy: Strategy
    recompute: tuple[str, ...]

    def __str__(self) -> str:
        recompute = f", recompute {' and '.join(self.recompute)}" if self.recompute else ""
        return f"{self.strategy.describe()}, micro-batch {self.strategy.micro_batch_size}{recompute}"


def infeasible(engine: Engine) -> AutoplanError:
    """The error for a problem none of whose candidates fits, or that has none."""
    space = engine.space
    problem = space.problem
    short = nearest(engine)
    if short is None:
        return _no_candidates(engine)
    cluster, term = problem.cluster, short.largest_term
    kept = f" with {problem.memory_headroom * 100:g}% kept free" if problem.memory_headroom else ""
    suggestions = tuple(_suggestions(problem, short))
    contradicting = conflict(problem, lambda asked: fits(asked) is not None)
    where = f" on stage {short.stage}" if short.strategy.pipeline > 1 else ""
    what = (
        f"{problem.layers.name} does not fit {cluster.spec} at global batch {problem.global_batch}: the nearest plan "
        f"({short.strategy.describe()}, micro-batch {short.strategy.micro_batch_size}) is {gib(short.short_bytes)} "
        f"short a GPU{where}, {gib(short.peak_bytes)} of {gib(problem.usable_bytes)}{kept}; the largest term is "
        f"{term.replace('_', ' ')}, {gib(short.terms[term])}"
    )
    if contradicting:
        what += f"; {contradiction(contradicting)}"
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
    forced = ", ".join(f"{key} {value}" for key, value in asked(problem).items()) or "nothing"
    reasons = [f"tensor {degree}: {why}" for degree, why in space.refused.items()]
    if problem.batch_coupling:
        reasons.append(f"the batch cannot be split: {problem.batch_coupling}")
    freed = tuple(_freed(problem))
    contradicting = contradiction(conflict(problem, _has_candidates))
    return StrategyError(
        f"no combination of degrees is legal on {problem.cluster.gpus} GPUs with global batch {problem.global_batch} "
        f"and what was forced ({forced})" + (f": {contradicting}" if contradicting else ""),
        where="; ".join(reasons),
        legal="data x tensor x pipeline that divides the GPUs, data x micro_batch_size that divides the global batch",
        attempt="; ".join(freed) or "another number of GPUs, or another global batch",
    )


def _has_candidates(problem: Problem) -> bool:
    try:
        return len(open_space(problem).candidates) > 0
    except AutoplanError:
        return False


def fits(problem: Problem) -> Fitting | None:
    """The problem's candidate with the least bound that fits, None if none does. Errors of the problem mean no."""
    try:
        engine = Engine(space=open_space(problem), solver=None)
        for index in engine.order():
            if engine.fits(index):
                strategy = engine.space.candidates.strategy(index)
                solution = solve_strategy(engine.space, strategy)
                if solution is not None and solution.split is not None:
                    ordered = engine.space.ordered(solution.split.order)
                    priced = evaluate_decision(ordered, strategy, solution.split.cuts)
                    used = {policy for stage in priced.stages for policy in stage.policies} - {"none"}
                    return Fitting(problem=problem, strategy=strategy, recompute=tuple(sorted(used)))
    except AutoplanError:
        return None
    return None


def _suggestions(problem: Problem, short: Shortfall) -> Iterator[str]:
    yield from _freed(problem)
    if problem.memory_headroom:
        found = fits(dataclasses.replace(problem, memory_headroom=0.0))
        if found is not None:
            yield f"without `memory_headroom` it fits ({found})"
    if problem.max_gpus is not None:
        found = fits(dataclasses.replace(problem, max_gpus=None))
        if found is not None:
            yield f"with more than `max_gpus` {problem.max_gpus} it fits ({found})"
    yield from _changed(problem, short)
    yield from _smaller_batch(problem)
    yield from _widened(problem)
    found = smallest_count(problem)
    if found is not None:
        yield f"{found.problem.cluster.gpus} GPUs of this kind are the fewest that fit ({found})"
    yield from _roomier(problem)


def _freed(problem: Problem) -> Iterator[str]:
    """Each forced key left out in turn, and each limit that has no sentence of its own."""
    for key in asked(problem):
        if key in ("memory_headroom", "max_gpus"):
            continue
        found = fits(without(problem, key))
        if found is not None:
            yield f"leave `{key}` free: it fits with {found}"


def _changed(problem: Problem, short: Shortfall) -> Iterator[str]:
    """Other values for forced keys, nearest first: a smaller micro-batch, recompute, more ZeRO, a tensor degree."""
    forced, strategy = problem.forced, short.strategy
    zero = int(forced.get("zero_stage", 0)) if str(forced.get("zero_stage", 0)).isdigit() else 0
    tries: dict[str, tuple[object, ...]] = {
        "micro_batch_size": tuple(m for m in _halves(strategy.micro_batch_size)),
        "recompute": tuple(p for p in ("selective", "full") if p in problem.recompute_policies),
        "zero_stage": tuple(stage for stage in problem.zero_stages if stage > zero),
        "tensor": tuple(2 * strategy.tensor * 2**k for k in range(3)),
    }
    for key, values in tries.items():
        if key not in forced:
            continue
        for value in values:
            found = fits(dataclasses.replace(problem, forced={**forced, key: value}))
            if found is not None:
                yield f"{key}={value} fits ({found})"
                break


def _smaller_batch(problem: Problem) -> Iterator[str]:
    """Where the batch cannot be split, half of it, and so on: elsewhere smaller micro-batches were tried."""
    if not problem.batch_coupling or problem.fixed_micro_batch:
        return
    for batch in _halves(problem.global_batch):
        found = fits(dataclasses.replace(problem, global_batch=batch))
        if found is not None:
            yield f"global_batch={batch} fits ({found})"
            return


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size


def _widened(problem: Problem) -> Iterator[str]:
    """What can be priced but is not executed here: it tells the user what to wait for, or to plan for."""
    if set(problem.recompute_policies) < set(RECOMPUTE_POLICIES):
        found = fits(dataclasses.replace(problem, recompute_policies=RECOMPUTE_POLICIES))
        if found is not None:
            yield f"with recompute, which this runtime does not execute yet, it would fit ({found})"
    if set(problem.zero_stages) < set(ZERO_STAGES):
        found = fits(dataclasses.replace(problem, zero_stages=ZERO_STAGES))
        if found is not None:
            yield f"with ZeRO-3, which this runtime does not execute yet, it would fit ({found})"


def _roomier(problem: Problem) -> Iterator[str]:
    """The same number of GPUs of the smallest kind with more memory that fits."""
    have = problem.cluster.device
    kinds = []
    for kind in device_kinds():
        cluster = like(problem.cluster, problem.cluster.gpus, kind)
        if cluster is not None and cluster.device.memory_bytes > have.memory_bytes:
            kinds.append((cluster.device.memory_bytes, kind, cluster))
    for _, kind, cluster in sorted(kinds, key=lambda entry: entry[:2]):
        if fits(dataclasses.replace(problem, cluster=cluster)) is not None:
            yield f"{problem.cluster.gpus} {kind} ({gib(cluster.device.memory_bytes)} each) fit"
            return


def smallest_count(
    problem: Problem, *, above: int | None = None, batch_of: Callable[[int], int] | None = None
) -> Fitting | None:
    """The fewest GPUs of the cluster's kind ``above`` a number (its own) that fit: doubling until one fits, then the
    counts between. ``batch_of``: the global batch for a count; the problem's own unless given."""
    tried = problem.cluster.gpus if above is None else above
    for _ in range(MOST_DOUBLINGS):
        more = _whole_nodes(problem.cluster, 2 * tried)
        found = _fits_on(problem, more, batch_of)
        if found is not None:
            return _between(problem, tried, more, batch_of) or found
        tried = more
    return None


def _whole_nodes(cluster: Cluster, gpus: int) -> int:
    """``gpus``, or as many as fill the last of the cluster's nodes, where so many do not."""
    each = cluster.gpus_per_node
    return gpus if like(cluster, gpus, cluster.device.name) else -(-gpus // each) * each


def _between(problem: Problem, low: int, high: int, batch_of: Callable[[int], int] | None) -> Fitting | None:
    """The smallest count above ``low`` and below ``high`` that fits, in steps that keep nodes whole."""
    width = problem.cluster.gpus_per_node if low >= problem.cluster.gpus_per_node and problem.cluster.nodes > 1 else 1
    if low % 8 == 0:
        width = max(width, 8)
    step = max(width, -(-(high - low) // MOST_BETWEEN // width) * width)
    for count in range(low + step, high, step):
        found = _fits_on(problem, count, batch_of)
        if found is not None:
            return found
    return None


def _fits_on(problem: Problem, gpus: int, batch_of: Callable[[int], int] | None) -> Fitting | None:
    cluster = like(problem.cluster, gpus, problem.cluster.device.name)
    if cluster is None:
        return None
    batch = batch_of(gpus) if batch_of else problem.global_batch
    return fits(dataclasses.replace(problem, cluster=cluster, global_batch=batch, max_gpus=None))


def like(cluster: Cluster, gpus: int, kind: str) -> Cluster | None:
    """``gpus`` GPUs of ``kind`` laid out as that kind usually is; for this cluster's own kind with its own links, and
    in nodes of its size where it has several."""
    try:
        usual = Cluster.parse(f"{gpus}x{kind}")
    except AutoplanError:
        usual = None
    if kind != cluster.device.name:
        return usual
    nodes, each = _nodes(cluster, gpus, usual)
    if nodes * each != gpus:
        return None
    inter = cluster.inter if usual is None or cluster.nodes > 1 else usual.inter
    made = dataclasses.replace(cluster, nodes=nodes, gpus_per_node=each, inter=inter, assumptions=())
    if usual is not None and usual.fingerprint == made.fingerprint:
        return usual
    spread = f"{nodes} nodes of " if nodes > 1 else ""
    counted = f"{each} GPUs" if each > 1 else "1 GPU"
    return dataclasses.replace(made, spec=f"{spread}{counted} as in {cluster.spec}")


def _nodes(cluster: Cluster, gpus: int, usual: Cluster | None) -> tuple[int, int]:
    """How many nodes of how many GPUs."""
    if cluster.nodes > 1 or usual is None:
        each = min(gpus, cluster.gpus_per_node)
        return gpus // each, each
    return usual.nodes, usual.gpus_per_node
