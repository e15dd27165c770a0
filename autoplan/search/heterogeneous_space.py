"""Pipelines over groups of GPUs of several kinds: the candidates, their prices on each group, and their bounds.

A candidate is one mesh: data x tensor GPUs in every stage, the same in all of them, and a number of stages, ZeRO stage
and micro-batch size as on one kind. Each stage stands on consecutive GPUs of one group; which group, and which layers,
is the split's to choose (:mod:`autoplan.search.heterogeneous_split`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import Cluster, Link
from autoplan.cost_models import communication
from autoplan.plan import Strategy
from autoplan.search.bounds import least_bytes
from autoplan.search.constraints import permits
from autoplan.search.degrees import divisors
from autoplan.search.forced import Forced
from autoplan.search.problem import Problem
from autoplan.search.space import Space
from autoplan.search.tables import MARGIN, Tables

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GroupTables(Tables):
    """Arcs of a strategy on one group. ``apart``: the slowest link between any two groups, which sums of tied
    parameters' gradients are priced on, wherever their stages stand. ``fixed``: the stage boundaries that the user
    wants, () if free."""

    apart: Link
    fixed: tuple[int, ...] = ()

    def alone(self, stage: int) -> tuple[Floats, Floats]:
        """[L + 1, L + 1] seconds of a micro-batch without sends, and after the last one, of every span that may be
        ``stage``; inf elsewhere."""
        return self._of_stage(stage, self.extra(self.in_flight(stage)))

    def at_best(self, stage: int) -> tuple[Floats, Floats]:
        """The same with no more recompute than fits, and cheap to find."""
        return self._of_stage(stage, self._optimistic[stage])

    def _of_stage(self, stage: int, extra: Floats) -> tuple[Floats, Floats]:
        first, end = self.spans
        member, last = self._alike[2], self.strategy.pipeline - 1
        period = (self.base_period + extra)[member]
        legal = np.isfinite(period) & ((first == 0) == (stage == 0)) & ((end == self.chain.layers) == (stage == last))
        if self.fixed:
            legal &= (first == self.fixed[stage]) & (end == self.fixed[stage + 1])
        where = first[legal], end[legal]
        return self._dense(where, period[legal]), self._dense(where, self.tail[member][legal])

    def tied_s(self, elements: int) -> float:
        joined = joined_by(self.cluster, self.apart)
        pair = communication.Group(size=2, stride=joined.gpus_per_node)
        return communication.all_reduce_s(joined, pair, elements * self.recipe.gradients)


def joined_by(cluster: Cluster, link: Link) -> Cluster:
    """Two single GPUs of ``cluster`` with ``link`` between them, to price what crosses it."""
    return dataclasses.replace(cluster, nodes=2, gpus_per_node=1, inter=link)


@dataclass(frozen=True, kw_only=True)
class MixedSpace:
    """A problem on several groups. ``groups``: positions in the cluster of those that can compute the precision;
    ``spaces``: the problem priced on each of them."""

    problem: Problem
    forced: Forced
    groups: tuple[int, ...]
    spaces: tuple[Space, ...]
    _work: dict[tuple[int, int], Work] = field(default_factory=dict, init=False)
    _least: dict[tuple[str | int, ...], float] = field(default_factory=dict, init=False)

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """The usable groups."""
        return tuple(space.problem.cluster for space in self.spaces)

    @cached_property
    def slowest(self) -> Link:
        """The slowest link between two usable groups."""
        pairs = itertools.combinations(self.groups, 2)
        return min((self.problem.cluster.link_between(*pair) for pair in pairs), key=lambda link: link.bytes_per_s)

    def link(self, one: int, other: int) -> Link:
        """The link between two usable groups."""
        return self.problem.cluster.link_between(self.groups[one], self.groups[other])

    def tables(self, group: int, strategy: Strategy, *, period_limit_s: float = math.inf) -> GroupTables:
        """The arcs of ``strategy`` on a usable group."""
        base = self.spaces[group].tables(strategy, period_limit_s=period_limit_s)
        given = {f.name: getattr(base, f.name) for f in dataclasses.fields(base) if f.init}
        return GroupTables(**given, apart=self.slowest, fixed=self.problem.stages)

    def slots(self, group: int, strategy: Strategy) -> int:
        """Stages of ``strategy`` that a usable group can hold."""
        return slots(self.clusters[group], strategy.data, strategy.tensor)

    def work(self, tensor: int, micro_batch: int) -> Work:
        """A micro-batch through all layers, remembered."""
        key = (tensor, micro_batch)
        if key not in self._work:
            chains = [each.chain(tensor, micro_batch) for each in self.spaces]
            self._work[key] = _work(
                np.stack([np.diff(chain.period) for chain in chains]),
                np.stack([np.diff(chain.backward) for chain in chains]),
                max(chain.lesser_share for chain in chains),
            )
        return self._work[key]

    def around(self, strategy: Strategy) -> tuple[float, float, float]:
        """Seconds that the data axis adds at least to all stages every micro-batch, and to the longest tail; and of the
        quickest send between stages."""
        mesh = strategy.tensor, strategy.data, strategy.zero_stage
        every = self._remembered(("every", *mesh, strategy.micro_batch_size), lambda: self._every_s(strategy))
        once = self._remembered(("once", *mesh, strategy.pipeline), lambda: self._once_s(strategy))
        send = self._remembered(("send", strategy.tensor, strategy.micro_batch_size), lambda: self._send_s(strategy))
        return every, once, send

    def _remembered(self, key: tuple[str | int, ...], price: Callable[[], float]) -> float:
        if key not in self._least:
            self._least[key] = price()
        return self._least[key]

    def _every_s(self, strategy: Strategy) -> float:
        if strategy.data == 1:
            return 0.0
        backward = np.array([self.work(strategy.tensor, strategy.micro_batch_size).backward_s])
        return min(
            float(each.tables(strategy).least_data_axis(*each.totals(strategy), backward)[0][0]) for each in self.spaces
        )

    def _once_s(self, strategy: Strategy) -> float:
        """Of an even share of the parameters, which some stage has at least; what can be hidden is."""
        least = []
        for each in self.spaces:
            tables = each.tables(strategy)
            elements, trainable = (total / strategy.pipeline for total in each.totals(strategy))
            shown = tables.least_data_axis(elements, trainable, np.array([math.inf]))[1]
            least.append(float(shown[0]) + tables.optimizer_s(trainable))
        return min(least)

    def _send_s(self, strategy: Strategy) -> float:
        least = self.spaces[0].chain(strategy.tensor, strategy.micro_batch_size).least_crossing
        if not math.isfinite(least):
            return 0.0
        links = [link for cluster in self.clusters for link in (cluster.intra, cluster.inter)]
        device = self.clusters[0]
        return min(
            communication.send_s(joined_by(device, link), least, 1) for link in (*links, *self.problem.cluster.between)
        )

    def least_bytes(self, strategy: Strategy) -> float:
        """Bytes that all stages of one rank hold at least, without what is there whatever the layers."""
        mesh = strategy.tensor, strategy.micro_batch_size, strategy.data, strategy.zero_stage
        return self._remembered(("bytes", *mesh), lambda: min(least_bytes(each, strategy)[0] for each in self.spaces))

    @cached_property
    def candidates(self) -> tuple[Strategy, ...]:
        """Every legal strategy with at least two stages, in an order that depends on nothing else."""
        if not _offered(self.problem, self.forced) or len(self.spaces) < 2:
            return ()
        every = itertools.chain.from_iterable(self._of_mesh(*mesh) for mesh in self._meshes())
        return tuple(strategy for strategy in every if permits(self.problem, strategy))

    def _meshes(self) -> list[tuple[int, int, int]]:
        """(data, tensor, most stages)."""
        problem, forced = self.problem, self.forced
        tensors = sorted({degree for space in self.spaces for degree in space.tensors})
        layers = len(problem.layers.layers)
        most_gpus = problem.max_gpus or problem.cluster.gpus
        answer = []
        for tensor in tensors:
            for data in divisors(problem.global_batch):
                if forced.tensor not in (None, tensor) or forced.data not in (None, data):
                    continue
                if data > 1 and problem.batch_coupling:
                    continue
                held = [slots(cluster, data, tensor) for cluster in self.clusters]
                stages = min(layers, sum(held), most_gpus // (data * tensor))
                if sum(count > 0 for count in held) > 1 and stages > 1:
                    answer.append((data, tensor, stages))
        return answer

    def _of_mesh(self, data: int, tensor: int, most: int) -> list[Strategy]:
        problem, forced = self.problem, self.forced
        zero_stages = problem.zero_stages if data > 1 else (0,)
        return [
            Strategy(
                data=data,
                tensor=tensor,
                pipeline=stages,
                zero_stage=zero,
                micro_batch_size=micro,
                micro_batches=problem.global_batch // (data * micro),
                schedule=self._schedule,
            )
            for stages in range(2, most + 1)
            if forced.pipeline in (None, stages)
            for micro in divisors(problem.global_batch // data)
            if forced.micro_batch_size in (None, micro) and problem.fixed_micro_batch in (None, micro)
            if not problem.batch_coupling or micro == problem.global_batch
            for zero in zero_stages
            if forced.zero_stage in (None, zero)
        ]

    @property
    def _schedule(self) -> str:
        return self.forced.schedule or ("1f1b" if "1f1b" in self.problem.schedules else self.problem.schedules[0])


def slots(cluster: Cluster, data: int, tensor: int) -> int:
    """Stages of data x tensor GPUs that ``cluster`` holds with whole structure: several in a node, or whole nodes
    each."""
    width, node = data * tensor, cluster.gpus_per_node
    if node % tensor or (node % width and width % node):
        return 0
    return cluster.gpus // width


def _offered(problem: Problem, forced: Forced) -> bool:
    """Whether pipelines over kinds run what is forced."""
    plain = forced.schedule in (None, "1f1b", "gpipe") and forced.virtual_stages in (None, 1)
    return plain and not problem.sequence_forced and problem.expert == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A micro-batch through all layers, each on the group that is best for it: seconds in all (``period_s``), of the
    longest layer, and in all where a second of a group counts as its speed (``weighed_s``; the fastest group's is 1);
    the longest that all backwards can take; and the ``share`` of its period that no run of layers exceeds with both its
    forward and its backward."""

    period_s: float
    longest_s: float
    weighed_s: float
    speeds: Floats
    backward_s: float
    share: float


