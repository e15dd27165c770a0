"""The data: one device, one link, one cluster of one kind or of several."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """``bytes_per_s`` is what one GPU can send in one direction; ``latency_s`` is the alpha of one message.

    ``peers``: over how many neighbours the GPU's wires are divided where no switch joins them (DGX-1's mesh): one
    pair has a part of the bandwidth only. 0: any pair has all of it.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    peers: int = 0

    def times(self, factor: float) -> Link:
        """A link that passes on ``factor`` times as many bytes a second."""
        return dataclasses.replace(self, bytes_per_s=self.bytes_per_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU as its runtime shows it (an MI250X die is one device).

    ``peak_flops``: dense, by dtype ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "fp4"), only what it has.
    ``context_bytes``: what the driver and libraries take before the first tensor. The four efficiencies are shares of
    the peaks that the best kernels keep for long; shape effects come on top of them.
    """

    name: str
    sms: int
    peak_flops: dict[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float
    context_bytes: float
    gemm_efficiency: float = 0.8
    attention_forward_efficiency: float = 0.5
    attention_backward_efficiency: float = 0.4
    memory_efficiency: float = 0.85

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    def flops(self, dtype: str) -> float:
        """Dense peak FLOP/s for ``dtype``; a dtype that the device lacks runs on its fp32 units."""
        return self.peak_flops.get(dtype) or self.peak_flops["fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``nodes`` x ``gpus_per_node`` GPUs of one kind. ``assumptions``: what was filled in for the user.

    A mixed cluster has ``groups``, each a cluster of one kind with a ``name`` (its kind, unless the file names it), in
    rank order, and ``between``: the link of every pair of them, in the order (0, 1), (0, 2), ..., (1, 2), ... Its own
    ``device``, ``nodes``, ``gpus_per_node`` and links are then those of the weakest: what holds for all its GPUs.
    """

    device: Device
    nodes: int
    gpus_per_node: int
    intra: Link
    inter: Link
    spec: str
    assumptions: tuple[str, ...] = ()
    name: str = ""
    groups: tuple[Cluster, ...] = ()
    between: tuple[Link, ...] = ()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def one_kind(self) -> tuple[Cluster, ...]:
        """The clusters of one kind that this one consists of: its groups, or itself."""
        return self.groups or (self,)

    def link_between(self, one: int, other: int) -> Link:
        """The link from a GPU of group ``one`` to one of group ``other``; between nodes where they are the same."""
        if one == other:
            return self.one_kind[one].inter
        first, second = sorted((one, other))
        count = len(self.groups)
        return self.between[first * count - first * (first + 1) // 2 + second - first - 1]

    def with_links(self, *, intra: float = 1.0, inter: float = 1.0) -> Cluster:
        """The same machines with links inside a node and between nodes that are so many times as fast."""
        return dataclasses.replace(
            self,
            intra=self.intra.times(intra),
            inter=self.inter.times(inter),
            between=tuple(link.times(inter) for link in self.between),
            groups=tuple(group.with_links(intra=intra, inter=inter) for group in self.groups),
        )

    def with_memory(self, times: float) -> Cluster:
        """The same machines with so many times the memory on every GPU."""
        return dataclasses.replace(
            self,
            device=dataclasses.replace(self.device, memory_bytes=self.device.memory_bytes * times),
            groups=tuple(group.with_memory(times) for group in self.groups),
        )

    def with_more_memory(self, more_bytes: float) -> Cluster:
        """The same machines with so many bytes more (below 0: less) on every GPU."""
        memory = self.device.memory_bytes + more_bytes
        return dataclasses.replace(
            self,
            device=dataclasses.replace(self.device, memory_bytes=memory),
            groups=tuple(group.with_more_memory(more_bytes) for group in self.groups),
        )

    @classmethod
    def parse(cls, spec: str | int | Path | Cluster) -> Cluster:
        """A cluster from SPEC (see the package); raises :class:`ClusterError` naming what is wrong."""
        from autoplan.cluster.spec import parse  # it makes clusters; a cluster only lends it its name

        return parse(spec)

    @property
    def fingerprint(self) -> str:
        """A hash of every figure that plans are made from, whatever the cluster is called."""
        figures = [dataclasses.asdict(part) for part in (self, *self.groups)]
        for part in figures:
            for name in ("spec", "name", "assumptions", "groups"):
                del part[name]
        return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()

    def to_spec(self) -> str:
        """The text that :meth:`parse` turns into this cluster again."""
        return self.spec

    def summary(self) -> str:
        """One line such as ``2 nodes x 8 H100-80GB-SXM (79.1 GiB), NVLink 450 GB/s, InfiniBand 50 GB/s a GPU``."""
        if self.groups:
            return "; ".join(group.summary() for group in self.groups)
        nodes = f"{self.nodes} nodes x {self.gpus_per_node}" if self.nodes > 1 else str(self.gpus_per_node)
        parts = [f"{nodes} {self.device.name} ({self.device.memory_bytes / 2**30:.1f} GiB)"]
        if self.gpus_per_node > 1:
            parts.append(f"{self.intra.name} {self.intra.bytes_per_s / 1e9:g} GB/s")
        if self.nodes > 1:
            parts.append(f"{self.inter.name} {self.inter.bytes_per_s / 1e9:g} GB/s a GPU")
        return ", ".join(parts)
