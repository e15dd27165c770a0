"""At which speed of links another plan would win: priced as the whole evaluation prices it, and true of the search."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autoplan.explain import explain
from autoplan.plan import Plan
from autoplan.search import predict, search
from autoplan.search.crossings import Priced, step_s
from autoplan.search.evaluate import evaluate_decision
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
    found = [crossing for crossing in plan.crossings if crossing.strategy]
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
    assert "with links inside a node 8 times as fast, or 1/8 as fast: none of the above beats it" in text


def test_explain_names_a_memory_and_a_link_without_searching() -> None:
    plan = search(problem([Dense(elements=40_000_000)] * 16, cluster(4, intra=1e9)))
    text = " ".join(explain(plan).split())
    assert f"{plan.crossings[0].factor:.2g} times what it is): data 4, " in text
    spare = plan.cluster.memory_bytes - plan.predicted.peak_memory_bytes
    assert f"with more than {spare / 2**30:.1f} GiB less on each GPU the plan would not fit as it is" in text
    assert Plan.from_json(plan.to_json()) == dataclasses.replace(plan, seconds={})
    json.dumps(plan.to_dict(), allow_nan=False)


def test_one_gpu_and_forced_keys_have_none() -> None:
    assert search(problem([Dense(elements=1000)] * 2, cluster(1))).crossings == ()
    assert search(problem(LAYERS, cluster(4), forced={"pipeline": 4})).crossings == ()
