"""What the data axis costs: gradient synchronisation, and the gathers and scatters of sharded state (ZeRO).

A step of one rank whose stage holds ``weight_bytes`` of weights and makes ``gradient_bytes`` of gradients
(Rajbhandari et al. 2020, section 7):

=====  =========================================================================================
stage  traffic
=====  =========================================================================================
0      all-reduce of the gradients, once
1      reduce-scatter of the gradients, once; all-gather of the weights after the optimizer, once
2      reduce-scatter of the gradients every micro-batch; all-gather of the weights, once
3      all-gather of the weights every forward and every backward; reduce-scatter every micro-batch
=====  =========================================================================================

Synchronisation runs beside the backward that makes the gradients, a bucket at a time: the last bucket can't hide. A
ZeRO-3 gather is prefetched one layer ahead: the first can't hide. Whatever is longer than the compute beside it shows,
and so does what finds its links taken by other axes (:mod:`.contention`). What hides is not free: its kernels hold
streaming multiprocessors and memory bandwidth that the compute lacks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import Cluster
from autoplan.cost_models.communication import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from autoplan.cost_models.contention import NOTHING, Held, held_by_ring, room_s
from autoplan.cost_models.software import EAGER, Software
from autoplan.plan import Strategy

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Exposed = Callable[[Any, Any, Any], Any]
Window = Callable[[Any, Any], Any]

# NCCL runs 16 to 24 channels, a multiprocessor each, of 108 to 132: compute beside it slows by about that share.
CONTENTION = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelTime:
    """Seconds that nothing hides, by where they fall, and the traffic.

    ``forward_s``/``backward_s``: added to every micro-batch of the stage. ``step_s``: once a step, after the last
    backward. ``total_s``: of all the step's transfers, hidden or not. ``bytes_per_step``: what one rank sends.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0
    total_s: float = 0.0
    bytes_per_step: float = 0.0

    def exposed_s(self, micro_batches: int) -> float:
        """Seconds of one step that nothing hides."""
        return self.step_s + micro_batches * (self.forward_s + self.backward_s)


def data_parallel_time(
    cluster: Cluster,
    *,
    strategy: Strategy,
    weight_bytes: float,
    gradient_bytes: float,
    layers: int,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    forward_held: Held = NOTHING,
    backward_held: Held = NOTHING,
    software: Software = EAGER,
    prefetch: bool = True,
) -> DataParallelTime:
    """The data axis of one stage of ``layers`` layers.

    ``forward_s``/``backward_s`` are one micro-batch's seconds that may run beside the transfers: give 0 where the
    runtime overlaps nothing. ``forward_held``/``backward_held``: of these, what other axes hold of the links.
    ``weight_bytes`` and ``gradient_bytes`` are one tensor rank's, unsharded over data. ``prefetch``: whether ZeRO-3
    gathers a layer's weights while another computes.
    """
    if strategy.data == 1:
        return DataParallelTime()
    if not software.data_overlap:
        forward_s = backward_s = 0.0
    shown, total_s = _shown(
        strategy,
        _collectives(cluster, strategy, software),
        weight_bytes,
        gradient_bytes,
        max(layers, 1),
        (_window(cluster, strategy, forward_s, forward_held), _window(cluster, strategy, backward_s, backward_held)),
        prefetch=prefetch,
    )
    return DataParallelTime(
        forward_s=float(shown[0]),
        backward_s=float(shown[1]),
        step_s=float(shown[2]),
        total_s=float(total_s),
        bytes_per_step=_bytes_per_step(strategy, weight_bytes, gradient_bytes),
    )


def exposed_times(
    cluster: Cluster,
    *,
    strategy: Strategy,
    weight_bytes: Floats,
    gradient_bytes: Floats,
    layers: Floats | Integers,
    backward_s: Floats,
    backward_held: Held = NOTHING,
) -> tuple[Floats, Floats, Floats]:
    """``forward_s``, ``backward_s`` and ``step_s`` of :func:`data_parallel_time` for many stages of one strategy,
    without prefetch."""
    if strategy.data == 1:
        nothing = np.zeros(len(layers))
        return nothing, nothing, nothing
    price = _collectives(cluster, strategy, EAGER)
    windows = (_window(cluster, strategy, 0.0, NOTHING), _window(cluster, strategy, backward_s, backward_held))
    pieces = np.maximum(layers, 1)
    shown, _ = _shown(strategy, price, weight_bytes, gradient_bytes, pieces, windows, prefetch=False)
    forward, backward, step = (np.broadcast_to(seconds, np.shape(layers)) for seconds in shown)
    return forward, backward, step


