"""Cuts of models that are no chain: the best over every convex partition, written as an order of the layers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.layers.order import in_order_of, reordered
from autoplan.layers.types import Edge, LayerGraph
from autoplan.plan import Strategy
from autoplan.search import search
from autoplan.search.bounds import lower_bounds
from autoplan.search.dag import down_sets, is_branching
from autoplan.search.dag_transfers import transfers
from autoplan.search.decisions import _solve, solve_strategy
from autoplan.search.engine import Engine
from autoplan.search.evaluate import evaluate_decision, stage_costs
from autoplan.search.problem import Problem
from autoplan.search.space import Space, open_space
from tests.support.layer_graphs import Dense, cluster, graph, problem

MIB = float(2**20)
POLICIES = ("none", "full")


def branching(layers: list[Dense], edges: list[tuple[int, tuple[int, ...], float]], **more: object) -> Problem:
    """A question about ``layers`` with values (source, readers, bytes a sample) between them."""
    made = tuple(Edge(value=f"v{k}", source=u, targets=t, bytes_per_sample=b) for k, (u, t, b) in enumerate(edges))
    asked = problem(layers, more.pop("machines", cluster()), **more)  # type: ignore[arg-type]
    return dataclasses.replace(asked, layers=dataclasses.replace(graph(layers), edges=made))


def towers(sizes: tuple[int, ...], *, flops: tuple[float, ...], crossing: float = 4 * MIB) -> tuple[list[Dense], list]:
    """Towers side by side, each a chain, and a head that reads the last layer of each."""
    layers, edges, tops = [], [], []
    for size, each in zip(sizes, flops, strict=True):
        start = len(layers)
        layers += [Dense(flops=each)] * size
        edges += [(k, (k + 1,), crossing) for k in range(start, start + size - 1)]
        tops.append(start + size - 1)
    layers.append(Dense(flops=1e11, elements=1_000_000))
    return layers, edges + [(top, (len(layers) - 1,), crossing) for top in tops]


# --------------------------------------------------------------------------------------------- against brute force


def partitions(layers: LayerGraph, stages: int) -> Iterator[tuple[int, ...]]:
    """The stage of each layer, for every convex partition without an empty stage; the loss is on the last stage."""
    for stage_of in itertools.product(range(stages), repeat=len(layers.layers)):
        flows = all(stage_of[e.source] <= stage_of[t] for e in layers.edges for t in e.targets)
        if flows and stage_of[-1] == stages - 1 and len(set(stage_of)) == stages:
            yield stage_of


def as_intervals(stage_of: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order in which the stages are intervals, and their cuts."""
    order = tuple(sorted(range(len(stage_of)), key=lambda layer: (stage_of[layer], layer)))
    return order, tuple(sum(s < stage for s in stage_of) for stage in range(max(stage_of) + 2))


class Oracle:
    """Prices a partition with the cost models alone: every recompute choice of every stage, every send one by one."""

    def __init__(self, space: Space, strategy: Strategy) -> None:
        self.space, self.strategy = space, strategy
        self.least = functools.cache(self._least)

    def value(self, stage_of: tuple[int, ...]) -> float:
        order, cuts = as_intervals(stage_of)
        spans = list(itertools.pairwise(cuts))
        priced = [self.least(s, order[i:j], order[:i]) for s, (i, j) in enumerate(spans)]
        if any(each is None for each in priced):
            return math.inf
        into, out = [0.0] * len(spans), [0.0] * len(spans)
        for transfer in transfers(self.space.problem.layers, stage_of, samples=self.strategy.micro_batch_size):
            out[transfer.source] += transfer.bytes_each
            for destination in transfer.destinations:
                into[destination] += transfer.bytes_each
        tables = self.space.tables(self.strategy)
        sends = [
            (float(tables._priced(s - 1, _array(into[s]))[0]) if s else 0.0)
            + (float(tables._priced(s, _array(out[s]))[0]) if s < len(spans) - 1 else 0.0)
            for s in range(len(spans))
        ]
        periods = [each[0] for each in priced if each]
        costs = [period + seconds for period, seconds in zip(periods, sends, strict=True)]
        longest = max(periods if self.strategy.schedule == "gpipe" else costs)
        return (self.strategy.micro_batches - 1) * longest + sum(costs) + max(each[1] for each in priced if each)

    def _least(self, stage: int, held: tuple[int, ...], before: tuple[int, ...]) -> tuple[float, float] | None:
        """The least period that fits, and the tail."""
        rest = tuple(layer for layer in range(len(self.space.problem.layers.layers)) if layer not in (*before, *held))
        space = self.space.ordered((*before, *held, *rest))
        tables, first = space.tables(self.strategy), len(before)
        best: tuple[float, float] | None = None
        for policies in itertools.product(POLICIES, repeat=len(held)):
            costs = stage_costs(space, tables, stage, first, first + len(held), policies)
            fits = costs.peak_bytes <= space.problem.cluster.device.memory_bytes * (1 - 1e-6)
            if fits and (best is None or costs.period_s < best[0]):
                best = costs.period_s, costs.tail_s
        return best


