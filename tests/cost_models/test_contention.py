"""Axes that share a link: what is in flight at once adds up, and links that are not shared cost nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.cost_models.communication import Group, all_reduce_s, dispatch_s, send_s
from autoplan.cost_models.contention import (
    NOTHING,
    Held,
    held_by_dispatch,
    held_by_layer,
    held_by_ring,
    held_by_send,
    room_s,
)
from autoplan.cost_models.data_parallel import data_parallel_time, exposed_times, least_exposed_times
from autoplan.layers.types import Collective, LayerKind
from autoplan.plan import Strategy

NODES = Cluster.parse("4x8xH100")
INSIDE, ACROSS, RAILS = Group(size=8, stride=1), Group(size=4, stride=8), Group(size=16, stride=2)
seconds = st.floats(0.0, 1.0)
holds = st.builds(lambda intra, inter: Held(intra_s=intra, inter_s=inter), seconds, seconds)


def test_a_group_holds_the_links_that_it_spans() -> None:
    assert held_by_ring(NODES, INSIDE, 360e9) == Held(intra_s=pytest.approx(1.0))
    assert held_by_ring(NODES, ACROSS, 45e9) == Held(inter_s=pytest.approx(1.0))
    # Four of its ranks a node: all pass everything on inside, and each a quarter to the next node.
    assert held_by_ring(NODES, RAILS, 180e9) == Held(intra_s=pytest.approx(0.5), inter_s=pytest.approx(1.0))
    assert held_by_ring(NODES, Group(size=1, stride=1), 1e9) == NOTHING


def test_a_layers_collectives_are_held_in_their_phase_over_their_ranks() -> None:
    kind = LayerKind(
        operators=(),
        collectives=(
            Collective(name="all_reduce", phase="forward", bytes_per_sample=1e9),
            Collective(name="all_gather", phase="backward", bytes_per_sample=1e9, ranks=4, stride=8),
            Collective(name="all_to_all", phase="backward", bytes_per_sample=1e9, batched=False),
        ),
    )
    forward, backward = held_by_layer(kind, NODES, degree=8, micro_batch=2)
    assert forward == held_by_ring(NODES, INSIDE, 2 * 7 / 8 * 2e9)
    assert backward == held_by_ring(NODES, ACROSS, 3 / 4 * 2e9) + held_by_ring(NODES, INSIDE, 7 / 8 * 1e9)


def test_dispatch_holds_no_longer_than_it_takes() -> None:
    group = Group(size=32, stride=1)
    links = held_by_dispatch(NODES, group, 1e9, topk=8)
    assert 0 < links.intra_s < links.inter_s < dispatch_s(NODES, group, 1e9, topk=8)


def alone(group: Group, sent_bytes: float) -> tuple[float, Held]:
    """An all-reduce in which a rank passes on so much: its seconds, and what it fills."""
    return all_reduce_s(NODES, group, sent_bytes * group.size / (group.size - 1) / 2), held_by_ring(
        NODES, group, sent_bytes
    )


def test_gradients_get_on_while_a_tensor_rank_waits_for_other_links() -> None:
    """Tensor parallelism over NVLink, data over InfiniBand."""
    tensor = held_by_ring(NODES, INSIDE, 0.4 * 360e9)
    far_s, far = alone(ACROSS, 1e9)
    near_s, near = alone(INSIDE, 1e10)
    assert room_s(1.0, others=tensor, alone_s=far_s, fills=far) == 1.0
    latency_s = near_s - near.intra_s
    assert room_s(1.0, others=tensor, alone_s=near_s, fills=near) == pytest.approx(0.6 + latency_s)


def test_sends_between_stages_take_from_the_gradients_links() -> None:
    far, near = held_by_send(NODES, 0.1, distance=8), held_by_send(NODES, 0.1, distance=4)
    assert (far, near) == (Held(inter_s=0.1), Held(intra_s=0.1))
    taken_s, fills = alone(ACROSS, 1e9)
    assert room_s(1.0, others=near, alone_s=taken_s, fills=fills) == 1.0
    assert room_s(1.0, others=far, alone_s=taken_s, fills=fills) == pytest.approx(0.9 + taken_s - fills.inter_s)


@given(st.sampled_from([INSIDE, ACROSS, RAILS]), st.floats(1e3, 1e12), seconds, holds, holds)
def test_more_in_flight_leaves_no_more_room(
    group: Group, sent_bytes: float, window_s: float, others: Held, more: Held
) -> None:
    alone_s, fills = alone(group, sent_bytes)
    before = room_s(window_s, others=others, alone_s=alone_s, fills=fills)
    after = room_s(window_s, others=others + more, alone_s=alone_s, fills=fills)
    assert after <= before <= window_s


@given(st.lists(st.tuples(st.floats(1e5, 1e11), st.floats(1e-4, 2.0)), min_size=1, max_size=8), holds)
def test_many_stages_at_once_and_none_below_the_bound(stages: list[tuple[float, float]], others: Held) -> None:
    """The bound counts on links that nobody else uses."""
    strategy = Strategy(data=16, tensor=2, zero_stage=2, micro_batches=3)
    weights, backward = (np.array(column) for column in zip(*stages, strict=True))
    many = exposed_times(
        NODES,
        strategy=strategy,
        weight_bytes=weights,
        gradient_bytes=weights,
        layers=np.full(len(stages), 4),
        backward_s=backward,
        backward_held=others,
    )
    for index, (bytes_, seconds_) in enumerate(stages):
        one = data_parallel_time(
            NODES,
            strategy=strategy,
            weight_bytes=bytes_,
            gradient_bytes=bytes_,
            layers=4,
            backward_s=seconds_,
            backward_held=others,
            prefetch=False,
        )
        found = [values[index] for values in many]
        assert found == pytest.approx([one.forward_s, one.backward_s, one.step_s], rel=1e-9)
    every, once = least_exposed_times(
        NODES,
        strategy=strategy,
        weight_bytes=math.fsum(weights),
        gradient_bytes=math.fsum(weights),
        backward_s=np.array([math.fsum(backward)]),
    )
    assert every[0] <= float(np.sum(many[0] + many[1])) * (1 + 1e-9)
    assert once[0] <= float(np.sum(many[2])) * (1 + 1e-9)


@settings(deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 8]),
    data=st.sampled_from([2, 4, 16]),
    zero_stage=st.integers(0, 3),
    compute_s=st.floats(1e-4, 1.0),
    amounts=st.tuples(*[st.floats(1e5, 1e11)] * 3),
    faster=st.tuples(st.floats(1, 20), st.floats(1, 20)),
)
def test_more_bandwidth_is_never_slower(
    tensor: int,
    data: int,
    zero_stage: int,
    compute_s: float,
    amounts: tuple[float, float, float],
    faster: tuple[float, float],
) -> None:
    """One backward of a stage: its products, what it waits for, and what outlasts both."""
    strategy = Strategy(tensor=tensor, data=data, pipeline=2, zero_stage=zero_stage)
    distance = tensor * data

    def backward_s(cluster: Cluster) -> float:
        group = Group(size=tensor, stride=1)
        waited = all_reduce_s(cluster, group, amounts[0])
        taken = held_by_ring(cluster, group, 2 * (tensor - 1) / tensor * amounts[0])
        sent = held_by_send(cluster, send_s(cluster, amounts[1], distance), distance=distance)
        time = data_parallel_time(
            cluster,
            strategy=strategy,
            weight_bytes=amounts[2],
            gradient_bytes=amounts[2],
            layers=10,
            backward_s=compute_s + waited,
            backward_held=taken + sent,
        )
        return compute_s + waited + time.exposed_s(1)

    better = dataclasses.replace(
        NODES,
        intra=dataclasses.replace(NODES.intra, bytes_per_s=faster[0] * NODES.intra.bytes_per_s),
        inter=dataclasses.replace(NODES.inter, bytes_per_s=faster[1] * NODES.inter.bytes_per_s),
    )
    assert backward_s(better) <= backward_s(NODES) * (1 + 1e-9)