def least_exposed_times(
    cluster: Cluster,
    *,
    strategy: Strategy,
    weight_bytes: float | Floats,
    gradient_bytes: float | Floats,
    backward_s: Floats,
) -> tuple[Floats, Floats]:
    """(forward and backward, step) that no split of these bytes into stages and layers goes below in sum, where all of
    their backward takes ``backward_s``, for one or many of these; without prefetch.

    A transfer of a sum takes no longer than the parts' transfers, and what hides is no more than what it hides behind.
    """
    if strategy.data == 1:
        return np.zeros(len(backward_s)), np.zeros(len(backward_s))
    price = _collectives(cluster, strategy, EAGER)
    windows = (_window(cluster, strategy, 0.0, NOTHING), _window(cluster, strategy, backward_s, NOTHING))
    shown, _ = _shown(strategy, price, weight_bytes, gradient_bytes, 1, windows, prefetch=False, exposed=_least_exposed)
    forward, backward, step = (np.broadcast_to(seconds, np.shape(backward_s)) for seconds in shown)
    return forward + backward, step


class Collectives(NamedTuple):
    """Seconds of a transfer of so many bytes over the data axis, or of many transfers."""

    all_reduce: Callable[[Any], Any]
    reduce_scatter: Callable[[Any], Any]
    all_gather: Callable[[Any], Any]


def _collectives(cluster: Cluster, strategy: Strategy, software: Software) -> Collectives:
    reached = _reached(cluster, software.data_links)
    group = Group(size=strategy.data, stride=strategy.tensor, ranks=strategy.gpus)
    return Collectives(
        *(functools.partial(price, reached, group) for price in (all_reduce_s, reduce_scatter_s, all_gather_s))
    )


def _shown(
    strategy: Strategy,
    price: Collectives,
    weight_bytes: Any,
    gradient_bytes: Any,
    pieces: Any,
    windows: tuple[Window, Window],
    *,
    prefetch: bool,
    exposed: Exposed | None = None,
) -> tuple[tuple[Any, Any, Any], Any]:
    """Seconds that show in every forward, every backward and once a step, and of all transfers; numbers or arrays.
    ``windows``: of the forward and of the backward, for what runs beside them."""
    exposed = exposed or _exposed
    zero, share, (ahead, back) = strategy.zero_stage, (strategy.data - 1) / strategy.data, windows
    if zero == 0:
        each = price.all_reduce(gradient_bytes / pieces)
        beside = each * pieces
        return (0.0, 0.0, exposed(beside, each, back(beside, 2 * share * gradient_bytes))), beside
    scatter = price.reduce_scatter(gradient_bytes / pieces)
    gather = price.all_gather(weight_bytes / pieces)
    beside, gathered = scatter * pieces, gather * pieces
    scattered = exposed(beside, scatter, back(beside, share * gradient_bytes))
    if zero == 1:
        return (0.0, 0.0, scattered + gathered), beside + gathered
    micro_batches = strategy.micro_batches
    if zero == 2:
        return (0.0, scattered, gathered), beside * micro_batches + gathered
    total = (2 * gathered + beside) * micro_batches
    if not prefetch:
        return (gathered, gathered + scattered, 0.0), total
    forward, both = exposed(gathered, gather, ahead(gathered, share * weight_bytes)), gathered + beside
    backward = exposed(both, gather + scatter, back(both, share * (weight_bytes + gradient_bytes)))
    return (forward, backward, 0.0), total


def _window(cluster: Cluster, strategy: Strategy, seconds: Any, others: Held) -> Window:
    """What is left of ``seconds`` for a transfer of so many seconds and so many bytes passed on."""
    if others == NOTHING:
        return lambda alone_s, sent_bytes: seconds
    one = held_by_ring(cluster, Group(size=strategy.data, stride=strategy.tensor, ranks=strategy.gpus), 1.0)

    def left(alone_s: Any, sent_bytes: Any) -> Any:
        fills = Held(intra_s=sent_bytes * one.intra_s, inter_s=sent_bytes * one.inter_s)
        return room_s(seconds, others=others, alone_s=alone_s, fills=fills)

    return left


def _bytes_per_step(strategy: Strategy, weight_bytes: float, gradient_bytes: float) -> float:
    share, micro_batches = (strategy.data - 1) / strategy.data, strategy.micro_batches
    if strategy.zero_stage == 0:
        return share * 2 * gradient_bytes
    if strategy.zero_stage == 1:
        return share * (gradient_bytes + weight_bytes)
    if strategy.zero_stage == 2:
        return share * (gradient_bytes * micro_batches + weight_bytes)
    return share * (2 * weight_bytes + gradient_bytes) * micro_batches


def _reached(cluster: Cluster, share: float) -> Cluster:
    """The links at the share of their rate that the software's collectives reach."""
    if share == 1.0:
        return cluster
    intra, inter = (
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s * share) for link in (cluster.intra, cluster.inter)
    )
    return dataclasses.replace(cluster, intra=intra, inter=inter)


def _exposed(total_s: Any, unhidden_s: Any, compute_s: Any) -> Any:
    """One piece shows always, the rest where it outlasts the compute beside it, and what hides slows that compute."""
    shown = np.minimum(total_s, np.maximum(unhidden_s, total_s - compute_s))
    return shown + CONTENTION * (total_s - shown)


def _least_exposed(total_s: Any, _: Any, compute_s: Any) -> Any:
    """The same of stages and layers that are not told apart."""
    return CONTENTION * total_s + (1 - CONTENTION) * np.maximum(0.0, total_s - compute_s)