def _array(value: float) -> NDArray[np.float64]:
    return np.array([value])


@st.composite
def questions(draw: st.DrawFn) -> tuple[Problem, Strategy]:
    size = draw(st.integers(3, 6))
    kinds = draw(
        st.lists(
            st.builds(
                Dense,
                flops=st.sampled_from([2e11, 1e12]),
                elements=st.sampled_from([1_000_000, 20_000_000]),
                saved=st.sampled_from([40 * MIB, 200 * MIB]),
                input=st.just(5 * MIB),
                shared=st.sampled_from(["", "", "tied"]),
            ),
            min_size=size,
            max_size=size,
        )
    )
    kinds = [dataclasses.replace(k, elements=2_000_000) if k.shared else k for k in kinds]
    edges = []
    for source in range(size - 1):
        for _ in range(draw(st.integers(0, 2))):
            targets = draw(st.sets(st.integers(source + 1, size - 1), min_size=1, max_size=2))
            edges.append((source, tuple(sorted(targets)), draw(st.sampled_from([MIB, 64 * MIB, 512 * MIB]))))
    pipeline = draw(st.integers(2, 3))
    strategy = draw(
        st.sampled_from(
            [
                Strategy(pipeline=pipeline, micro_batches=8),
                Strategy(pipeline=pipeline, micro_batches=4, micro_batch_size=2),
                Strategy(pipeline=pipeline, micro_batches=8, schedule="gpipe"),
                Strategy(pipeline=pipeline, data=2, zero_stage=1, micro_batches=4),
                Strategy(pipeline=pipeline, data=2, zero_stage=3, micro_batches=4),
            ]
        )
    )
    memory = draw(st.sampled_from([40.0, 40.0, 1.5, 0.8, 0.4]))
    asked = branching(kinds, edges, machines=cluster(8, memory_gib=memory), global_batch=8, recompute_policies=POLICIES)
    return asked, strategy


@settings(max_examples=100, deadline=None)
@given(questions(), st.sampled_from(["HiGHS", None, None]))
def test_the_stages_are_the_best_of_all_convex_partitions(
    question: tuple[Problem, Strategy], solver: str | None
) -> None:
    asked, strategy = question
    space = open_space(asked)
    oracle = Oracle(space, strategy)
    expected = min((oracle.value(p) for p in partitions(asked.layers, strategy.pipeline)), default=math.inf)
    solution = solve_strategy(space, strategy, solver=solver)  # type: ignore[arg-type]
    if expected == math.inf:
        assert solution is None or solution.split is None
        return
    assert solution is not None and solution.split is not None
    split = solution.split
    assert split.value_s == pytest.approx(expected, rel=1e-9)
    assert solution.lower_bound_s == pytest.approx(expected, rel=1e-9)
    order = split.order or tuple(range(len(asked.layers.layers)))
    assert sorted(order) == list(range(len(order)))  # no layer is dropped, none is there twice
    assert split.cuts[0] == 0 and split.cuts[-1] == len(order) and list(split.cuts) == sorted(set(split.cuts))
    evaluation = evaluate_decision(space.ordered(split.order), strategy, split.cuts)
    assert evaluation.objective_s == pytest.approx(expected, rel=1e-9)
    stage_of = [s for s, (i, j) in enumerate(itertools.pairwise(split.cuts)) for _ in range(i, j)]
    assert oracle.value(tuple(s for _, s in sorted(zip(order, stage_of, strict=True)))) == pytest.approx(
        expected, rel=1e-9
    )
    again = solve_strategy(open_space(asked), strategy, solver=solver)  # type: ignore[arg-type]
    assert again is not None and again.split == split


