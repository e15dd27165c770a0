"""Mixed clusters typed by hand, and every layout of a pipeline over them tried one by one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from autoplan.cluster import Cluster, Link
from autoplan.cluster.mixed import join
from autoplan.plan import Strategy
from autoplan.search.evaluate import Evaluation
from autoplan.search.heterogeneous_engine import evaluate_layout
from autoplan.search.heterogeneous_seats import Seat
from autoplan.search.heterogeneous_space import MixedSpace
from tests.support.layer_graphs import GIB, cluster


def group(
    gpus: int, *, nodes: int = 1, speed: float = 1.0, memory_gib: float = 16.0, inter: float = 25e9, name: str = ""
) -> Cluster:
    """GPUs of ``speed`` times 100 TFLOP/s."""
    alike = cluster(gpus, nodes=nodes, memory_gib=memory_gib, inter=inter)
    device = dataclasses.replace(
        alike.device,
        name=name or f"card-{speed:g}-{memory_gib:g}",
        peak_flops={dtype: peak * speed for dtype, peak in alike.device.peak_flops.items()},
        memory_bytes=memory_gib * GIB,
    )
    return dataclasses.replace(alike, device=device, name=name)


def mixed(groups: Sequence[Cluster], *, between: float = 25e9) -> Cluster:
    """``groups`` side by side, joined by links of ``between`` bytes/s."""
    link = Link(name="between", bytes_per_s=between, latency_s=5e-6)
    pairs = itertools.combinations(range(len(groups)), 2)
    return join(groups, spec="+".join(g.spec for g in groups), where="test", links=dict.fromkeys(pairs, link))


def every_layout(
    space: MixedSpace, strategy: Strategy
) -> Iterator[tuple[tuple[Seat, ...], tuple[int, ...], Evaluation]]:
    """Every order of groups, every number of stages on each, and every cut: those that fit, priced by the cost
    models."""
    layers = len(space.problem.layers.layers)
    for standing in every_standing([space.slots(g, strategy) for g in range(len(space.spaces))], strategy.pipeline):
        for inner in itertools.combinations(range(1, layers), strategy.pipeline - 1):
            cuts = (0, *inner, layers)
            if all(fits(space, strategy, seat.group, s, *cuts[s : s + 2]) for s, seat in enumerate(standing)):
                yield standing, cuts, evaluate_layout(space, strategy, standing, cuts)


def every_standing(held: Sequence[int], stages: int) -> Iterator[tuple[Seat, ...]]:
    """Every way to put ``stages`` stages on groups that hold ``held``, group after group."""
    for count in range(1, len(held) + 1):
        for order in itertools.permutations(range(len(held)), count):
            for numbers in itertools.product(*(range(1, held[g] + 1) for g in order)):
                if sum(numbers) == stages:
                    yield standing_of(order, numbers)


def standing_of(order: Sequence[int], numbers: Sequence[int]) -> tuple[Seat, ...]:
    seats, used, before = [], 0, -1
    for g, number in zip(order, numbers, strict=True):
        used |= 1 << g
        for index in range(number):
            seats.append(Seat(g, index, before, used))
            before = g
    return tuple(seats)


def fits(space: MixedSpace, strategy: Strategy, g: int, stage: int, first: int, end: int) -> bool:
    """Whether some recompute makes a stage fit its group's memory."""
    return bool(space.tables(g, strategy).least_bytes(stage)[first, end] <= space.spaces[g].problem.usable_bytes)
