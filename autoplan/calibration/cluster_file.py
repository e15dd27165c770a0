"""The cluster file that holds a fit: every measured figure with its source, the rest inherited from its base kind."""

from __future__ import annotations

from pathlib import Path

from autoplan.cost_models.calibration import Fit
from autoplan.errors import ClusterError
from autoplan.whole_file import write_whole

_SOURCE = "measured"


def cluster_toml(fit: Fit) -> str:
    """The text of a file that ``Cluster.parse`` reads as the fitted cluster."""
    cluster, device = fit.cluster, fit.cluster.device
    median, worst = fit.errors()
    lines = [
        f"# Written by `autoplan calibrate`: {len(fit.residuals)} measurements, predicted within {median:.0%} (median)",
        f"# and {worst:.0%} (worst). Use it as --gpus FILE.toml.",
        f"nodes = {cluster.nodes}",
        f"gpus_per_node = {cluster.gpus_per_node}",
        "",
        "[device]",
        f'base = "{device.name}"',
        *(_field(name, getattr(device, name)) for name in _FITTED),
    ]
    if device.is_cpu:  # a GPU keeps its data sheet's peaks
        lines += [
            _field("memory_bytes_per_s", device.memory_bytes_per_s),
            "",
            "[device.peak_flops]",
            *(_field(dtype, device.peak_flops[dtype]) for dtype in fit.dtypes),
        ]
    if cluster.gpus_per_node > 1:
        lines += [
            "",
            f"[intra]  # {_SOURCE}",
            f'name = "{cluster.intra.name}"',
            f"bytes_per_s = {cluster.intra.bytes_per_s:.6g}",
            f"latency_s = {cluster.intra.latency_s:.6g}",
        ]
    return "\n".join(lines) + "\n"


_FITTED = (
    "launch_s",
    "gemm_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "memory_efficiency",
)


def _field(name: str, value: float) -> str:
    return f'{name} = {{ value = {value:.6g}, source = "{_SOURCE}" }}'


def write_cluster(fit: Fit, path: Path) -> None:
    """Write the file beside ``path`` and rename it, so that no half of it is ever there; raises ClusterError."""
    try:
        write_whole(path, cluster_toml(fit))
    except OSError as error:
        raise ClusterError(f"cannot write the cluster file: {error.strerror}", where=str(path)) from None
