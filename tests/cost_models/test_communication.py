"""Collectives on the hierarchy that their groups span."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.cost_models.communication import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    boundary_send_s,
    dispatch_s,
    group_on,
    reduce_scatter_s,
    send_s,
    tensor_time,
)
from autoplan.cost_models.data_parallel import data_parallel_time
from autoplan.cost_models.software import COMPILED_ASYNC_TENSOR, DEEPSPEED_2022, EAGER
from autoplan.layers.types import Collective, LayerKind
from autoplan.plan import Strategy

NODE = Cluster.parse("8xA100-80GB")
TWO = Cluster.parse("2x8xA100-80GB")
MANY = Cluster.parse("64x8xA100-80GB")
COLLECTIVES = (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s)


@pytest.mark.parametrize(
    ("cluster", "size", "stride", "local", "nodes"),
    [
        (NODE, 8, 1, 8, 1),
        (TWO, 8, 1, 8, 1),  # a tensor group stays inside its node
        (TWO, 16, 1, 8, 2),
        (TWO, 2, 8, 1, 2),  # data 2 over tensor 8: one rank in each node
        (TWO, 4, 4, 2, 2),
        (MANY, 64, 8, 1, 64),
        (TWO, 2, 4, 2, 1),
        (Cluster.parse("2x6xA100-80GB"), 4, 1, 2, 2),  # ranks 4 to 7 lie across the edge
    ],
)
def test_where_a_group_stands(cluster: Cluster, size: int, stride: int, local: int, nodes: int) -> None:
    fabric = group_on(cluster, Group(size=size, stride=stride))
    assert (fabric.local, fabric.nodes) == (local, nodes)


def test_a_large_all_reduce_runs_at_the_bus_bandwidth() -> None:
    # 2 x 7/8 of a GiB at 0.8 x 300 GB/s, as nccl-tests report for DGX A100 (230 to 240 GB/s).
    seconds = all_reduce_s(NODE, Group(size=8, stride=1), 2**30)
    assert seconds == pytest.approx(2 * 7 / 8 * 2**30 / 240e9, rel=0.02)


def test_rails_add_up_across_nodes() -> None:
    # Whole nodes use 8 rails of 25 GB/s, a group with one rank a node uses one.
    whole = all_reduce_s(TWO, Group(size=16, stride=1), 2**30)
    single = all_reduce_s(TWO, Group(size=2, stride=8), 2**30)
    assert whole == pytest.approx(2 * 15 / 16 * 2**30 / (8 * 22.5e9), rel=0.02)
    assert single == pytest.approx(2 * 1 / 2 * 2**30 / 22.5e9, rel=0.02)


def test_without_a_switch_a_pair_has_a_part_of_the_wires() -> None:
    # DGX-1's mesh: six links to four neighbours, of which ranks 0 and 1 share one.
    mesh = Cluster.parse("8xV100-32GB")
    pair, node = (2 * (n - 1) / n * 1e9 / all_reduce_s(mesh, Group(size=n, stride=1), 1e9) for n in (2, 8))
    assert pair == pytest.approx(node / 6, rel=0.02)
    assert send_s(mesh, 1e9, 1) == pytest.approx(1e9 / (0.8 * 150e9 / 6), rel=0.01)


def test_small_messages_cost_latency_that_grows_with_the_logarithm_of_the_nodes() -> None:
    few, many = (all_reduce_s(Cluster.parse(f"{n}x8xH100"), Group(size=n, stride=8), 1024) for n in (4, 256))
    assert few < many < 5 * few


def test_gather_and_scatter_are_half_an_all_reduce() -> None:
    group = Group(size=8, stride=1)
    both = all_gather_s(NODE, group, 1e9) + reduce_scatter_s(NODE, group, 1e9)
    assert both == pytest.approx(all_reduce_s(NODE, group, 1e9), rel=0.02)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_or_no_bytes_cost_nothing(collective) -> None:
    assert collective(TWO, Group(size=1, stride=1), 1e9) == 0
    assert collective(TWO, Group(size=16, stride=1), 0) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
@given(
    size=st.sampled_from([2, 3, 4, 6, 8, 16, 32]),
    stride=st.sampled_from([1, 2, 4, 8]),
    bytes_=st.floats(1, 1e11),
    more=st.floats(1, 10),
)
def test_more_bandwidth_is_never_slower_and_more_bytes_never_faster(collective, size, stride, bytes_, more) -> None:
    group = Group(size=size, stride=stride)
    seconds = collective(MANY, group, bytes_)
    assert seconds <= collective(MANY, group, bytes_ * more) * (1 + 1e-12)
    for link in ("intra", "inter"):
        slow = getattr(MANY, link)
        fast = dataclasses.replace(slow, bytes_per_s=slow.bytes_per_s * more)
        assert collective(dataclasses.replace(MANY, **{link: fast}), group, bytes_) <= seconds * (1 + 1e-12)


class TestDispatch:
    def test_a_token_crosses_to_a_rank_once_whatever_experts_it_has_there(self) -> None:
        # 8 draws of 8 ranks hit 8 (1 - (7/8)^8) = 5.25 of them; 7 of 8 are elsewhere, at 0.8 x 300 GB/s.
        seconds = dispatch_s(NODE, Group(size=8, stride=1), 1e9, topk=8)
        assert seconds == pytest.approx(8 * (1 - (7 / 8) ** 8) * 7 / 8 * 1e9 / 240e9, rel=0.01)

    def test_it_crosses_to_a_node_once(self) -> None:
        # 8 draws of 2 nodes hit 1.99 of them; half are at home.
        seconds = dispatch_s(TWO, Group(size=16, stride=1), 1e9, topk=8)
        assert seconds == pytest.approx(2 * (1 - (1 / 2) ** 8) / 2 * 1e9 / 22.5e9, rel=0.01)
        plain = all_to_all_s(TWO, Group(size=16, stride=1), 8e9)
        assert seconds < plain / 3

    def test_all_wait_for_the_busiest_rank(self) -> None:
        even, skewed = (dispatch_s(NODE, Group(size=8, stride=1), 1e9, topk=2, skew=skew) for skew in (1.0, 1.5))
        assert skewed == pytest.approx(1.5 * even, rel=0.01)

    @given(
        size=st.sampled_from([2, 4, 8, 16, 64]),
        topk=st.integers(1, 16),
        bytes_=st.floats(1, 1e11),
        more=st.floats(1, 10),
    )
    def test_more_tokens_experts_or_skew_never_take_less_and_bandwidth_never_more(
        self, size, topk, bytes_, more
    ) -> None:
        group = Group(size=size, stride=1)
        seconds = dispatch_s(MANY, group, bytes_, topk=topk)
        for longer in (
            dispatch_s(MANY, group, bytes_ * more, topk=topk),
            dispatch_s(MANY, group, bytes_, topk=topk + 1),
            dispatch_s(MANY, group, bytes_, topk=topk, skew=more),
        ):
            assert seconds <= longer * (1 + 1e-12)
        for link in ("intra", "inter"):
            slow = getattr(MANY, link)
            fast = dataclasses.replace(slow, bytes_per_s=slow.bytes_per_s * more)
            assert dispatch_s(dataclasses.replace(MANY, **{link: fast}), group, bytes_, topk=topk) <= seconds


def test_sends_use_the_link_between_the_two_ranks() -> None:
    near, far = send_s(TWO, 1e9, 1), send_s(TWO, 1e9, 8)
    assert near == pytest.approx(1e9 / 240e9, rel=0.01)
    assert far == pytest.approx(1e9 / 22.5e9, rel=0.01)
    assert send_s(TWO, 1e9, 1, source=7) == far
    # Stages of 4 ranks: 0 to 1 inside the first node, 1 to 2 across.
    assert boundary_send_s(TWO, 1e9, stage=0, distance=4) == near
    assert boundary_send_s(TWO, 1e9, stage=1, distance=4) == far


def test_a_layers_collectives_by_phase() -> None:
    reduce = Collective(name="all_reduce", phase="forward", bytes_per_sample=2e7)
    kind = LayerKind(
        operators=(), collectives=(reduce, reduce, dataclasses.replace(reduce, phase="backward", batched=False))
    )
    seconds = tensor_time(kind, NODE, degree=8, micro_batch=4)
    group = Group(size=8, stride=1)
    assert seconds.forward_s == pytest.approx(2 * all_reduce_s(NODE, group, 8e7))
    assert seconds.backward_s == pytest.approx(all_reduce_s(NODE, group, 2e7))
    assert tensor_time(kind, NODE, degree=1, micro_batch=4).total_s == 0
    hidden = tensor_time(kind, NODE, degree=8, micro_batch=4, software=COMPILED_ASYNC_TENSOR)
    assert hidden.forward_s == pytest.approx(0.7 * seconds.forward_s)


class TestDataParallel:
    def price(self, zero_stage: int, *, backward_s: float = 0.0, micro_batches: int = 4, data: int = 8):
        strategy = Strategy(data=data, zero_stage=zero_stage, micro_batches=micro_batches)
        return data_parallel_time(
            NODE,
            strategy=strategy,
            weight_bytes=1e10,
            gradient_bytes=1e10,
            layers=10,
            forward_s=backward_s / 2,
            backward_s=backward_s,
        )

    def test_alone_there_is_nothing_to_do(self) -> None:
        assert self.price(3, data=1).total_s == 0

    def test_without_compute_beside_it_everything_shows(self) -> None:
        for zero_stage in range(4):
            time = self.price(zero_stage)
            assert time.exposed_s(4) == pytest.approx(time.total_s)

    def test_a_long_backward_hides_all_but_the_last_bucket(self) -> None:
        plain = self.price(0, backward_s=10.0)
        assert plain.step_s == pytest.approx(plain.total_s * (0.1 + 0.9 * 0.15))  # and it slows the compute by 15%

    def test_traffic_of_the_zero_stages(self) -> None:
        # Bytes one rank sends, in units of 7/8 of the weights: 2, 2, 4 scatters + 1 gather, 4 x 3.
        units = [self.price(zero).bytes_per_step / (7 / 8 * 1e10) for zero in range(4)]
        assert units == pytest.approx([2, 2, 5, 12])

    @given(zero_stage=st.integers(0, 3), seconds=st.floats(0, 3), more=st.floats(0, 3))
    def test_more_compute_beside_it_never_shows_more(self, zero_stage: int, seconds: float, more: float) -> None:
        before = self.price(zero_stage, backward_s=seconds)
        after = self.price(zero_stage, backward_s=seconds + more)
        assert after.exposed_s(4) <= before.exposed_s(4) + 1e-12
        assert after.exposed_s(4) <= after.total_s * (1 + 1e-12)

    def test_software_that_reaches_a_part_of_the_links_takes_as_much_longer(self) -> None:
        strategy = Strategy(data=8, zero_stage=1)
        whole, part = (
            data_parallel_time(
                NODE, strategy=strategy, weight_bytes=1e10, gradient_bytes=1e10, layers=10, backward_s=1e3, software=one
            )
            for one in (dataclasses.replace(EAGER, data_overlap=False), DEEPSPEED_2022)
        )
        assert part.total_s == pytest.approx(whole.total_s / DEEPSPEED_2022.data_links, rel=0.01)
        assert part.step_s == pytest.approx(part.total_s)  # and hides nothing, however long the backward


@pytest.mark.parametrize("cluster", [MANY, Cluster.parse("4xcpu")], ids=["GPUs", "CPUs"])
@given(
    bytes_=st.lists(st.just(0.0) | st.floats(1.0, 1e12), min_size=1, max_size=6),
    size=st.sampled_from([1, 2, 4]),
    stride=st.sampled_from([1, 8]),
)
def test_many_transfers_are_priced_as_each_is(cluster: Cluster, bytes_: list[float], size: int, stride: int) -> None:
    group = Group(size=size, stride=1 if cluster.device.is_cpu else stride)
    for collective in (all_reduce_s, all_gather_s, reduce_scatter_s):
        each = [collective(cluster, group, one) for one in bytes_]
        assert collective(cluster, group, np.array(bytes_)).tolist() == each
