"""Machines of the usual clouds and makers by their names: what a node holds and what joins nodes.

    4xp5.48xlarge     four of them

Plain data; imports nothing of ours. ``gbit_per_s`` is the network of the whole machine in one direction, as its maker
states it; a GPU has its part. The network's latency is assumed by its kind: InfiniBand 5 us, RoCE 10 us, EFA 15 us,
TCP, with or without GPU memory, 25 us.
"""

from __future__ import annotations

from dataclasses import dataclass

_LATENCY_S = {"InfiniBand": 5e-6, "RoCE": 10e-6, "EFA": 15e-6, "TCP": 25e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """``kind``: a device file's name. ``names``: as people write it, the maker's own first."""

    names: tuple[str, ...]
    kind: str
    gpus: int
    gbit_per_s: float
    network: str

    @property
    def bytes_per_s(self) -> float:
        """One GPU's part of the network, one direction."""
        return self.gbit_per_s * 1e9 / 8 / self.gpus

    @property
    def latency_s(self) -> float:
        return _LATENCY_S[self.network]

    @property
    def link_name(self) -> str:
        """Such as ``3200 Gb/s EFA``."""
        return f"{self.gbit_per_s:g} Gb/s {self.network}"


def _instance(names: str, kind: str, gpus: int, gbit_per_s: float, network: str) -> Instance:
    return Instance(names=tuple(names.split()), kind=kind, gpus=gpus, gbit_per_s=gbit_per_s, network=network)


# Networks: the makers' pages of instance types (AWS "Accelerated computing", Google "GPU machine types", Azure "ND
# family") and NVIDIA's DGX user guides, as of 2025.
INSTANCES = (
    _instance("p3.16xlarge p3", "V100-16GB", 8, 25, "TCP"),
    _instance("p3dn.24xlarge p3dn", "V100-32GB", 8, 100, "EFA"),
    _instance("p4d.24xlarge p4d", "A100-40GB-SXM", 8, 400, "EFA"),
    _instance("p4de.24xlarge p4de", "A100-80GB-SXM", 8, 400, "EFA"),
    _instance("p5.48xlarge p5", "H100-80GB-SXM", 8, 3200, "EFA"),
    _instance("p5e.48xlarge p5e", "H200", 8, 3200, "EFA"),
    _instance("p5en.48xlarge p5en", "H200", 8, 3200, "EFA"),
    _instance("p6-b200.48xlarge p6-b200", "B200", 8, 3200, "EFA"),
    _instance("g4dn.12xlarge", "T4", 4, 50, "TCP"),
    _instance("g4dn.metal", "T4", 8, 100, "EFA"),
    _instance("g5.12xlarge", "A10G", 4, 40, "TCP"),
    _instance("g5.48xlarge", "A10G", 8, 100, "EFA"),
    _instance("g6.12xlarge", "L4", 4, 40, "TCP"),
    _instance("g6.48xlarge", "L4", 8, 100, "EFA"),
    _instance("g6e.12xlarge", "L40S", 4, 100, "EFA"),
    _instance("g6e.48xlarge", "L40S", 8, 400, "EFA"),
    _instance("a2-highgpu-8g a2-high", "A100-40GB-SXM", 8, 100, "TCP"),
    _instance("a2-ultragpu-8g a2-ultra", "A100-80GB-SXM", 8, 100, "TCP"),
    _instance("a3-highgpu-8g a3-high", "H100-80GB-SXM", 8, 800, "TCP"),
    _instance("a3-megagpu-8g a3-mega", "H100-80GB-SXM", 8, 1600, "TCP"),
    _instance("a3-ultragpu-8g a3-ultra", "H200", 8, 3200, "RoCE"),
    _instance("a4-highgpu-8g a4-high", "B200", 8, 3200, "RoCE"),
    _instance("g2-standard-96", "L4", 8, 100, "TCP"),
    _instance("Standard_ND40rs_v2 ND40rs_v2", "V100-32GB", 8, 100, "InfiniBand"),
    _instance("Standard_ND96asr_v4 ND96asr_v4", "A100-40GB-SXM", 8, 1600, "InfiniBand"),
    _instance("Standard_ND96amsr_A100_v4 ND96amsr_A100_v4 ND-A100-v4", "A100-80GB-SXM", 8, 1600, "InfiniBand"),
    _instance("Standard_ND96isr_H100_v5 ND96isr_H100_v5 ND-H100-v5", "H100-80GB-SXM", 8, 3200, "InfiniBand"),
    _instance("Standard_ND96isr_H200_v5 ND96isr_H200_v5 ND-H200-v5", "H200", 8, 3200, "InfiniBand"),
    _instance("Standard_ND96isr_MI300X_v5 ND96isr_MI300X_v5", "MI300X", 8, 3200, "InfiniBand"),
    _instance("DGX-1", "V100-32GB", 8, 400, "InfiniBand"),
    _instance("DGX-A100", "A100-80GB-SXM", 8, 1600, "InfiniBand"),
    _instance("DGX-H100", "H100-80GB-SXM", 8, 3200, "InfiniBand"),
    _instance("DGX-H200", "H200", 8, 3200, "InfiniBand"),
    _instance("DGX-B200", "B200", 8, 3200, "InfiniBand"),
)
BY_NAME = {name.lower(): instance for instance in INSTANCES for name in instance.names}
