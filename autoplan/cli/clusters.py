"""``autoplan clusters``: the GPU kinds that SPEC may name."""

from __future__ import annotations

from autoplan.cli import console, options
from autoplan.cluster import Cluster, device_kinds
from autoplan.explain.text import size


def clusters(json: options.Json = False) -> None:
    """List the GPU kinds known, with the figures plans are made from.

    Example: autoplan clusters
    """
    machines = [Cluster.parse(f"1x{kind}") for kind in device_kinds()]
    if json:
        console.result_json({"schema": 1, "devices": [_row(machine) for machine in machines]})
        return
    listed = console.table(
        ("kind", False),
        ("memory", True),
        ("GB/s", True),
        ("TFLOP/s", True),
        ("dtype", False),
        ("link", False),
        ("GB/s", True),
    )
    for machine in machines:
        device = machine.device
        dtype = next(name for name in ("bf16", "fp16", "fp32") if name in device.peak_flops)
        listed.add_row(
            device.name,
            size(device.memory_bytes),
            f"{device.memory_bytes_per_s / 1e9:.0f}",
            f"{device.peak_flops[dtype] / 1e12:.3g}" if device.is_cpu else f"{device.peak_flops[dtype] / 1e12:.0f}",
            dtype,
            machine.intra.name,
            f"{machine.intra.bytes_per_s / 1e9:g}",
        )
    console.result(listed)
    console.note(
        "SPEC: 8xH100, 2x8xA100-80GB (nodes x GPUs a node), 8xH100+8xA100 (kinds side by side), a number "
        "(this machine's kind), or a cluster file"
    )


def _row(machine: Cluster) -> dict[str, object]:
    device = machine.device
    return {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "peak_flops": device.peak_flops,
        "intra": {"name": machine.intra.name, "bytes_per_s": machine.intra.bytes_per_s},
        "inter": {"name": machine.inter.name, "bytes_per_s": machine.inter.bytes_per_s},
    }
