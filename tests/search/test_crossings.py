"""At which speed of links another plan would win: priced as the whole evaluation prices it, and true of the search."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.explain import explain
from autoplan.explain.changes import SHARDING_GAIN, Threshold, margin, thresholds
from autoplan.plan import Plan, Strategy
from autoplan.search import predict, search
from autoplan.search.crossings import Priced, step_s
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.problem import Problem
from autoplan.search.space import open_space
from tests.support.layer_graphs import Dense, cluster, problem

LAYERS = [Dense(elements=100_000_000)] * 16
KEYS = ("data", "tensor", "pipeline", "zero_stage", "micro_batch_size", "schedule")


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
@pytest.mark.parametrize(
    "forced",
    [
        {"data": 8, "zero_stage": 1},
        {"data": 8, "zero_stage": 3, "micro_batch_size": 1},
        {"data": 2, "pipeline": 2, "tensor": 2, "schedule": "1f1b", "zero_stage": 0},
        {"tensor": 4, "pipeline": 2, "schedule": "gpipe", "recompute": "full"},
        {"pipeline": 4, "tensor": 2, "schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 4},
        {"pipeline": 4, "data": 2, "schedule": "zero_bubble", "micro_batch_size": 2},
    ],
    ids=lambda keys: " ".join(map(str, keys.values())) if isinstance(keys, dict) else str(keys),
)
def test_only_what_is_transferred_is_priced_again(forced: dict[str, object], factor: float) -> None:
    machines = cluster(4, nodes=2, memory_gib=64.0, intra=20e9, inter=10e9)
    layers = [Dense(elements=30_000_000, core=2**20, core_flops=1e10), *LAYERS[:7]]
    question = problem(layers, machines, forced=forced)
    space, strategy = open_space(question), predict(question).strategy
    number = strategy.pipeline * strategy.virtual_stages
    cuts = tuple(range(0, 9, 8 // number))
    here = evaluate_decision(space, strategy, cuts)
    there = machines.with_links(intra=factor, inter=factor)
    again = evaluate_decision(open_space(dataclasses.replace(question, cluster=there)), strategy, cuts)
    more_s = step_s(Priced(space=space, evaluation=here), there) - here.step_s
    assert here.times is not None and again.times is not None
    assert more_s == pytest.approx(again.times.objective_s - here.times.objective_s, rel=1e-9, abs=1e-12)
    if factor == 1.0:
        assert more_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("elements", "intra", "nodes"),
    [(40_000_000, 1e9, 1), (100_000_000, 20e9, 2), (100_000_000, 200e9, 2)],
    ids=["pipeline to data", "tensor to pipeline", "two links"],
)
def test_there_the_search_decides_otherwise(elements: int, intra: float, nodes: int) -> None:
    layers, machines = [Dense(elements=elements)] * 16, cluster(4, nodes=nodes, intra=intra)
    plan = search(problem(layers, machines))
    found = [crossing for crossing in plan.crossings if crossing.strategy and crossing.quantity != "memory_bytes"]
    assert found
    for crossing in found:
        link = "intra" if crossing.quantity.startswith("intra") else "inter"
        there = machines.with_links(**{link: crossing.factor})
        assert crossing.value == getattr(there, link).bytes_per_s
        assert search(problem(layers, there)).strategy.describe() != plan.strategy.describe()
        assert crossing.step_time_s is not None and crossing.strategy is not None
        forced = {key: getattr(plan.strategy, key) for key in KEYS}
        # Whose stages may be cut anew there, too, within what the search holds for equal.
        assert crossing.step_time_s < 1.02 * predict(problem(layers, there, forced=forced)).predicted.step_time_s


def test_links_that_change_nothing_are_said_once() -> None:
    plan = search(problem([Dense(elements=1_000_000)] * 16, cluster(4)))
    (crossing,) = plan.crossings
    assert crossing.strategy is None and crossing.factor == 8.0 and crossing.quantity == "intra_bytes_per_s"
    text = " ".join(explain(plan).split())
    assert "with links inside a node from 1/8 to 8 times as fast: none of the plans above gets ahead" in text


def test_explain_names_a_memory_and_a_link_without_searching() -> None:
    plan = search(problem([Dense(elements=40_000_000)] * 16, cluster(4, intra=1e9)))
    text = " ".join(explain(plan).split())
    (link,) = [crossing for crossing in plan.crossings if crossing.quantity != "memory_bytes"]
    assert f"{link.factor:.2g} times what it is) or more: data 4, " in text
    spare = plan.cluster.memory_bytes - plan.predicted.peak_memory_bytes
    assert f"with up to {spare / 2**30:.1f} GiB less on each GPU: this plan still fits as it is" in text
    assert Plan.from_json(plan.to_json()) == dataclasses.replace(plan, seconds={})
    json.dumps(plan.to_dict(), allow_nan=False)


def test_one_gpu_and_forced_keys_have_none() -> None:
    assert search(problem([Dense(elements=1000)] * 2, cluster(1))).crossings == ()
    assert search(problem(LAYERS, cluster(4), forced={"pipeline": 4})).crossings == ()


PLANNED = {
    "sharded": problem(LAYERS, cluster(4)),
    "slow links": problem([Dense(elements=40_000_000)] * 16, cluster(4, intra=1e9)),
    "two nodes": problem(LAYERS, cluster(4, nodes=2, intra=20e9)),
    "little memory": problem(LAYERS, cluster(8, memory_gib=6.0)),
    "a quarter kept free": dataclasses.replace(problem(LAYERS, cluster(8, memory_gib=8.0)), memory_headroom=0.25),
    "two nodes of little memory": problem(LAYERS, cluster(4, nodes=2, memory_gib=8.0, inter=5e9)),
    "small": problem([Dense(elements=1_000_000)] * 16, cluster(4)),
}


@pytest.fixture(scope="module", params=PLANNED)
def decided(request: pytest.FixtureRequest) -> tuple[Problem, Plan]:
    question = PLANNED[request.param]
    return question, search(question)


def on(question: Problem, threshold: Threshold, *, times: float) -> Problem:
    """``question`` on machines whose memory or links are ``times`` the threshold's."""
    machines = question.cluster
    if threshold.quantity == "memory_bytes":
        factor = threshold.value * times / machines.device.memory_bytes
        return dataclasses.replace(question, cluster=machines.with_memory(factor))
    link = threshold.quantity.split("_")[0]
    factor = threshold.value * times / getattr(machines, link).bytes_per_s
    return dataclasses.replace(question, cluster=machines.with_links(**{link: factor}))


