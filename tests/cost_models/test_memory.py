"""Peak memory by term: exact counts, what sharding divides, and that terms sum to the peak."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.cost_models.memory import (
    ALLOCATOR_RESERVE,
    COMMUNICATOR_BYTES,
    count_elements,
    layer_saved_bytes,
    measured_bytes,
    micro_batches_in_flight,
    recipe,
    stage_memory,
)
from autoplan.cost_models.timeline import MOMENTS, host_load_bytes, memory_timeline
from autoplan.errors import StrategyError
from autoplan.layers.types import LayerKind, Operator, Parameter
from autoplan.plan import Strategy

DEVICE = Cluster.parse("1xA100-80GB").device


def operator(name: str, saved: float, **more: object) -> Operator:
    fields: dict = {"name": name, "target": name, "kind": "elementwise", "dtype": "bf16", "saved_bytes": saved}
    return Operator(**(fields | {"read_bytes": 3e6, "written_bytes": 2e6} | more))


LAYER = LayerKind(
    operators=(operator("linear", 4e6), operator("softmax", 10e6, core=True), operator("mask", 1e6, batched=False)),
    parameters=(Parameter(role="weight", elements=1_000_000, element_bytes=2),),
    input_bytes=2e6,
)


def terms(
    strategy: Strategy, *, layers: int = 4, policy: str = "none", precision: str = "bf16", stage: int = 0
) -> dict:
    return stage_memory(
        [LAYER] * layers,
        strategy=strategy,
        stage=stage,
        recipe=recipe(precision),
        device=DEVICE,
        recompute=[policy] * layers,
    )


def test_sixteen_bytes_a_parameter() -> None:
    found = terms(Strategy())
    states = [found[key] for key in ("weights", "gradients", "master_weights", "optimizer_state")]
    assert states == [4e6 * each for each in (2, 2, 4, 8)]
    assert recipe("bf16").total == 16
    assert recipe("fp32").total == 16
    assert recipe("bf16-pure").total == 8
    assert recipe("bf16-megatron").total == 18
    assert recipe("torch.bfloat16") == recipe("bf16")


@pytest.mark.parametrize(
    ("zero_stage", "divided"),
    [
        (0, ()),
        (1, ("master_weights", "optimizer_state")),
        (2, ("master_weights", "optimizer_state", "gradients")),
        (3, ("master_weights", "optimizer_state", "gradients", "weights")),
    ],
)
def test_what_each_zero_stage_divides_over_the_data_axis(zero_stage: int, divided: tuple[str, ...]) -> None:
    whole = terms(Strategy(data=8))
    sharded = terms(Strategy(data=8, zero_stage=zero_stage))
    for key in ("weights", "gradients", "master_weights", "optimizer_state"):
        assert sharded[key] == whole[key] / (8 if key in divided else 1)


def test_sharded_state_opens_windows() -> None:
    found = terms(Strategy(data=8, zero_stage=3))
    assert found["gather_window"] == 2 * 1e6 * 2  # the layer that runs and the next, in bf16
    assert found["gradient_window"] == 1e6 * 2
    assert terms(Strategy(data=1, zero_stage=3))["gather_window"] == 0


@pytest.mark.parametrize(
    ("policy", "kept"), [("none", 3 * (4e6 + 10e6) + 1e6), ("selective", 3 * 4e6 + 1e6), ("full", 3 * 2e6)]
)
def test_what_a_layer_keeps_for_its_backward(policy: str, kept: float) -> None:
    assert layer_saved_bytes(LAYER, policy=policy, samples=3) == kept
    strategy = Strategy(micro_batch_size=3)
    found = terms(strategy, policy=policy)
    assert found["saved_activations"] == 4 * kept
    # While one layer's backward runs, what was dropped is there again.
    assert found["recompute_window"] == 3 * 14e6 + 1e6 - kept


@pytest.mark.parametrize(("schedule", "stage", "held"), [("1f1b", 0, 4), ("1f1b", 3, 1), ("gpipe", 3, 16)])
def test_micro_batches_in_flight(schedule: str, stage: int, held: int) -> None:
    strategy = Strategy(pipeline=4, micro_batches=16, schedule=schedule)
    found = terms(strategy, stage=stage)
    assert found["saved_activations"] == held * 4 * 15e6


@pytest.mark.parametrize(
    ("stage", "layers", "held"),
    [
        # 2 (4 - 1) + 4 + 1 = 11 chunks of two layers: four of each chunk, then three more of the first.
        (0, 4, (7, 7, 4, 4)),
        (0, 5, (7, 7, 7, 4, 4)),  # an embedding
        # 4 + 1 = 5 chunks: the last has one, and so has the head.
        (3, 4, (4, 4, 1, 1)),
        (3, 5, (4, 4, 1, 1, 1)),
    ],
)
def test_interleaving_holds_more_of_the_first_chunks(stage: int, layers: int, held: tuple[int, ...]) -> None:
    strategy = Strategy(pipeline=4, virtual_stages=2, micro_batches=16)
    assert micro_batches_in_flight(strategy, stage, layers=layers) == held
    assert terms(strategy, stage=stage, layers=layers)["saved_activations"] == sum(held) * 15e6


def test_a_context_axis_shares_tokens_and_state() -> None:
    whole, shared = terms(Strategy(zero_stage=1)), terms(Strategy(zero_stage=1, context=4))
    assert shared["saved_activations"] == 4 * (14e6 / 4 + 1e6)  # what is not batched stays whole
    assert shared["optimizer_state"] == whole["optimizer_state"] / 4
    assert shared["weights"] == whole["weights"]


@pytest.mark.parametrize(("zero_stage", "state"), [(0, 3e6), (1, 1e6 / 8 + 2e6 / 2)])
def test_experts_share_with_fewer_ranks(zero_stage: int, state: float) -> None:
    experts = Parameter(role="experts", elements=2_000_000, element_bytes=2, expert=True)
    mixture = dataclasses.replace(LAYER, parameters=(*LAYER.parameters, experts))
    strategy = Strategy(data=8, expert=4, zero_stage=zero_stage)
    found = stage_memory(
        [mixture], strategy=strategy, stage=0, recipe=recipe("bf16"), device=DEVICE, recompute=["none"]
    )
    assert found["optimizer_state"] == 8 * state
    assert found["weights"] == 2 * 3e6  # what this rank's experts have


def test_tied_parameters_count_once_and_frozen_ones_have_no_state() -> None:
    tied = dataclasses.replace(LAYER, parameters=(Parameter(role="t", elements=100, element_bytes=2, shared="tied"),))
    frozen = dataclasses.replace(
        LAYER, parameters=(Parameter(role="f", elements=30, element_bytes=2, trainable=False),)
    )
    counted = count_elements([tied, frozen, tied])
    assert (counted.total, counted.trainable, counted.largest_layer) == (130, 100, 100)


def test_the_optimizer_step_is_the_peak_where_activations_are_small() -> None:
    big = dataclasses.replace(LAYER, parameters=(Parameter(role="w", elements=10**9, element_bytes=2),))
    found = stage_memory([big], strategy=Strategy(), stage=0, recipe=recipe("bf16"), device=DEVICE, recompute=["none"])
    assert found["optimizer_temporary"] == 4e9
    assert found["saved_activations"] == 0


def test_reserve_is_a_share_of_what_comes_and_goes() -> None:
    found = terms(Strategy(micro_batch_size=8))
    moving = found["saved_activations"] + found["recompute_window"] + found["passing_activations"]
    assert found["passing_activations"] == 8 * 5e6
    assert found["allocator_reserve"] == pytest.approx(ALLOCATOR_RESERVE * moving)


@given(
    zero_stage=st.integers(0, 3),
    data=st.sampled_from([1, 2, 8]),
    pipeline=st.sampled_from([1, 4]),
    micro_batch_size=st.integers(1, 8),
    policy=st.sampled_from(["none", "selective", "full"]),
)
def test_terms_are_never_negative_and_grow_with_the_work(
    zero_stage: int, data: int, pipeline: int, micro_batch_size: int, policy: str
) -> None:
    strategy = Strategy(
        zero_stage=zero_stage, data=data, pipeline=pipeline, micro_batch_size=micro_batch_size, micro_batches=8
    )
    found = terms(strategy, policy=policy)
    assert all(value >= 0 for value in found.values())
    more = terms(dataclasses.replace(strategy, micro_batch_size=micro_batch_size + 1), policy=policy)
    assert sum(more.values()) >= sum(found.values())
    assert set(more) == set(found)


@pytest.mark.parametrize(("precision", "optimizer"), [("bf17", "adamw"), ("bf16", "adamw2")])
def test_unknown_recipes_are_refused(precision: str, optimizer: str) -> None:
    with pytest.raises(StrategyError, match="unknown"):
        recipe(precision, optimizer)


@pytest.mark.parametrize(
    ("precision", "optimizer", "state", "temporary"),
    [
        ("bf16", "adamw", 8, 4),  # two fp32 moments; foreach holds the root of the second
        ("bf16", "adamw-fused", 8, 0),
        ("bf16-megatron", "adamw", 8, 0),  # always fused
        ("bf16-pure", "adamw", 4, 2),  # everything in 16 bits
        ("fp32", "sgd", 0, 0),
        ("fp32", "sgd-momentum", 4, 0),
        ("fp32", "momentum", 4, 0),
        ("bf16", "lion", 4, 4),
        ("bf16", "adamw8bit", 2 * (1 + 4 / 256), 0),  # a byte each and an fp32 scale a block of 256
        ("bf16", "adafactor", 8 / 1024, 0),  # two fp32 vectors for a matrix of 1024 x 1024
    ],
)
def test_what_an_optimizer_keeps(precision: str, optimizer: str, state: float, temporary: float) -> None:
    found = recipe(precision, optimizer)
    assert (found.optimizer_state, found.step_temporary) == (state, temporary)


def test_a_misspelt_optimizer_is_told_its_neighbour() -> None:
    with pytest.raises(StrategyError, match="did you mean 'adafactor'"):
        recipe("bf16", "adafacter")


def test_adapters_train_in_little_but_keep_activations() -> None:
    adapter = Parameter(role="adapter", elements=1000, element_bytes=2)
    frozen = dataclasses.replace(LAYER.parameters[0], trainable=False)
    tuned = dataclasses.replace(LAYER, parameters=(frozen, adapter))
    strategy = Strategy(data=8, zero_stage=2)
    found = stage_memory(
        [tuned] * 2, strategy=strategy, stage=0, recipe=recipe("bf16"), device=DEVICE, recompute=["none"] * 2
    )
    assert found["weights"] == 2 * 2 * 1_001_000
    assert found["gradients"] == 2 * 2 * 1000 / 8
    assert found["gradient_window"] == 2 * 1000  # only what trains has a gradient to scatter
    assert found["master_weights"] + found["optimizer_state"] == 12 * 2 * 1000 / 8
    assert found["saved_activations"] == terms(strategy, layers=2)["saved_activations"]


def test_three_ways_to_read_a_peak() -> None:
    strategy = Strategy(data=2, tensor=4)
    found = terms(strategy)
    whole = sum(found.values())
    assert measured_bytes(found, "nvidia-smi", strategy=strategy) == whole
    held = whole - found["context"] - 2 * COMMUNICATOR_BYTES  # NCCL allocates beside torch, once an axis
    assert measured_bytes(found, "reserved", strategy=strategy) == pytest.approx(held)
    assert measured_bytes(found, "allocated", strategy=strategy) == pytest.approx(held - found["allocator_reserve"])


@pytest.mark.parametrize(
    ("micro_batch_size", "moment"), [(1, "step"), (64, "backward")], ids=["many parameters", "many activations"]
)
def test_the_timeline_names_its_peak(micro_batch_size: int, moment: str) -> None:
    wide = dataclasses.replace(LAYER, parameters=(Parameter(role="w", elements=10**8, element_bytes=2),))
    keywords: dict = {
        "strategy": Strategy(micro_batch_size=micro_batch_size),
        "stage": 0,
        "recipe": recipe("bf16"),
        "device": DEVICE,
        "recompute": ["none"] * 4,
    }
    found = memory_timeline([wide] * 4, **keywords)
    assert tuple(found.moments) == MOMENTS
    assert found.peak_moment == moment
    assert found.peak_bytes == pytest.approx(sum(stage_memory([wide] * 4, **keywords).values()))
    assert found.moments["load"]["load_window"] == 2e8
    assert found.host_bytes == host_load_bytes(4e8, element_bytes=2, processes=1) == 8e8


def test_frozen_weights_peak_where_they_work() -> None:
    still = dataclasses.replace(LAYER, parameters=(dataclasses.replace(LAYER.parameters[0], trainable=False),))
    found = memory_timeline(
        [still], strategy=Strategy(), stage=0, recipe=recipe("bf16"), device=DEVICE, recompute=["full"]
    )
    assert found.peak_moment == "backward"
    assert "optimizer_state" not in found.moments["load"]
