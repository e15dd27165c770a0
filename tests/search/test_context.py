"""predict with a context axis: slices of samples, and what joins them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from autoplan.cluster import Cluster
from autoplan.cost_models.attention import attention_flops
from autoplan.cost_models.communication import Group, all_gather_s, reduce_scatter_s
from autoplan.cost_models.memory import layer_saved_bytes
from autoplan.errors import StrategyError
from autoplan.layers.types import Edge, Layer, LayerGraph
from autoplan.plan import Plan
from autoplan.search import Problem, predict, search
from autoplan.search.context import slice_of
from tests.regression.transformer import Shape, block, embedding, head

SHAPE = Shape(
    layers=8, hidden=2048, ffn=8192, heads=16, kv_heads=4, vocab=32000, seq=8192, family="llama", flash=True,
    dropout=False,
)  # fmt: skip
KINDS = (embedding(SHAPE), block(SHAPE), head(SHAPE))
ROW = 2.0 * SHAPE.seq * SHAPE.hidden


def problem(**keys: object) -> Problem:
    kinds = [0, *[1] * SHAPE.layers, 2]
    layers = LayerGraph(
        name="small llama",
        layers=tuple(Layer(name=f"layers.{i}", kind=kind, nodes=()) for i, kind in enumerate(kinds)),
        kinds=KINDS,
        edges=tuple(
            Edge(value=f"x{i}", source=i, targets=(i + 1,), bytes_per_sample=ROW) for i in range(len(kinds) - 1)
        ),
        tokens_per_sample=SHAPE.seq,
        dtype="bf16",
        fingerprint="",
    )

    def split(degree: int) -> tuple:  # type: ignore[type-arg]
        shape = dataclasses.replace(SHAPE, tensor=degree)
        return embedding(shape), block(shape), head(shape)

    return Problem(
        layers=layers,
        tensor_kinds=split,
        cluster=Cluster.parse("2x8xH100"),
        global_batch=16,
        precision="bf16",
        forced=keys,
    )


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_slices_make_the_sample(degree: int) -> None:
    whole, part = KINDS[1], slice_of(KINDS[1], degree, tensor=1)
    assert part.flops * degree == pytest.approx(whole.flops)
    assert layer_saved_bytes(part, policy="none", samples=degree) == pytest.approx(
        layer_saved_bytes(whole, policy="none", samples=1)
    )
    assert part.parameters == whole.parameters
    core, core_part = (next(op.attention for op in kind.operators if op.attention) for kind in (whole, part))
    assert core_part.key_length == core.key_length
    assert attention_flops(core_part) * degree == pytest.approx(attention_flops(core))


def test_the_axis_takes_gpus_and_leaves_the_batch() -> None:
    plan = predict(problem(context=4, data=2, tensor=2, pipeline=1, micro_batch_size=2, zero_stage=1))
    assert plan.strategy.context == 4
    assert plan.strategy.data == 2
    assert plan.strategy.gpus == plan.gpus_used == 16
    assert plan.strategy.global_batch == plan.global_batch == 16
    assert plan.model.tokens_per_sample == SHAPE.seq
    assert plan.predicted.tokens_per_s * plan.predicted.step_time_s == pytest.approx(16 * SHAPE.seq)
    assert [axis.name for axis in plan.axes] == ["data", "context", "tensor"]
    assert Plan.from_json(plan.to_json()) == dataclasses.replace(plan, seconds={})
    assert json.loads(plan.to_json())["strategy"]["context"] == 4
    assert "context 4" in plan.case


def test_activations_are_a_slices_and_state_is_shared_with_the_data_axis() -> None:
    """Against two micro-batches of a data axis twice as wide: half of the activations, the same state."""
    wide = predict(problem(context=1, data=16, tensor=1, pipeline=1, micro_batch_size=1, zero_stage=3))
    sliced = predict(problem(context=2, data=8, tensor=1, pipeline=1, micro_batch_size=1, zero_stage=3))
    one, other = wide.stages[0].memory_terms, sliced.stages[0].memory_terms
    for state in ("weights", "gradients", "master_weights", "optimizer_state"):
        assert one[state] == other[state]
    assert other["saved_activations"] == pytest.approx(one["saved_activations"] / 2)


def test_keys_and_values_are_gathered_next_to_the_tensor_ranks() -> None:
    keys = {"tensor": 2, "pipeline": 1, "micro_batch_size": 1, "zero_stage": 1}
    plan = predict(problem(context=4, data=2, **keys))
    context = next(axis for axis in plan.axes if axis.name == "context")
    bytes_ = 2.0 * SHAPE.seq * 2 * (SHAPE.kv_heads // 2) * SHAPE.width
    cluster, group = Cluster.parse("2x8xH100"), Group(size=4, stride=2)
    each = 2 * all_gather_s(cluster, group, bytes_) + reduce_scatter_s(cluster, group, bytes_)
    assert context.exposed_s == pytest.approx(plan.strategy.micro_batches * SHAPE.layers * each)
    assert "NVLink" in context.link


def test_what_is_left_open_is_chosen_and_named() -> None:
    plan = predict(problem(context=2))
    assert plan.strategy.context == 2
    assert any(f"data {plan.strategy.data}," in note for note in plan.assumptions)


@pytest.mark.parametrize("degree", [3, 5, 16384])
def test_uneven_slices_are_refused(degree: int) -> None:
    with pytest.raises(StrategyError, match=f"context {degree}"):
        predict(problem(context=degree))


def test_a_forced_axis_is_planned_as_it_is_predicted() -> None:
    planned, predicted = search(problem(context=2)), predict(problem(context=2))
    assert planned.strategy == predicted.strategy
    assert planned.predicted.step_time_s == predicted.predicted.step_time_s