def _work(layers: Floats, backward: Floats, share: float) -> Work:
    """From [groups, layers] seconds of each layer, and of its backward."""
    least, whole = layers.min(axis=0), np.maximum(layers.sum(axis=1), 1e-300)
    speeds = whole.min() / whole
    return Work(
        period_s=float(least.sum()),
        longest_s=float(least.max(initial=0.0)),
        weighed_s=float((layers * speeds[:, None]).min(axis=0).sum()),
        speeds=speeds,
        backward_s=float(backward.max(axis=0).sum()),
        share=share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedBound:
    """No layout of a candidate takes less in closed form, nor in the simulator; ``fits``: none is ruled out by the sum
    of memory."""

    step_s: float
    simulated_s: float
    fits: bool


def bound_of(space: MixedSpace, strategy: Strategy) -> MixedBound:
    """A bound from each layer's time on the group that is best for it.

    With v_g the speed of group g, the stages' seconds weigh at least W = sum_l min_g v_g t_g(l) together, so that the
    longest takes W over the most that S stages can weigh (the fastest GPUs first), and an even share of P = sum_l min_g
    t_g(l). With a longest stage of B the n_g stages of group g do v_g n_g B of the work, and what is over is with the
    next slower group: the least sum of periods, which with (M - 1) B is least at the least B or where a group is full.
    The simulator's: :func:`_simulated_s`.
    """
    held = tuple(space.slots(group, strategy) for group in range(len(space.spaces)))
    work = space.work(strategy.tensor, strategy.micro_batch_size)
    stages, micro_batches = strategy.pipeline, strategy.micro_batches
    every, once, send = space.around(strategy)
    period = work.period_s + every
    longest = max(period / stages, work.longest_s, work.weighed_s / _most(held, work.speeds, stages))
    share = 0.5 if every > 0 else work.share
    simulated = _simulated_s(strategy, work, held, share, every, 2 * (stages - 1) * send)
    simulated = max(micro_batches * longest, simulated, period)
    step = _closed_form_s(strategy, work, held, longest, every, send)
    return MixedBound(step_s=step + once, simulated_s=simulated, fits=_fits(space, strategy, held))


def _simulated_s(
    strategy: Strategy, work: Work, held: tuple[int, ...], share: float, every_s: float, sends_s: float
) -> float:
    """Seconds of a simulated step that no layout beats. ``share``: no stage's forward and backward both take more of
    its period.

    Stage s waits for all before it, forth and back: step >= sum_{i < s} T_i + M T_s, so that any k stages hold at most
    step x (1 - (1 - 1/M)^k). Under 1F1B besides (:mod:`autoplan.search.simulated`; P all periods, D all sends, w =
    min(M, S - s), x the share) u = step - P - D >= (M - 1 - (w - 1) x) T_s, and with M > S also u >= sum_{i > s} T_i +
    (M - S + s) T_s, so that any k stages hold at most u k / (M - S + k - 1). What stages hold, weighed by their groups'
    speeds, must be the work, the fastest first: that is the least u. P grows as slower groups take what the longest
    stage under u leaves.
    """
    stages, micro_batches = strategy.pipeline, strategy.micro_batches
    counts, rates = _filled(work, held, stages)
    speeds = np.repeat(1 / np.array(rates), counts)
    falls = -np.diff(np.array([*speeds, 0.0]))
    k = np.arange(1, stages + 1)
    least = work.weighed_s / float(falls @ (1 - (1 - 1 / micro_batches) ** k))
    waits = micro_batches - 1 - (np.minimum(micro_batches, k) - 1) * share
    if strategy.schedule != "1f1b" or waits.min() <= 0:
        return least
    above, longest = work.weighed_s / float(speeds @ np.sort(1 / waits)[::-1]), 1 / float(waits.min())
    if micro_batches > stages:
        above = max(above, work.weighed_s / float(falls @ (k / (micro_batches - stages + k - 1))))
        longest = min(longest, 1 / (micro_batches - stages))
    tried = [above, *(b / longest for b in _bends(work.weighed_s, counts, rates) if b / longest > above)]
    return max(least, min(u + _sum_s(work, counts, rates, u * longest) for u in tried) + every_s + sends_s)


def _filled(work: Work, held: tuple[int, ...], stages: int) -> tuple[list[int], list[float]]:
    """Stages on each group, the fastest filled first, and how many times as long each group takes."""
    order = sorted(range(len(held)), key=lambda g: (-work.speeds[g], g))
    counts: list[int] = []
    for group in order:
        counts.append(min(stages - sum(counts), held[group]))
    return counts, [float(1 / work.speeds[group]) for group in order]


def _bends(period_s: float, counts: list[int], rates: list[float]) -> list[float]:
    """Longest periods at which the groups up to one hold everything: where the sum of periods bends."""
    full = np.cumsum([count / rate for count, rate in zip(counts, rates, strict=True)])
    return [period_s / float(share) for share in full if share > 0]


def _closed_form_s(
    strategy: Strategy, work: Work, held: tuple[int, ...], longest_s: float, every_s: float, send_s: float
) -> float:
    """(M - 1) B + sum of periods and sends, at the B from which on it grows."""
    stages, steps = strategy.pipeline, strategy.micro_batches - 1
    sends = 2 * (stages - 1) * send_s
    if strategy.schedule != "gpipe":  # an even share of the sends is in the longest period
        longest_s = max(longest_s, (work.period_s + every_s + sends) / stages)
    counts, rates = _filled(work, held, stages)
    bends = _bends(work.weighed_s, counts, rates)
    tried = [longest_s, *(bend for bend in bends if bend > longest_s)]
    return min(steps * b + _sum_s(work, counts, rates, b) for b in tried) + every_s + sends


def _sum_s(work: Work, counts: list[int], rates: list[float], longest_s: float) -> float:
    """The least sum of periods with no stage longer than ``longest_s`` (the last group takes what is over)."""
    total, left = 0.0, work.weighed_s
    for count, rate in zip(counts, rates, strict=True):
        taken = min(left, count * longest_s / rate)
        total, left = total + taken * rate, left - taken
    return max(work.period_s, total + left * rates[-1])


def _most(held: tuple[int, ...], weights: Floats, stages: int) -> float:
    """The most that ``stages`` stages on the groups' slots can weigh."""
    total = 0.0
    for group in sorted(range(len(held)), key=lambda g: -weights[g]):
        taken = min(stages, held[group])
        total, stages = total + taken * float(weights[group]), stages - taken
    return total


def _fits(space: MixedSpace, strategy: Strategy, held: tuple[int, ...]) -> bool:
    """Whether the stages with the most memory hold what all need at least."""
    room = np.array(
        [each.problem.usable_bytes * (1 - MARGIN) - each.states(strategy).fixed_bytes for each in space.spaces]
    )
    roomy = tuple(count if r > 0 else 0 for count, r in zip(held, room, strict=True))
    return _most(roomy, room, strategy.pipeline) >= space.least_bytes(strategy)


def open_mixed_space(problem: Problem, forced: Forced, groups: tuple[int, ...]) -> MixedSpace:
    """``problem`` on the groups of its cluster at positions ``groups``."""
    problem = dataclasses.replace(problem, tensor_kinds=functools.cache(problem.tensor_kinds))
    return MixedSpace(
        problem=problem,
        forced=forced,
        groups=groups,
        spaces=tuple(
            Space(problem=dataclasses.replace(problem, cluster=problem.cluster.groups[g]), forced=forced)
            for g in groups
        ),
    )
