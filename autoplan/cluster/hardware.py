"""Device files: data-sheet figures, each with its source, and the machine that a device usually stands in."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.cluster.checks import load_toml, number, values
from autoplan.cluster.types import Device, Link
from autoplan.errors import ClusterError
from autoplan.instances import BY_NAME

DEFAULT_KIND = "A100-80GB-SXM"
HARDWARE = Path(__file__).parents[1] / "cost_models" / "hardware"
_EFFICIENCIES = ("gemm", "attention_forward", "attention_backward", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device file: the device and the machine that it usually stands in."""

    device: Device
    node_gpus: int
    intra: Link
    inter: Link
    torch_names: tuple[str, ...]


def device_kinds() -> tuple[str, ...]:
    """Names of all devices that have a hardware file, sorted."""
    return tuple(sorted(path.stem for path in HARDWARE.glob("*.toml")))


@functools.cache
def machine_of(kind: str) -> Machine:
    """The machine of a kind that :func:`device_kinds` lists."""
    path = HARDWARE / f"{kind}.toml"
    return _machine_from(values(load_toml(path)), where=str(path))


def _machine_from(data: Mapping[str, Any], *, where: str) -> Machine:
    efficiency = {f"{key}_efficiency": number(data["efficiency"], key, where) for key in _EFFICIENCIES}
    device = Device(
        name=str(data["name"]),
        sms=int(number(data, "sms", where)),
        peak_flops={dtype: number(data["peak_flops"], dtype, where) for dtype in data["peak_flops"]},
        memory_bytes=number(data, "memory_bytes", where),
        memory_bytes_per_s=number(data, "memory_bytes_per_s", where),
        launch_s=number(data, "launch_s", where),
        context_bytes=number(data, "context_bytes", where),
        **efficiency,
    )
    node = data["node"]
    links = {
        key: Link(
            name=str(node[key]["name"]),
            bytes_per_s=number(node[key], "bytes_per_s", where),
            latency_s=number(node[key], "latency_s", where),
            peers=int(node[key].get("peers", 0)),
        )
        for key in ("intra", "inter")
    }
    return Machine(
        device=device, node_gpus=int(number(node, "gpus", where)), torch_names=tuple(data["torch_names"]), **links
    )


@functools.cache
def aliases() -> dict[str, str]:
    """Lower-case name or alias -> kind."""
    names: dict[str, str] = {}
    for kind in device_kinds():
        data = tomllib.loads((HARDWARE / f"{kind}.toml").read_text(encoding="utf-8"))
        for name in (kind, *data["aliases"]):
            names[name.lower()] = kind
    return names


def resolve(name: str, *, where: str) -> str:
    """The kind that ``name`` means; raises :class:`ClusterError` with the nearest names."""
    kind = aliases().get(name.strip().lower())
    if kind is None:
        raise unknown_kind(name, where=where)
    return kind


def unknown_kind(name: str, *, where: str = "") -> ClusterError:
    known = aliases() | {alias: instance.names[0] for alias, instance in BY_NAME.items()}
    near = difflib.get_close_matches(name.lower()[:100], known, n=3, cutoff=0.4)
    kinds = list(dict.fromkeys(known[alias] for alias in near))
    return ClusterError(
        f"unknown GPU kind: {name!r}",
        where=where,
        legal=", ".join(device_kinds()),
        attempt=f"did you mean {' or '.join(kinds)}?" if kinds else "8xH100, or a cluster file (.toml)",
    )