@settings(max_examples=20, deadline=None)
@given(questions(), st.sampled_from([512, 8]))
def test_bounds_hold_and_the_search_finds_the_best_candidate(question: tuple[Problem, Strategy], most: int) -> None:
    asked = dataclasses.replace(question[0], cluster=_with_gpus(question[0], 4), schedules=("1f1b", "gpipe"))
    space, again = open_space(asked), open_space(asked)
    for each in (space, again):
        each.__dict__["down_sets"] = down_sets(asked.layers, most=most)  # 8: runs of layers, where there are more
    bounds, best = lower_bounds(space, space.candidates), math.inf
    for index in range(len(space.candidates)):
        strategy = space.candidates.strategy(index)
        solution = solve_strategy(space, strategy)
        if solution is None or solution.split is None:
            continue
        best = min(best, solution.split.value_s)
        priced = evaluate_decision(space.ordered(solution.split.order), strategy, solution.split.cuts)
        assert bounds.short_bytes[index] <= 0, strategy
        assert bounds.step_s[index] <= solution.split.value_s * (1 + 1e-9), strategy
        assert bounds.simulated_s[index] <= priced.step_s * (1 + 1e-9), strategy
        assert solution.simulated_bound_s <= priced.step_s * (1 + 1e-9), strategy
    found = Engine(space=again, solver=None).run()
    if best == math.inf:
        assert found is None
    else:
        assert found is not None and found.best.value_s == pytest.approx(best, rel=1e-9)


def _with_gpus(asked: Problem, gpus: int) -> Cluster:
    return cluster(gpus, memory_gib=asked.cluster.device.memory_bytes / 2**30)


# --------------------------------------------------------------------------------------------- what it is worth


def crossed_towers(**more: object) -> Problem:
    """Towers of 2 + 4 and 4 + 2 before a light head: on three stages of 4 only if the light ends share one."""
    heavy, light = Dense(flops=4e12), Dense(flops=2e12)
    head = Dense(flops=1e10, elements=1000)
    edges = [(0, (1,), MIB), (1, (4,), MIB), (2, (3,), MIB), (3, (4,), MIB)]
    return branching([light, heavy, heavy, light, head], edges, **more)


PIPELINE = {"pipeline": 3, "data": 1, "tensor": 1, "micro_batch_size": 1, "schedule": "1f1b"}


def test_two_towers_share_a_stage_where_that_is_better() -> None:
    asked = crossed_towers(machines=cluster(3), forced=PIPELINE)
    space = open_space(asked)
    strategy = Strategy(pipeline=3, micro_batches=32)
    solution = solve_strategy(space, strategy)
    assert solution is not None and solution.split is not None
    order, cuts = solution.split.order, solution.split.cuts
    stages = [{order[k] for k in range(i, j)} for i, j in itertools.pairwise(cuts)]
    assert stages == [{2}, {0, 3}, {1, 4}]
    # The best cut of the given order leaves a stage with 6 of the 12.
    in_order = [
        evaluate_decision(space, strategy, (0, *c, 5)).objective_s for c in itertools.combinations(range(1, 5), 2)
    ]
    assert solution.split.value_s < 0.72 * min(in_order)


def test_the_plan_names_the_layers_in_the_order_of_its_stages() -> None:
    plans = [search(crossed_towers(machines=cluster(3), forced=PIPELINE)) for _ in range(3)]
    assert len({plan.to_json() for plan in plans}) == 1
    plan = plans[0]
    assert plan.model.layers == ("layers.2", "layers.0", "layers.3", "layers.1", "layers.4")
    assert [(s.first_layer, s.last_layer) for s in plan.stages] == [(0, 0), (1, 2), (3, 4)]
    assert plan.certificate.status == "optimal"
    assert "listed in the order of the stages" in plan.assumptions[-1]
    assert plan.certificate.objective_s == pytest.approx(plan.certificate.objective_bound_s, rel=1e-9)
    layers = in_order_of(crossed_towers().layers, plan.model.layers)
    assert [layer.name for layer in layers.layers] == list(plan.model.layers)
    assert [(e.source, e.targets) for e in layers.edges] == [(0, (2,)), (1, (3,)), (2, (4,)), (3, (4,))]


def test_down_sets_of_towers_and_chains() -> None:
    layers, edges = towers((24, 12), flops=(1e12, 1e12))
    sets = down_sets(branching(layers, edges).layers)
    assert sets is not None and len(sets.members) == 25 * 13 + 1
    chain = graph([Dense()] * 4)
    assert not is_branching(chain) and down_sets(chain) is None


