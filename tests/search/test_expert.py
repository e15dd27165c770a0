"""predict with an expert axis: a share of the experts on every rank, and what that costs."""

from __future__ import annotations

import dataclasses

import pytest

from autoplan.cluster import Cluster
from autoplan.cost_models.communication import Group, all_to_all_s
from autoplan.cost_models.memory import count_elements
from autoplan.errors import InfeasibleError, StrategyError
from autoplan.layers.types import Edge, Layer, LayerGraph, LayerKind
from autoplan.plan import AXES_IN_LAYERS, Axis, Plan
from autoplan.search import Problem, predict, search
from autoplan.search.expert import SKEW, share_of
from tests.regression.mixture import Mixture, mixture_block
from tests.regression.transformer import Shape, block, embedding, head

SHAPE = Shape(
    layers=4, hidden=2048, ffn=4096, heads=16, kv_heads=4, vocab=32000, seq=4096, family="llama", flash=True,
    dropout=False,
)  # fmt: skip
MIXTURE = Mixture(experts=16, topk=2, ffn=4096, parallel=1)
ROW = 2.0 * SHAPE.seq * SHAPE.hidden


def layer(tensor: int = 1) -> LayerKind:
    kind = mixture_block(dataclasses.replace(SHAPE, tensor=tensor), MIXTURE)
    marked = tuple(dataclasses.replace(p, expert=p.role == "experts") for p in kind.parameters)
    return dataclasses.replace(kind, parameters=marked)


def problem(*, dense: bool = False, cluster: str = "2x8xH100", **keys: object) -> Problem:
    kinds = (embedding(SHAPE), block(SHAPE) if dense else layer(), head(SHAPE))
    each = [0, *[1] * SHAPE.layers, 2]
    return Problem(
        layers=LayerGraph(
            name="small mixture",
            layers=tuple(Layer(name=f"layers.{i}", kind=kind, nodes=()) for i, kind in enumerate(each)),
            kinds=kinds,
            edges=tuple(
                Edge(value=f"x{i}", source=i, targets=(i + 1,), bytes_per_sample=ROW) for i in range(len(each) - 1)
            ),
            tokens_per_sample=SHAPE.seq,
            dtype="bf16",
            fingerprint="",
        ),
        tensor_kinds=lambda degree: (embedding(SHAPE), layer(degree), head(SHAPE)),
        cluster=Cluster.parse(cluster),
        global_batch=32,
        precision="bf16",
        forced=keys,
    )


FIXED = {"data": 16, "tensor": 1, "pipeline": 1, "micro_batch_size": 1}


@pytest.mark.parametrize("degree", [2, 8])
def test_a_share_has_fewer_experts_and_as_much_work(degree: int) -> None:
    whole, share = layer(), share_of(layer(), degree, tensor=1)
    assert share.flops == pytest.approx(whole.flops)
    one, other = count_elements([whole]), count_elements([share])
    assert other.expert * degree == one.expert
    assert other.total - other.expert == one.total - one.expert
    for op, local in zip(whole.operators, share.operators, strict=True):
        if op.kind == "grouped_gemm":
            assert op.gemm and local.gemm
            assert local.gemm.groups * degree == op.gemm.groups
            assert local.gemm.m * local.gemm.groups == op.gemm.m * op.gemm.groups


def test_experts_share_their_state_with_their_copies() -> None:
    plan = predict(problem(expert=8, zero_stage=1, **FIXED))
    assert plan.strategy.expert == 8
    assert plan.strategy.gpus == 16
    elements = count_elements([problem().layers.kinds[one.kind] for one in problem().layers.layers])
    dense, experts = elements.total - elements.expert, elements.expert
    terms = plan.stages[0].memory_terms
    assert terms["weights"] == pytest.approx(2 * (dense + experts / 8))
    assert terms["optimizer_state"] == pytest.approx(8 * (dense / 16 + experts / 8 / 2))
    assert plan.model.parameters == elements.total
    assert plan.predicted.host_load_bytes == pytest.approx(8 * 2 * elements.total)


def test_where_each_rank_has_experts_of_its_own_nothing_sums_their_gradients() -> None:
    wide, narrow = (predict(problem(expert=e, zero_stage=0, **FIXED)) for e in (16, 2))
    assert wide.stages[0].synchronise_s < narrow.stages[0].synchronise_s


def test_rows_go_to_the_experts_and_back_twice() -> None:
    plan = predict(problem(expert=8, zero_stage=1, **FIXED))
    row = next(axis for axis in plan.axes if axis.name == "expert")
    routed = MIXTURE.topk * ROW
    each = 4 * all_to_all_s(Cluster.parse("2x8xH100"), Group(size=8, stride=1), SKEW * routed)
    assert row.exposed_s == pytest.approx(plan.strategy.micro_batches * SHAPE.layers * each, rel=1e-3)
    assert row.times_per_step == plan.strategy.micro_batches * SHAPE.layers * 4
    assert "NVLink" in row.link


def test_the_plan_reads_back() -> None:
    plan = predict(problem(expert=4))
    assert plan.strategy.data % 4 == 0
    assert Plan.from_json(plan.to_json()) == dataclasses.replace(plan, seconds={})


