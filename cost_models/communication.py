"""Time of collectives on the links that a group of ranks really spans: alpha-beta.

Placement is the plan's (:meth:`autoplan.plan.Strategy.rank`): a tensor group is ``Group(size=tensor, stride=1)``, a
data group ``Group(size=data, stride=tensor)``, pipeline neighbours are ``data x tensor`` ranks apart.

With n ranks, of which L stand in each of N nodes, every rank sends factor(n) x bytes through the bus (NCCL's
performance notes): all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n. A ring crosses each node boundary on L
rails at once, so that its bus runs at min(intra, L x inter). Latency: a ring makes n - 1 steps a pass, a tree
log2(N) + L - 1; NCCL takes the faster. All ``bytes`` are of the full tensor, all times seconds. Those of an all-reduce,
an all-gather and a reduce-scatter may be an array (:mod:`.arrays`): as many transfers, priced at once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan.cluster import Cluster, Link
from autoplan.cost_models import cpu
from autoplan.cost_models.arrays import Number, chosen, smaller, some
from autoplan.cost_models.compute import OperatorTime
from autoplan.cost_models.software import EAGER, Software

if TYPE_CHECKING:
    from autoplan.layers.types import LayerKind

# Achieved over nominal. NCCL all-reduce bus bandwidth at 1 GiB: A100 NVLink 230-240 of 300 GB/s, H100 360-370 of 450,
# V100 130 of 150; InfiniBand 22-23 of 25 and 45 of 50 (nccl-tests reports). PCIe: 128-byte packets' headers.
_INTRA_EFFICIENCY = 0.8
_INTER_EFFICIENCY = 0.9
_TREE_EFFICIENCY = 0.92  # NCCL tuning.cc: trees lose to rings in bandwidth, and win in latency
_BASE_S = 5.0e-6  # launch of the kernel and its handshake, NCCL tuning.cc baseLat for the Simple protocol, rounded
_PEER_S = 0.5e-6  # an all-to-all's posting of one more peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """``size`` ranks, ``stride`` apart: one of those that tile the ``ranks`` in use (0: all of the cluster's)."""

    size: int
    stride: int
    ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What a group spans: ``local`` of its ranks in each of ``nodes`` nodes, and the links, derated to what they
    reach. For groups that lie unevenly it is the worst of them."""

    local: int
    nodes: int
    intra: Link
    inter: Link

    @property
    def size(self) -> int:
        return self.local * self.nodes

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes a second that one rank can pass on in a ring over the whole group."""
        if self.nodes == 1:
            return self.intra.bytes_per_s
        rails = self.local * self.inter.bytes_per_s
        return rails if self.local == 1 else min(self.intra.bytes_per_s, rails)

    @property
    def link_name(self) -> str:
        """The slowest link that the group crosses."""
        return self.intra.name if self.nodes == 1 else self.inter.name


def group_on(cluster: Cluster, group: Group) -> Fabric:
    """The fabric under a group, by the placement of ranks: rank r stands in node r // gpus_per_node."""
    ranks = min(group.ranks or cluster.gpus, cluster.gpus)
    return _fabric(cluster.intra, cluster.inter, cluster.gpus_per_node, group.size, group.stride, ranks)


@functools.lru_cache(maxsize=4096)
def _fabric(intra: Link, inter: Link, gpus_per_node: int, size: int, stride: int, ranks: int) -> Fabric:
    """A search asks for the same few groups once a collective, tens of thousands of times."""
    local, nodes = _spread(size, stride, gpus_per_node, ranks)
    return Fabric(
        local=local,
        nodes=nodes,
        intra=_derated(intra, _INTRA_EFFICIENCY * _wired_share(intra, local)),
        inter=_derated(inter, _INTER_EFFICIENCY),
    )


def all_reduce_s(cluster: Cluster, group: Group, bytes_: Number) -> Number:
    """Seconds to sum ``bytes_`` over the group, everyone getting the sum."""
    if group.size == 1 or not some(bytes_):
        return 0.0 * bytes_
    if cluster.device.is_cpu:
        seconds = cpu.gloo_s("all_reduce", _gloo_link(cluster, group), ranks=group.size, bytes_=bytes_)
        return chosen(bytes_ > 0, seconds, 0.0)
    fabric = group_on(cluster, group)
    n = group.size
    beta = 2 * (n - 1) / n * bytes_ / fabric.bus_bytes_per_s
    ring = 2 * _ring_latency_s(fabric) + beta
    tree = 2 * _tree_latency_s(fabric) + beta / _TREE_EFFICIENCY
    return chosen(bytes_ > 0, _BASE_S + smaller(ring, tree), 0.0)


def all_gather_s(cluster: Cluster, group: Group, bytes_: Number) -> Number:
    """Seconds until every rank has the whole of ``bytes_``, of which each began with its part."""
    return _one_pass_s("all_gather", cluster, group, bytes_)


def reduce_scatter_s(cluster: Cluster, group: Group, bytes_: Number) -> Number:
    """Seconds to sum ``bytes_`` over the group, each rank getting its part; the mirror of an all-gather."""
    return _one_pass_s("reduce_scatter", cluster, group, bytes_)


def _one_pass_s(name: cpu.Collective, cluster: Cluster, group: Group, bytes_: Number) -> Number:
    if group.size == 1 or not some(bytes_):
        return 0.0 * bytes_
    if cluster.device.is_cpu:
        seconds = cpu.gloo_s(name, _gloo_link(cluster, group), ranks=group.size, bytes_=bytes_)
        return chosen(bytes_ > 0, seconds, 0.0)
    fabric = group_on(cluster, group)
    n = group.size
    seconds = _BASE_S + _pass_latency_s(fabric) + (n - 1) / n * bytes_ / fabric.bus_bytes_per_s
    return chosen(bytes_ > 0, seconds, 0.0)


def all_to_all_s(cluster: Cluster, group: Group, bytes_: float) -> float:
    """Seconds until each rank has sent its ``bytes_``, an equal part to every rank of the group."""
    if group.size == 1 or bytes_ == 0:
        return 0.0
    fabric = group_on(cluster, group)
    near = bytes_ * (fabric.local - 1) / fabric.size / fabric.intra.bytes_per_s
    far = bytes_ * (fabric.size - fabric.local) / fabric.size / fabric.inter.bytes_per_s
    hop = fabric.inter.latency_s if fabric.nodes > 1 else fabric.intra.latency_s
    return _BASE_S + hop + _PEER_S * (group.size - 1) + max(near, far)


def dispatch_s(cluster: Cluster, group: Group, row_bytes: float, *, topk: int, skew: float = 1.0) -> float:
    """Seconds to send ``row_bytes`` of tokens a rank to ``topk`` experts spread over the group, or to gather them back.

    A token is sent once to each rank that holds any of its experts, and once to each node, whose ranks pass it on: of
    n places, n (1 - (1 - 1/n)^topk) are drawn on average where the load is even. ``skew``: the busiest rank's load over
    the mean's (1 for an auxiliary loss that balances well): everybody waits for it.
    """
    if group.size == 1 or row_bytes == 0:
        return 0.0
    fabric = group_on(cluster, group)
    hop = fabric.inter.latency_s if fabric.nodes > 1 else fabric.intra.latency_s
    links = dispatch_links_s(cluster, group, row_bytes, topk=topk)
    return _BASE_S + hop + _PEER_S * (group.size - 1) + skew * max(links)


def dispatch_links_s(cluster: Cluster, group: Group, row_bytes: float, *, topk: int) -> tuple[float, float]:
    """Seconds in which :func:`dispatch_s` fills a rank's links, inside its node and to others, where the load is
    even."""
    fabric = group_on(cluster, group)
    near = row_bytes * _drawn(fabric.size, topk) * (fabric.local - 1) / fabric.local / fabric.intra.bytes_per_s
    far = row_bytes * _drawn(fabric.nodes, topk) * (fabric.nodes - 1) / fabric.nodes / fabric.inter.bytes_per_s
    return near, far


def _drawn(places: int, topk: int) -> float:
    """Of ``places`` alike, how many ``topk`` draws hit on average."""
    return places * (1.0 - (1.0 - 1.0 / places) ** topk)


def send_s(cluster: Cluster, bytes_: float, distance: int, *, source: int | None = None) -> float:
    """Seconds for one rank's message to the rank ``distance`` further on.

    With ``source`` the two ranks' nodes decide the link; without, a distance of a node or more is between nodes.
    """
    if bytes_ == 0:
        return 0.0
    width = cluster.gpus_per_node
    far = distance >= width if source is None else source // width != (source + distance) // width
    if cluster.device.is_cpu:
        return cpu.gloo_s("send", cluster.inter if far else cluster.intra, ranks=2, bytes_=bytes_)
    link, efficiency = (cluster.inter, _INTER_EFFICIENCY) if far else (cluster.intra, _INTRA_EFFICIENCY)
    return _BASE_S + link.latency_s + bytes_ / (link.bytes_per_s * efficiency * _wired_share(link, 2))


def boundary_send_s(cluster: Cluster, bytes_: float, *, stage: int, distance: int) -> float:
    """Seconds to send from ``stage`` to the next, where stages are ``distance`` ranks wide: its slowest rank's."""
    first = stage * distance
    width = cluster.gpus_per_node
    # The first and last rank of a stage, and the ranks around a node's edge, cover every case.
    edges = {first, first + distance - 1, *(r for r in (first // width * width + width,) if r < first + distance)}
    return max(send_s(cluster, bytes_, distance, source=rank) for rank in edges)


def tensor_time(
    kind: LayerKind, cluster: Cluster, *, degree: int, micro_batch: int, software: Software = EAGER
) -> OperatorTime:
    """Seconds of the kind's collectives over the tensor axis, and over others that they name, that show: the next
    operator waits for them, unless the software hides a share (``tensor_overlap``)."""
    tensor = Group(size=degree, stride=1)
    price = {
        "all_reduce": all_reduce_s,
        "all_gather": all_gather_s,
        "reduce_scatter": reduce_scatter_s,
        "all_to_all": all_to_all_s,
    }
    seconds = {"forward": 0.0, "backward": 0.0}
    for collective in kind.collectives:
        full = collective.bytes_per_sample * (micro_batch if collective.batched else 1)
        group = Group(size=collective.ranks, stride=collective.stride) if collective.ranks else tensor
        seconds[collective.phase] += price[collective.name](cluster, group, full)
    shown = 1.0 - software.tensor_overlap
    return OperatorTime(forward_s=shown * seconds["forward"], backward_s=shown * seconds["backward"])


def _gloo_link(cluster: Cluster, group: Group) -> Link:
    """The slowest link that a group of processes crosses."""
    return cluster.intra if group_on(cluster, group).nodes == 1 else cluster.inter


def _wired_share(link: Link, local: int) -> float:
    """Share of a GPU's wires that lead to the ``local`` ranks of a group, where no switch joins them."""
    return min(1.0, max(local - 1, 1) / link.peers) if link.peers else 1.0


def _derated(link: Link, efficiency: float) -> Link:
    return Link(name=link.name, bytes_per_s=link.bytes_per_s * efficiency, latency_s=link.latency_s)


@functools.lru_cache(maxsize=4096)
def _spread(size: int, stride: int, width: int, ranks: int) -> tuple[int, int]:
    """(ranks of the group a node, nodes) of the worst group among so many ``ranks``."""
    block = size * stride
    if width % block == 0 or ranks <= width:
        return size, 1
    if block % width == 0 and (width % stride == 0 or stride % width == 0):
        local = max(1, width // stride)
        return local, size // local
    worst = (size, 1)
    for start in range(0, min(math.lcm(block, width), ranks), block):
        for offset in {0, stride // 2, stride - 1}:
            if start + offset + (size - 1) * stride >= ranks:
                continue
            nodes: dict[int, int] = {}
            for index in range(size):
                node = (start + offset + index * stride) // width
                nodes[node] = nodes.get(node, 0) + 1
            if (len(nodes), -min(nodes.values())) > (worst[1], -worst[0]):
                worst = (min(nodes.values()), len(nodes))
    return worst


def _ring_latency_s(fabric: Fabric) -> float:
    """One pass around the ring: every rank's step, each over the link that it crosses."""
    inside = (fabric.local - 1) * fabric.nodes * fabric.intra.latency_s
    return inside + ((fabric.nodes if fabric.nodes > 1 else 0) * fabric.inter.latency_s)


def _tree_latency_s(fabric: Fabric) -> float:
    return (fabric.local - 1) * fabric.intra.latency_s + math.log2(fabric.nodes) * fabric.inter.latency_s


def _pass_latency_s(fabric: Fabric) -> float:
    """Of an all-gather or a reduce-scatter: a ring. NCCL's trees don't do them, its parallel algorithm (PAT, NCCL 2.23,
    2024) keeps the steps logarithmic where a node holds one rank of the group."""
    ring = _ring_latency_s(fabric)
    return min(ring, 2 * _tree_latency_s(fabric) + fabric.intra.latency_s) if fabric.local == 1 else ring