def test_many_towers_are_cut_between_runs_of_layers() -> None:
    wide = branching(*towers((10, 12, 14), flops=(1e12, 2e12, 1e12)))
    sets = down_sets(wide.layers)  # of 11 x 13 x 15 + 1 = 2,146
    assert sets is not None and not sets.every and len(sets.members) == 6 * 7 * 8 + 1
    for row in sets.members:
        assert all(row[edge.source] for edge in wide.layers.edges if any(row[t] for t in edge.targets))
    fewer = down_sets(wide.layers, most=100)  # runs of four
    assert fewer is not None and len(fewer.members) == 4 * 4 * 5 + 1
    space, strategy = open_space(wide), Strategy(pipeline=6, micro_batches=24)
    solution = solve_strategy(space, strategy)
    assert solution is not None and solution.split is not None
    in_order = _solve(space, strategy, space.tables, math.inf, None)
    assert in_order is not None and in_order.split is not None
    assert solution.split.value_s <= in_order.split.value_s
    priced = evaluate_decision(space.ordered(solution.split.order), strategy, solution.split.cuts)
    assert priced.objective_s == pytest.approx(solution.split.value_s, rel=1e-9)


def test_layers_that_share_written_memory_keep_their_order() -> None:
    layers = crossed_towers().layers
    free = down_sets(layers)
    kept = down_sets(dataclasses.replace(layers, keep_order=((0, 2),)))
    assert free is not None and kept is not None
    dropped = {tuple(row) for row in free.members} - {tuple(row) for row in kept.members}
    assert dropped == {(False, False, True, False, False), (False, False, True, True, False)}
    with pytest.raises(ValueError, match="share memory"):
        reordered(dataclasses.replace(layers, keep_order=((0, 2),)), (2, 0, 1, 3, 4))
    pinned = dataclasses.replace(layers, keep_order=tuple(itertools.pairwise(range(5))))
    assert not is_branching(pinned) and down_sets(pinned) is None


def test_an_order_that_reads_before_it_makes_is_refused() -> None:
    with pytest.raises(ValueError, match="before layer"):
        reordered(crossed_towers().layers, (1, 0, 2, 3, 4))
    with pytest.raises(ValueError, match="no order"):
        reordered(crossed_towers().layers, (0, 1, 2, 3, 3))


def test_what_does_not_fit_is_short_by_the_least_over_all_convex_cuts() -> None:
    heavy, light = Dense(elements=400_000_000), Dense(elements=200_000_000)
    edges = [(0, (1,), MIB), (1, (4,), MIB), (2, (3,), MIB), (3, (4,), MIB)]
    layers = [light, heavy, heavy, light, Dense(elements=1000)]
    asked = branching(layers, edges, machines=cluster(3, memory_gib=4.0), forced=PIPELINE)
    space, strategy = open_space(asked), Strategy(pipeline=3, micro_batches=32)
    with pytest.raises(InfeasibleError) as caught:
        search(asked)
    needed = []
    for stage_of in partitions(asked.layers, 3):
        order, cuts = as_intervals(stage_of)
        ordered = space.ordered(order)
        tables = ordered.tables(strategy)
        needed.append(
            max(
                min(
                    stage_costs(ordered, tables, s, i, j, (policy,) * (j - i)).peak_bytes for policy in ordered.policies
                )
                for s, (i, j) in enumerate(itertools.pairwise(cuts))
            )
        )
    short = min(needed) - asked.cluster.device.memory_bytes
    assert caught.value.short_by_bytes == pytest.approx(short, rel=1e-6)


def test_what_a_stage_keeps_does_not_depend_on_how_the_layers_are_listed() -> None:
    """In one order the only value goes to the next layer, in another it passes some by: it is held either way."""
    light, heavy = Dense(flops=2e11, elements=1_000_000), Dense(flops=2e11, elements=20_000_000)
    asked = branching([light, light, heavy, light, light], [(0, (2,), 64 * MIB)])
    space, strategy = open_space(asked), Strategy(pipeline=3, micro_batches=8)
    priced = evaluate_decision(space.ordered((1, 3, 0, 2, 4)), strategy, (0, 2, 3, 5))
    assert [stage.memory_terms["received_activations"] for stage in priced.stages] == [0.0, 0.0, 64 * MIB]
