"""Plan files mutated at random: refused with the field's name, or whole; never a traceback, never a wrong plan."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.consistency import first_problem
from autoplan.errors import AutoplanError, PlanFileError
from autoplan.plan import Plan
from autoplan.report import step, terminal, trace
from autoplan.report.page import page
from autoplan.search import predict, search
from tests.search import test_context, test_expert
from tests.support.layer_graphs import Dense, cluster, problem
from tests.support.plans import of_revision, sealed


def planned(**forced: object) -> Plan:
    layers = [Dense(elements=20_000_000 + 100_000 * i, core=2**20) for i in range(12)]
    return search(problem(layers, cluster(8), forced={"schedule": "1f1b", **forced}))


# Of every field: crossings of links and of memory where nothing is forced, torch.compile, context and expert degrees.
PLANS = [
    planned(pipeline=2, data=2, zero_stage=1).to_dict(),
    planned(pipeline=4, recompute="full").to_dict(),
    search(problem([Dense(elements=1_200_000_000)] * 12, Cluster.parse("2x4xA100-80GB"))).to_dict(),
    search(problem([Dense()] * 8, Cluster.parse("8xH100"), compiled=True)).to_dict(),
    predict(test_context.problem(context=4, data=2, tensor=2, pipeline=1, zero_stage=1)).to_dict(),
    predict(test_expert.problem(expert=8, zero_stage=1, data=16, tensor=1, pipeline=1)).to_dict(),
]
NEWER = ("crossings", "layer_kinds", "first_revision", "compiled", "context", "expert", "peak_flops", "revision")


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a plan's data."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*at, key)
        yield from paths(part, (*at, key))


PATHS = [list(paths(data)) for data in PLANS]
TEXTS = [json.dumps(data) for data in PLANS]  # read again, a plan is copied five times as fast
NUMBERS = st.one_of(
    st.integers(-3, 40), st.sampled_from([10**9, 10**40, -1, 2**63]), st.floats(allow_nan=True, allow_infinity=True)
)
VALUES = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=8), st.just([]), st.just({}), st.just([1, "a"]))
DROP = object()


@st.composite
def mutated(draw: st.DrawFn) -> str:
    which = draw(st.integers(0, len(PLANS) - 1))
    data = json.loads(TEXTS[which])
    newer = [path for path in PATHS[which] if set(path) & set(NEWER)]
    places = st.one_of(st.sampled_from(PATHS[which]), st.sampled_from(newer))
    for path in draw(st.lists(places, min_size=1, max_size=2)):
        place: Any = data
        try:
            for key in path[:-1]:
                place = place[key]
            old = place[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        change = draw(st.sampled_from(("value", "value", "nearby", "drop", "twice")))
        if change == "value":
            place[path[-1]] = draw(VALUES)
        elif change == "nearby" and isinstance(old, int | float) and not isinstance(old, bool):
            place[path[-1]] = old * draw(st.sampled_from((2, -1, 0))) + draw(st.sampled_from((0, 1)))
        elif change == "twice" and isinstance(place, list):
            place.insert(path[-1], copy.deepcopy(old))
        else:
            del place[path[-1]]
    return draw(st.sampled_from((json.dumps, _sealed, _older)))(data)


def _sealed(data: dict[str, Any]) -> str:
    """With a digest of its own, so that the parts themselves are asked."""
    return sealed(data)


def _older(data: dict[str, Any]) -> str:
    """As a file that has none."""
    try:
        return of_revision(data, 4)
    except (AttributeError, KeyError, TypeError):  # no group or cluster any more
        return json.dumps(data)


def whole(plan: Plan) -> None:
    """What no accepted plan may lack, said anew."""
    covered = [layer for s in plan.stages for layer in range(s.first_layer, s.last_layer + 1)]
    assert covered == list(range(len(plan.model.layers)))
    degrees = plan.strategy.data * plan.strategy.tensor * plan.strategy.pipeline * plan.strategy.context
    assert degrees == plan.gpus_used <= plan.gpus
    assert plan.strategy.data * plan.strategy.micro_batch_size * plan.strategy.micro_batches == plan.global_batch
    assert all(0 <= s.peak_memory_bytes <= plan.cluster.memory_bytes * 1.001 for s in plan.stages)
    assert all(math.isclose(sum(s.memory_terms.values()), s.peak_memory_bytes, rel_tol=1e-5) for s in plan.stages)
    assert 0 < plan.predicted.step_time_s < math.inf
    assert plan.certificate.lower_bound_s <= plan.predicted.step_time_s * 1.001
    for s in plan.stages:
        assert plan.strategy.micro_batches * (s.forward_s + s.backward_s) <= plan.predicted.step_time_s * 1.001


def check(text: str) -> None:
    try:
        plan = Plan.from_json(text, where="mutated.json")
    except PlanFileError as error:
        assert "mutated.json" in str(error) and error.attempt
        return
    whole(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.explain() and page(plan)
    try:
        simulated = step.simulate(plan)
    except AutoplanError:
        return
    assert trace.trace(simulated)["traceEvents"] and terminal.timeline(simulated)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_mutated_plans(text: str) -> None:
    check(text)


@pytest.mark.wide
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_many_mutated_plans(text: str) -> None:
    check(text)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=40), st.integers(0, 4000), st.integers(0, 60))
@example("[" * 100_000, 0, 0)
@example('{"schema": 1, "gpus": ' + "9" * 5000 + "}", 0, 0)
def test_texts_that_are_cut_or_spliced(junk: str, at: int, removed: int) -> None:
    text = json.dumps(PLANS[0])
    check(text[:at] + junk + text[at + removed :])
    check(junk)


@pytest.mark.parametrize("data", PLANS)
def test_what_the_search_makes_is_whole(data: dict[str, Any]) -> None:
    plan = Plan.from_json(json.dumps(data))
    assert first_problem(plan) is None
    whole(plan)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("stages", 0, "last_layer"), 3, "stages.1.first_layer"),
        (("stages", 1, "last_layer"), 99, "stages.1.last_layer"),
        (("strategy", "data"), 4, "gpus_used"),
        (("strategy", "data"), -2, "strategy.data"),
        (("strategy", "zero_stage"), 4, "strategy.zero_stage"),
        (("strategy", "schedule"), "2f2b", "strategy.schedule"),
        (("strategy", "micro_batches"), 3, "global_batch"),
        (("strategy", "data"), True, "strategy.data"),
        (("strategy", "data"), "2", "strategy.data"),
        (("gpus",), 7, "gpus"),
        (("stages", 0, "peak_memory_bytes"), 1.0, "stages.0.peak_memory_bytes"),
        (("stages", 0, "memory_terms", "weights"), -1.0, "stages.0.memory_terms.weights"),
        (("certificate", "lower_bound_s"), 1e3, "certificate.lower_bound_s"),
        (("stages", 0, "recompute"), {"none": 1}, "stages.0.recompute"),
        (("stages", 0, "forward_s"), 1e9, "predicted.step_time_s"),
        (("predicted", "step_time_s"), math.inf, "predicted.step_time_s"),
        (("predicted", "step_time_s"), 1e-9, "predicted.step_time_s"),
        (("predicted", "tokens_per_s"), 1.0, "predicted.tokens_per_s"),
        (("cluster", "memory_bytes"), 1.0, "stages.0.peak_memory_bytes"),
        (("certificate", "status"), "certain", "certificate.status"),
    ],
)
def test_the_field_that_disagrees_is_named(path: tuple[Any, ...], value: Any, named: str) -> None:
    data = copy.deepcopy(PLANS[0])
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(json.dumps(data), where="plan.json")
    assert f"`{named}`" in str(caught.value)


def test_a_key_that_is_there_twice() -> None:
    text = json.dumps(PLANS[0]).replace('"gpus":', '"gpus": 4, "gpus":', 1)
    with pytest.raises(PlanFileError, match="`gpus` is there twice"):
        Plan.from_json(text)


def test_the_published_schema_is_the_codes() -> None:
    from autoplan.report.schema import plan_schema

    file = Path(__file__).parents[2] / "docs" / "plan.schema.json"
    assert json.loads(file.read_text()) == plan_schema(), "run scripts/plan_schema.py"
    assert set(PLANS[0]) <= set(plan_schema()["properties"])
