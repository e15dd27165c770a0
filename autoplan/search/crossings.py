"""Where the decision stands to links and to memory: at which speed of one kind of links another family's plan would
win, and with how much memory a family that does not fit would, and how long it would then take.

The plan and the best of each family that lost keep their stages. Over other links only what they transfer is priced
again, which takes a fraction of a millisecond each; what does not fit is priced on GPUs that just hold it, which takes
a few. A search there cuts stages anew and recomputes otherwise, so that the decision changes near what is found here,
and mostly before it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autoplan.cluster import Cluster
from autoplan.cost_models import communication
from autoplan.cost_models.compute import OperatorTime
from autoplan.cost_models.data_parallel import DataParallelTime
from autoplan.layers.types import Collective, LayerKind
from autoplan.plan import Crossing, Strategy
from autoplan.search import listed
from autoplan.search.choice import SHARDING_TOLERANCE
from autoplan.search.engine import TOLERANCE
from autoplan.search.evaluate import Evaluation, StageCosts, evaluate_decision
from autoplan.search.problem import Problem
from autoplan.search.shortfall import Shortfall
from autoplan.search.space import Space, open_space
from autoplan.search.tables import MARGIN
from autoplan.search.timing import brief_step_s

# Times as fast, or as slow, that are tried; steps of the bisection to the nearest, on a scale of ratios.
FURTHEST, HALVINGS = 8.0, 5
ROUNDING = 1e-9  # of memory: what just fits by one sum fits by another

Scaled = Callable[[Cluster, float], Cluster]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A decision, and the space in whose order its layers are."""

    space: Space
    evaluation: Evaluation
    # What layers wait for their collectives of the tensor axis where the plan was made.
    waits: dict[tuple[Collective, ...], OperatorTime] = field(default_factory=dict, repr=False, compare=False)


def crossings(chosen: Priced, others: Sequence[Priced]) -> tuple[Crossing, ...]:
    """For links between nodes and inside a node, faster and slower, the nearest speed at which one of ``others`` would
    win; one entry without a strategy for links that change nothing from an eighth to eight times their speed. () where
    nothing is transferred, or links are not what limits it (processes of one machine's CPU)."""
    cluster = chosen.space.problem.cluster
    if cluster.device.is_cpu or not others or cluster.gpus == 1:
        return ()
    return tuple(found for kind in kinds_of_links(cluster) for found in _of_kind(chosen, others, *kind))


def kinds_of_links(cluster: Cluster) -> list[tuple[str, float, Scaled]]:
    """The kinds of links that ``cluster`` has: a crossing's quantity, bytes a second, and what makes them so many times
    as fast."""
    kinds: list[tuple[str, float, Scaled]] = []
    if cluster.nodes > 1:
        kinds.append(("inter_bytes_per_s", cluster.inter.bytes_per_s, lambda c, f: c.with_links(inter=f)))
    if cluster.gpus_per_node > 1:
        kinds.append(("intra_bytes_per_s", cluster.intra.bytes_per_s, lambda c, f: c.with_links(intra=f)))
    return kinds


