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
and what hides is not free: its kernels hold streaming multiprocessors and memory bandwidth that the compute lacks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.cost_models.communication import Group, all_gather_s, all_reduce_s, reduce_scatter_s
from autoplan.cost_models.software import EAGER, Software
from autoplan.plan import Strategy

# NCCL runs 16 to 24 channels, a multiprocessor each, of 108 to 132: compute beside it slows by about that share.
_CONTENTION = 0.15


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
    software: Software = EAGER,
) -> DataParallelTime:
    """The data axis of one stage of ``layers`` layers.

    ``forward_s``/``backward_s`` are one micro-batch's compute that may run beside the transfers: give 0 where the
    runtime overlaps nothing. ``weight_bytes`` and ``gradient_bytes`` are one tensor rank's, unsharded over data.
    """
    n = strategy.data
    if n == 1:
        return DataParallelTime()
    if not software.data_overlap:
        forward_s = backward_s = 0.0
    cluster = _reached(cluster, software.data_links)
    group = Group(size=n, stride=strategy.tensor)
    pieces = max(layers, 1)
    share = (n - 1) / n
    if strategy.zero_stage == 0:
        each = all_reduce_s(cluster, group, gradient_bytes / pieces)
        total = each * pieces
        return DataParallelTime(
            step_s=_exposed(total, each, backward_s), total_s=total, bytes_per_step=2 * share * gradient_bytes
        )
    scatter = reduce_scatter_s(cluster, group, gradient_bytes / pieces)
    gather = all_gather_s(cluster, group, weight_bytes / pieces)
    if strategy.zero_stage == 1:
        return DataParallelTime(
            step_s=_exposed(scatter * pieces, scatter, backward_s) + gather * pieces,
            total_s=(scatter + gather) * pieces,
            bytes_per_step=share * (gradient_bytes + weight_bytes),
        )
    micro_batches = strategy.micro_batches
    if strategy.zero_stage == 2:
        return DataParallelTime(
            backward_s=_exposed(scatter * pieces, scatter, backward_s),
            step_s=gather * pieces,
            total_s=(scatter * micro_batches + gather) * pieces,
            bytes_per_step=share * (gradient_bytes * micro_batches + weight_bytes),
        )
    return DataParallelTime(
        forward_s=_exposed(gather * pieces, gather, forward_s),
        backward_s=_exposed((gather + scatter) * pieces, gather + scatter, backward_s),
        total_s=(2 * gather + scatter) * pieces * micro_batches,
        bytes_per_step=share * (2 * weight_bytes + gradient_bytes) * micro_batches,
    )


def _reached(cluster: Cluster, share: float) -> Cluster:
    """The links at the share of their rate that the software's collectives reach."""
    if share == 1.0:
        return cluster
    intra, inter = (
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s * share) for link in (cluster.intra, cluster.inter)
    )
    return dataclasses.replace(cluster, intra=intra, inter=inter)


def _exposed(total_s: float, unhidden_s: float, compute_s: float) -> float:
    """One piece shows always, the rest where it outlasts the compute beside it, and what hides slows that compute."""
    shown = min(total_s, max(unhidden_s, total_s - compute_s))
    return shown + _CONTENTION * (total_s - shown)