def test_beside_a_context_axis_experts_are_spread_over_its_ranks_too() -> None:
    """Slices of samples go to experts on the ranks of both axes, the context axis's the nearest."""
    keys = {"tensor": 1, "pipeline": 1, "micro_batch_size": 1, "zero_stage": 1, "expert": 8}
    plan = predict(problem(data=4, context=4, **keys))
    strategy = plan.strategy
    assert (strategy.data, strategy.context, strategy.expert, strategy.gpus) == (4, 4, 8, 16)
    assert [axis.name for axis in plan.axes] == ["data", "context", "expert"]
    assert strategy.global_batch == plan.global_batch == 32
    elements = count_elements([problem().layers.kinds[one.kind] for one in problem().layers.layers])
    dense, experts = elements.total - elements.expert, elements.expert
    terms = plan.stages[0].memory_terms
    assert terms["weights"] == pytest.approx(2 * (dense + experts / 8))
    assert terms["optimizer_state"] == pytest.approx(8 * (dense / 16 + experts / 8 / 2))
    row = next(axis for axis in plan.axes if axis.name == "expert")
    each = 4 * all_to_all_s(Cluster.parse("2x8xH100"), Group(size=8, stride=1), SKEW * MIXTURE.topk * ROW / 4)
    assert row.exposed_s == pytest.approx(strategy.micro_batches * SHAPE.layers * each, rel=1e-3)
    assert Plan.from_json(plan.to_json()) == dataclasses.replace(plan, seconds={})


def test_slices_on_more_ranks_cost_what_more_samples_on_them_do() -> None:
    """With the same GPUs, a context axis adds its keys' and values' transfers, and takes as much data axis away."""
    keys = {"tensor": 1, "pipeline": 1, "micro_batch_size": 1, "zero_stage": 1, "expert": 8}
    without, beside = predict(problem(data=16, **keys)), predict(problem(data=8, context=2, **keys))
    assert beside.predicted.peak_memory_bytes < without.predicted.peak_memory_bytes
    assert beside.predicted.step_time_s > without.predicted.step_time_s
    free = predict(problem(context=2, expert=8))
    assert free.strategy.data * 2 % 8 == 0
    assert free.strategy.context == 2


def test_it_fits_where_whole_experts_do_not() -> None:
    keys = {**FIXED, "zero_stage": 1, "recompute": "none"}
    whole = predict(problem(**keys)).predicted.peak_memory_bytes
    shared = predict(problem(expert=16, **keys)).predicted.peak_memory_bytes
    assert shared < 0.7 * whole
    small = dataclasses.replace(problem(expert=2, **keys), memory_headroom=1 - shared / 79.1 / 2**30)
    with pytest.raises(InfeasibleError, match="short a GPU"):
        predict(small)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"expert": 3}, "16 experts"),
        ({"expert": 8, "data": 4}, "no multiple"),
        ({"expert": 8, "context": 2, "data": 2}, "context axes, and data 2 x context 2 is no multiple"),
        ({"expert": 16, "cluster": "1x8xH100"}, "divides no data axis of the 8 GPUs"),
        ({"expert": 16, "context": 2, "cluster": "1x8xH100"}, "divides no data x context 2"),
        ({"expert": 2, "dense": True}, "no experts"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, int], said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        predict(problem(**keys))  # type: ignore[arg-type]


def test_a_forced_axis_is_planned_as_it_is_predicted() -> None:
    planned, predicted = search(problem(expert=2)), predict(problem(expert=2))
    assert planned.strategy == predicted.strategy
    assert planned.predicted.step_time_s == predicted.predicted.step_time_s


def in_layers(plan: Plan) -> dict[str, Axis]:
    return {axis.name: axis for axis in plan.axes if axis.name in AXES_IN_LAYERS}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("context", [1, 2])
def test_each_axis_has_its_own_collectives_and_together_they_are_the_step_s_term(recompute: str, context: int) -> None:
    keys = {"data": 8 // context, "context": context, "expert": 4, "tensor": 2, "pipeline": 1, "micro_batch_size": 1}
    plan = predict(problem(recompute=recompute, zero_stage=1, **keys))
    rows = in_layers(plan)
    shown = sum(row.exposed_s for row in rows.values())
    assert shown == pytest.approx(plan.predicted.time_terms["tensor_communication"], rel=1e-12)
    # Megatron's two all-reduces forward and two backward, of which the forward's run again.
    assert rows["tensor"].collective == "all-reduce"
    each = 6 if recompute == "full" else 4
    assert rows["tensor"].times_per_step == plan.strategy.micro_batches * SHAPE.layers * each
    assert rows["expert"].times_per_step == plan.strategy.micro_batches * SHAPE.layers * each


def test_what_is_computed_again_communicates_again() -> None:
    """Beside the operators its layers' collectives run a third time: as communication, not as recompute."""
    keys = {"data": 8, "tensor": 2, "pipeline": 1, "micro_batch_size": 1, "zero_stage": 1}
    kept, again = (predict(problem(dense=True, recompute=policy, **keys)) for policy in ("none", "full"))
    terms, more = kept.predicted.time_terms, again.predicted.time_terms
    assert more["recompute"] == pytest.approx(terms["forward"], rel=1e-12)
    assert more["tensor_communication"] == pytest.approx(1.5 * terms["tensor_communication"], rel=1e-12)
    one, other = (next(axis for axis in plan.axes if axis.name == "tensor") for plan in (kept, again))
    assert other.times_per_step == 1.5 * one.times_per_step and other.bytes_per_step == 1.5 * one.bytes_per_step
    assert other.exposed_s == pytest.approx(more["tensor_communication"], rel=1e-12)
    assert again.predicted.exposed_communication_s > kept.predicted.exposed_communication_s