def fitting(problem: Problem, short: Sequence[Shortfall]) -> tuple[Crossing, ...]:
    """With how much memory of a GPU each of ``short``, of one kind of GPUs, would fit, and its step on such: with the
    stages that need least, and recomputing no more than it must."""
    if problem.cluster.groups:
        return ()
    memory = problem.cluster.device.memory_bytes
    found = []
    for each in short:
        value = memory + each.short_bytes / (1 - problem.memory_headroom)
        roomy = problem.cluster.with_memory(value / memory / (1 - MARGIN) * (1 + ROUNDING))
        space = open_space(dataclasses.replace(problem, cluster=roomy)).ordered(each.order)
        priced = evaluate_decision(space, each.strategy, each.cuts, step_s=brief_step_s)
        found.append(
            Crossing(
                quantity="memory_bytes",
                value=value,
                factor=value / memory,
                strategy=each.strategy,
                step_time_s=priced.step_s,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A decision whose step is known at any speed of one kind of links: ``step_s`` of so many times as fast."""

    strategy: Strategy
    step_s: Callable[[float], float]


def _of_kind(chosen: Priced, others: Sequence[Priced], quantity: str, now: float, scaled: Scaled) -> Iterator[Crossing]:
    there = functools.cache(functools.partial(scaled, chosen.space.problem.cluster))

    def rival(priced: Priced) -> Rival:
        return Rival(strategy=priced.evaluation.strategy, step_s=lambda factor: step_s(priced, there(factor)))

    return of_rivals(rival(chosen), [rival(other) for other in others], quantity, now)


def of_rivals(chosen: Rival, others: Sequence[Rival], quantity: str, now: float) -> Iterator[Crossing]:
    """The nearest of faster and of slower links at which one of ``others`` wins; where none does, one entry without a
    strategy. ``now`` is the speed that a factor is of."""
    found = [nearest for furthest in (FURTHEST, 1 / FURTHEST) if (nearest := _nearest(chosen, others, furthest))]
    for factor, winner, step_s in found:
        strategy = winner.strategy
        yield Crossing(quantity=quantity, value=now * factor, factor=factor, strategy=strategy, step_time_s=step_s)
    if not found:
        yield Crossing(quantity=quantity, value=now * FURTHEST, factor=FURTHEST, strategy=None, step_time_s=None)


def _nearest(chosen: Rival, others: Sequence[Rival], furthest: float) -> tuple[float, Rival, float] | None:
    """The factor nearest to 1, of those that bisection tries, at which one of ``others`` wins; that one; its step."""

    def winners(among: Sequence[Rival], factor: float) -> list[tuple[float, Rival]]:
        own_s = chosen.step_s(factor)
        timed = [(other.step_s(factor), other) for other in among]
        return [(s, other) for s, other in timed if s * (1 + _margin(chosen, other)) < own_s]

    won = winners(others, furthest)
    if not won:
        return None
    near, far = 0.0, math.log(furthest)
    for _ in range(HALVINGS):
        middle = (near + far) / 2
        if sooner := winners([other for _, other in won], math.exp(middle)):
            far, won = middle, sooner
        else:
            near = middle
    least_s, winner = min(won, key=lambda pair: pair[0])
    return math.exp(far), winner, least_s


def _margin(chosen: Rival, other: Rival) -> float:
    """By how much ``other`` must be faster for the search to leave ``chosen``, whichever is less parallel."""
    one, strategy = chosen.strategy, other.strategy
    sharded = strategy.zero_stage and not one.zero_stage and one.data > 1
    return SHARDING_TOLERANCE if sharded else TOLERANCE


def step_s(priced: Priced, cluster: Cluster) -> float:
    """The step on ``cluster``, whose links alone differ: what it takes on the decision's own, and by how much what the
    search minimises changes."""
    evaluation, strategy = priced.evaluation, priced.evaluation.strategy
    if evaluation.times is None:
        raise ValueError(f"{strategy.describe()}: its stages were not timed")
    cuts = (*(stage.first for stage in evaluation.stages), evaluation.stages[-1].end)
    tables = dataclasses.replace(priced.space.tables(strategy), cluster=cluster).of_split(cuts)
    waits = _Waits(priced=priced, there=cluster)
    shared: dict[int, DataParallelTime] = {}  # stages that are alike are one row
    forward, backward, tails = [], [], []
    for stage, row in zip(evaluation.stages, tables.row_of_span.tolist(), strict=True):
        if row not in shared:
            elements, trainable = float(tables.elements[row]), float(tables.trainable[row])
            shared[row] = tables.data_axis(
                elements, trainable, stage.end - stage.first, backward_s=stage.compute_backward_s
            )
        data, (ahead_s, back_s) = shared[row], waits.more_s(stage)
        forward.append(stage.forward_s - stage.data.forward_s + data.forward_s + ahead_s)
        backward.append(stage.backward_s - stage.data.backward_s + data.backward_s + back_s)
        tails.append(data.step_s + tables.tied_apart_s(stage.first, stage.end) + stage.optimizer_s)
    timed = dataclasses.replace(
        evaluation.times,
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        tail_s=tuple(tails),
        send_s=listed.sends_s(tables, cuts) if listed.is_listed(strategy) else tables.receives_s(),
        sent_s=tables.sent_s() if evaluation.times.sent_s else (),
    )
    return evaluation.step_s + timed.objective_s - evaluation.times.objective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waits:
    """How much longer layers of ``priced`` wait for collectives of the tensor axis ``there`` than where they were
    planned; layers of the same collectives are asked once."""

    priced: Priced
    there: Cluster
    _more: dict[tuple[Collective, ...], OperatorTime] = field(default_factory=dict)

    def more_s(self, stage: StageCosts) -> tuple[float, float]:
        """In a micro-batch's forward and backward of ``stage``; what is computed again waits again."""
        if self.priced.evaluation.strategy.tensor == 1:
            return 0.0, 0.0
        each = [self._of(kind) for kind in stage.kinds]
        again_s = sum(more.forward_s for more, policy in zip(each, stage.policies, strict=True) if policy == "full")
        return sum(more.forward_s for more in each), sum(more.backward_s for more in each) + again_s

    def _of(self, kind: LayerKind) -> OperatorTime:
        more = self._more.get(kind.collectives)
        if more is None:
            here, there = self._here(kind), self._on(self.there, kind)
            more = OperatorTime(
                forward_s=there.forward_s - here.forward_s, backward_s=there.backward_s - here.backward_s
            )
            self._more[kind.collectives] = more
        return more

    def _here(self, kind: LayerKind) -> OperatorTime:
        waits = self.priced.waits
        if kind.collectives not in waits:
            waits[kind.collectives] = self._on(self.priced.space.problem.cluster, kind)
        return waits[kind.collectives]

    def _on(self, cluster: Cluster, kind: LayerKind) -> OperatorTime:
        strategy = self.priced.evaluation.strategy
        return communication.tensor_time(kind, cluster, degree=strategy.tensor, micro_batch=strategy.micro_batch_size)
