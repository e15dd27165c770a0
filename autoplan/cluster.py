"""Device, Link, Cluster: the machines a plan is for. Plain data; imports nothing of ours but the error family.

Devices are TOML files in ``cost_models/hardware``: data-sheet figures, each with its source. A cluster is nodes x GPUs
a node of one device kind, an intra-node link and an inter-node link.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """``bytes_per_s`` is what one GPU can send in one direction; ``latency_s`` is the alpha of one message."""

    name: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU as its runtime shows it (an MI250X die is one device).

    ``peak_flops``: dense, by dtype ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "fp4"), only what it has.
    ``context_bytes``: what the driver and libraries take before the first tensor.
    """

    name: str
    sms: int
    peak_flops: dict[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float
    context_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``nodes`` x ``gpus_per_node`` GPUs of one kind. ``assumptions``: what was filled in for the user."""

    device: Device
    nodes: int
    gpus_per_node: int
    intra: Link
    inter: Link
    spec: str
    assumptions: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node
