"""Axes that share a link: what is in flight at the same time adds up.

Gradients are summed, and sharded weights gathered, beside a *window* of compute (:mod:`.data_parallel`). In the same
window other axes move bytes over the same wires: collectives of the tensor, context and expert axes, hidden behind
their products or not, and what one pipeline stage sends to the next (the activations of the micro-batch before, or its
gradients). Each link of a rank takes the sum of its bytes through, so that a transfer of the data axis that takes D
seconds alone outlasts a window of W seconds by

    max(D - W, max over links of fill + held - W)

``fill`` and ``held``: seconds in which the transfer, and the others, fill the link (bytes over its rate; latencies
fill nothing). Links that are not shared cost nothing: tensor parallelism over NVLink leaves the network to the
gradients, and the next operator's wait for it is time in which they get on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autoplan.cluster import Cluster
from autoplan.cost_models.communication import Group, dispatch_links_s, group_on

if TYPE_CHECKING:
    from autoplan.layers.types import LayerKind

# What a rank passes on, in units of (n - 1) / n of the tensor's bytes.
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Seconds in which transfers fill a rank's links: inside its node, and to other nodes."""

    intra_s: float = 0.0
    inter_s: float = 0.0

    def __add__(self, other: Held) -> Held:
        return Held(intra_s=self.intra_s + other.intra_s, inter_s=self.inter_s + other.inter_s)


NOTHING = Held()


def held_by_ring(cluster: Cluster, group: Group, sent_bytes: float) -> Held:
    """What collectives over ``group`` hold while every rank passes on ``sent_bytes``: all of it inside its node where
    another rank is there, and an even share of the node's ranks to the next node."""
    if group.size == 1 or not sent_bytes:
        return NOTHING
    fabric = group_on(cluster, group)
    return Held(
        intra_s=sent_bytes / fabric.intra.bytes_per_s if fabric.local > 1 else 0.0,
        inter_s=sent_bytes / (fabric.local * fabric.inter.bytes_per_s) if fabric.nodes > 1 else 0.0,
    )


def held_by_layer(kind: LayerKind, cluster: Cluster, *, degree: int, micro_batch: int) -> tuple[Held, Held]:
    """What the layer's collectives hold in a forward and in a backward; arguments as
    :func:`autoplan.cost_models.communication.tensor_time`'s."""
    found = {"forward": NOTHING, "backward": NOTHING}
    for collective in kind.collectives:
        ranks = collective.ranks or degree
        group = Group(size=ranks, stride=collective.stride if collective.ranks else 1)
        full = collective.bytes_per_sample * (micro_batch if collective.batched else 1)
        sent_bytes = _PASSES[collective.name] * (ranks - 1) / ranks * full
        found[collective.phase] += held_by_ring(cluster, group, sent_bytes)
    return found["forward"], found["backward"]


def held_by_dispatch(cluster: Cluster, group: Group, row_bytes: float, *, topk: int) -> Held:
    """What :func:`autoplan.cost_models.communication.dispatch_s` holds; arguments as there."""
    if group.size == 1:
        return NOTHING
    near_s, far_s = dispatch_links_s(cluster, group, row_bytes, topk=topk)
    return Held(intra_s=near_s, inter_s=far_s)


def held_by_send(cluster: Cluster, seconds: float, *, distance: int) -> Held:
    """What a message of ``seconds`` to the rank ``distance`` further on holds."""
    return Held(inter_s=seconds) if distance >= cluster.gpus_per_node else Held(intra_s=seconds)


def room_s(window_s: Any, *, others: Held, alone_s: Any, fills: Held) -> Any:
    """Seconds of a window that are left for a transfer which takes ``alone_s`` and ``fills`` links: what is longer than
    that outlasts the window. Negative where the links are held for longer than the window. Numbers or arrays; the
    fields of ``fills`` too."""
    lost: Any = 0.0
    for taken, fill in ((others.intra_s, fills.intra_s), (others.inter_s, fills.inter_s)):
        if taken and np.any(fill):
            lost = np.maximum(lost, np.where(np.asarray(fill) > 0, taken + fill - alone_s, 0.0))
    return window_s - lost
