"""The advice, derived from cost: one card, slightly more than one card, more than one card a layer, and at scale.

Each line on models made for it, on fast links (NVLink and InfiniBand) and on slow ones (PCIe and 25 Gb/s Ethernet).
"""

from __future__ import annotations

import dataclasses

import pytest

from autoplan.cluster import Cluster, Link
from autoplan.plan import Plan
from autoplan.search import search
from tests.regression.published import planning_problem
from tests.regression.transformer import Shape
from tests.support import layer_graphs
from tests.support.layer_graphs import Dense

LINKS = ("fast", "slow")
EVERY_LINK = pytest.mark.parametrize("links", LINKS)


def machines(spec: str, links: str) -> Cluster:
    """A100s of ``spec`` as in an HGX machine, or with PCIe inside a node and one 25 Gb/s adapter a node between."""
    cluster = Cluster.parse(spec)
    if links == "fast":
        return cluster
    return dataclasses.replace(
        cluster,
        intra=Link(name="PCIe 4 x16", bytes_per_s=32e9, latency_s=8e-6),
        inter=Link(name="25 Gb/s Ethernet", bytes_per_s=25e9 / 8 / cluster.gpus_per_node, latency_s=20e-6),
    )


def gpt(layers: int, hidden: int, *, seq: int = 1024, vocab: int = 51200, head_dim: int = 64) -> Shape:
    heads = max(1, hidden // head_dim)
    return Shape(
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        vocab=vocab,
        seq=seq,
        flash=True,
        dropout=False,
    )


def planned(shape: Shape, spec: str, links: str, *, batch: int) -> Plan:
    return search(planning_problem(shape, machines(spec, links), global_batch=batch))


@EVERY_LINK
def test_what_fits_one_card_gets_data_parallelism(links: str) -> None:
    """350 M parameters, and a batch that keeps eight cards busy."""
    plan = planned(gpt(24, 1024), "8xA100-80GB", links, batch=512)
    assert plan.strategy.axes == ("data",) and plan.gpus_used == 8
    assert plan.case.startswith("The model fits one card of 79.15 GiB, so only the batch is split")


@EVERY_LINK
def test_what_needs_no_parallelism_gets_one_card_and_is_told_so(links: str) -> None:
    plan = planned(gpt(2, 128, seq=64, vocab=1024), "8xA100-80GB", links, batch=8)
    assert plan.gpus_used == 1 and plan.strategy.axes == ()
    assert "more GPUs would not be faster: nothing is split" in plan.case
    assert "7 of the 8 GPUs stay unused" in plan.case
    assert "one GPU" in plan.explain()


def test_cards_behind_a_slow_link_stay_unused_where_they_slow_the_step() -> None:
    """The same model on two machines: over InfiniBand both work, over 25 Gb/s Ethernet the second is left alone."""
    together = planned(gpt(24, 1024), "2x8xA100-80GB", "fast", batch=128)
    assert together.strategy.axes == ("data",) and together.gpus_used == 16
    apart = planned(gpt(24, 1024), "2x8xA100-80GB", "slow", batch=128)
    assert apart.strategy.axes == ("data",) and apart.gpus_used == 8
    assert "8 of the 16 GPUs stay unused, more would not be faster" in apart.case


@EVERY_LINK
def test_what_is_slightly_larger_gets_stages_or_sharded_state(links: str) -> None:
    """6.7 G parameters: their state is half again what a card holds."""
    plan = planned(gpt(32, 4096, seq=2048), "8xA100-80GB", links, batch=128)
    assert plan.strategy.tensor == 1
    assert plan.strategy.pipeline > 1 or plan.strategy.zero_stage > 0
    assert "does not fit one card" in plan.case and plan.gpus_used == 8


def test_over_slow_links_stages_send_less_than_sharded_state() -> None:
    """The same on cards of half the memory, where only ZeRO-2 and 3 fit without stages: they communicate every
    micro-batch, and PCIe makes that dear."""
    plan = planned(gpt(32, 4096, seq=2048), "8xA100-40GB", "slow", batch=64)
    assert plan.strategy.tensor == 1 and plan.strategy.pipeline > 1
    sharded = next(other for other in plan.alternatives if other.family == "data with sharded state")
    assert sharded.step_time_s is not None and sharded.step_time_s > 1.03 * plan.predicted.step_time_s


@EVERY_LINK
def test_a_layer_larger_than_a_card_gets_tensor_parallelism(links: str) -> None:
    """3 G parameters a layer on cards of 16 GiB: gathered whole for its turn, with its gradient, a layer takes 12 GB
    and its share of the state 6."""
    fast = links == "fast"
    cluster = layer_graphs.cluster(8, intra=200e9 if fast else 20e9, inter=25e9 if fast else 0.4e9)
    layers = [Dense(elements=3_000_000_000, flops=6e12)] * 2
    plan = search(layer_graphs.problem(layers, cluster, global_batch=8))
    assert plan.strategy.tensor > 1
    assert "no split by layers or sharded state fits, so matrices are split" in plan.case
    assert all(other.short_by_bytes > 0 for other in plan.alternatives if "tensor" not in other.family)


@pytest.mark.parametrize(("links", "axes"), [("fast", {"data", "pipeline", "tensor"}), ("slow", {"data", "pipeline"})])
def test_the_fastest_at_scale_is_a_combination(links: str, axes: set[str]) -> None:
    """175 G parameters on 512 cards: all three axes where NVLink carries the tensor axis. Over PCIe two ranks at most,
    and only with the sequence split, which divides norms and what stages send."""
    plan = planned(gpt(96, 12288, seq=2048, head_dim=128), "64x8xA100-80GB", links, batch=1536)
    assert axes <= set(plan.strategy.axes) and plan.gpus_used == 512
    # Megatron's rule: the tensor axis stays inside a node.
    assert plan.strategy.tensor <= (8 if links == "fast" else 2)
    assert plan.strategy.tensor == 1 or plan.strategy.sequence_parallel
    for other in plan.alternatives:
        if " x " not in other.family:
            assert other.step_time_s is None or other.step_time_s > 1.1 * plan.predicted.step_time_s, other.family