def keys(strategy: Strategy) -> dict[str, object]:
    return {key: getattr(strategy, key) for key in KEYS}


def test_what_a_threshold_says_of_a_plan_is_what_forcing_it_there_finds(decided: tuple[Problem, Plan]) -> None:
    """Just above its memory a plan fits and takes no longer than was said; just below, nothing of its degrees fits."""
    question, plan = decided
    for threshold in thresholds(plan):
        if threshold.quantity != "memory_bytes" or threshold.strategy is None:
            continue
        forced = keys(threshold.strategy)
        above = dataclasses.replace(on(question, threshold, times=1.0001), forced=forced)
        assert threshold.step_time_s is not None
        assert predict(above).predicted.step_time_s <= threshold.step_time_s * 1.02
        with pytest.raises(InfeasibleError):
            predict(dataclasses.replace(on(question, threshold, times=0.9999), forced=forced))


def test_a_search_there_finds_at_least_what_is_preferred(decided: tuple[Problem, Plan]) -> None:
    """At a threshold ``--what-if`` decides for a step no longer than the preferred plan's, but for what the rules give
    up, and over other links for another plan than today's."""
    question, plan = decided
    for threshold in thresholds(plan):
        if threshold.kind != "chosen":
            continue
        beyond = 1.001 if threshold.value > _now(question, threshold) else 0.999
        found = search(on(question, threshold, times=beyond))
        assert threshold.step_time_s is not None
        assert found.predicted.step_time_s <= threshold.step_time_s * (1 + SHARDING_GAIN)
        if threshold.quantity != "memory_bytes":
            assert found.strategy.describe() != plan.strategy.describe()


def test_short_of_a_links_threshold_no_plan_named_is_ahead(decided: tuple[Problem, Plan]) -> None:
    """With their stages as they are: none of the plans that lost is ahead of today's by what it takes to be chosen."""
    question, plan = decided
    for crossing in plan.crossings:
        if crossing.quantity == "memory_bytes":
            continue
        nearer = 1 / 1.06 if crossing.factor > 1 else 1.06  # wider than the last step of the bisection
        link = crossing.quantity.split("_")[0]
        there = question.cluster.with_links(**{link: crossing.factor * nearer})
        own_s = _as_it_is(question, plan.strategy, there, plan)
        for other in plan.alternatives:
            if other.step_time_s is not None:
                ahead = _as_it_is(question, other.strategy, there, plan) * (1 + margin(plan, other.strategy))
                assert ahead >= own_s * 0.97, (crossing, other.strategy.describe())


def test_the_plan_fits_with_as_much_less_memory_as_is_said_and_not_with_more(decided: tuple[Problem, Plan]) -> None:
    _, plan = decided
    (least,) = [each for each in thresholds(plan) if each.kind == "unchanged" and each.quantity == "memory_bytes"]
    assert least.value == pytest.approx(max(stage.peak_memory_bytes for stage in plan.stages))


def _now(question: Problem, threshold: Threshold) -> float:
    if threshold.quantity == "memory_bytes":
        return question.cluster.device.memory_bytes
    return float(getattr(question.cluster, threshold.quantity.split("_")[0]).bytes_per_s)


def _as_it_is(question: Problem, strategy: Strategy, there: Cluster, plan: Plan) -> float:
    """The step over links of ``there`` with the stages that the plan, or the best of its degrees here, has."""
    space = open_space(question)
    stages = (
        plan.stages
        if strategy == plan.strategy
        else predict(dataclasses.replace(question, forced=keys(strategy))).stages
    )
    cuts = (*(stage.first_layer for stage in stages), stages[-1].last_layer + 1)
    return step_s(Priced(space=space, evaluation=evaluate_decision(space, strategy, cuts)), there)
