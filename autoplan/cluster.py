"""Device, Link, Cluster: the machines a plan is for, and how a user names them.

Plain data; imports nothing of ours but the error family and the table of machines (and torch only to look at local
GPUs). Devices are TOML files in ``cost_models/hardware``: data-sheet figures, each with its source. A cluster is nodes
x GPUs a node of one device kind, an intra-node link and an inter-node link. A *node* is what the intra-node link spans,
so a rack with one NVLink domain (GB200 NVL72) is one node.

SPEC: ``8`` (the local kind), ``8xH100``, ``16x8xA100-80GB`` (nodes x GPUs a node x kind), ``4xp5.48xlarge`` (machines
by their maker's name, :mod:`.instances`), ``4xcpu``, or the path of a cluster file::

    device = "H100"             # a kind, or a table: base = "H100", and any field of a device file
    nodes = 4
    gpus_per_node = 8
    [inter]                     # both links optional; a field left out keeps the kind's default
    bytes_per_s = 25e9          # one GPU, one direction; or gbit_per_s = 200
    latency_s = 5e-6
    oversubscription = 2        # leaf switches have half as many links up as down: what all GPUs together get
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.errors import ClusterError
from autoplan.instances import BY_NAME, Instance

DEFAULT_KIND = "A100-80GB-SXM"
HARDWARE = Path(__file__).parent / "cost_models" / "hardware"
_LEGAL = "8, 8xH100, 2x8xA100-80GB (nodes x GPUs a node x kind), 4xp5.48xlarge, 4xcpu, or a cluster file (.toml)"
_PRESET = re.compile(r"(?:(?P<nodes>[+-]?\d+)x)?(?P<gpus>[+-]?\d+)x(?P<kind>\D.*|\d{4})", re.IGNORECASE)
_LINK_FIELDS = ("name", "bytes_per_s", "gbit_per_s", "latency_s", "peers", "oversubscription")
_EFFICIENCIES = ("gemm", "attention_forward", "attention_backward", "memory")


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

    @classmethod
    def parse(cls, spec: str | int | Path | Cluster) -> Cluster:
        """A cluster from SPEC (see the module); raises :class:`ClusterError` naming what is wrong."""
        if isinstance(spec, Cluster):
            return spec
        if isinstance(spec, bool) or not isinstance(spec, str | int | Path):
            raise ClusterError(f"not a cluster: {spec!r}", legal=_LEGAL, attempt="gpus=8 or gpus='8xH100'")
        if isinstance(spec, int):
            return _local_cluster(spec)
        if isinstance(spec, Path) or spec.endswith(".toml") or "/" in spec:
            return _read_cluster(Path(spec))
        text = spec.strip()
        if re.fullmatch(r"[+-]?\d+", text):
            return _local_cluster(int(text))
        return _preset_cluster(text)

    def to_spec(self) -> str:
        """The text that :meth:`parse` turns into this cluster again."""
        return self.spec

    def summary(self) -> str:
        """One line such as ``2 nodes x 8 H100-80GB-SXM (79.1 GiB), NVLink 450 GB/s, InfiniBand 50 GB/s a GPU``."""
        nodes = f"{self.nodes} nodes x {self.gpus_per_node}" if self.nodes > 1 else str(self.gpus_per_node)
        parts = [f"{nodes} {self.device.name} ({self.device.memory_bytes / 2**30:.1f} GiB)"]
        if self.gpus_per_node > 1:
            parts.append(f"{self.intra.name} {self.intra.bytes_per_s / 1e9:g} GB/s")
        if self.nodes > 1:
            parts.append(f"{self.inter.name} {self.inter.bytes_per_s / 1e9:g} GB/s a GPU")
        return ", ".join(parts)


def device_kinds() -> tuple[str, ...]:
    """Names of all devices that have a hardware file, sorted."""
    return tuple(sorted(path.stem for path in HARDWARE.glob("*.toml")))


def local_device_count() -> int:
    """GPUs that torch sees on this machine; 0 without a working CUDA or ROCm build."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """A device file: the device and the machine that it usually stands in."""

    device: Device
    node_gpus: int
    intra: Link
    inter: Link
    torch_names: tuple[str, ...]


def _local_cluster(gpus: int) -> Cluster:
    _check_positive(gpus, "number of GPUs", where=str(gpus))
    if local_device_count() == 0:
        note = f"no GPU here: planned for {DEFAULT_KIND}; name the kind as in {gpus}xH100"
        return _lay_out(gpus, _machine(DEFAULT_KIND), (note,))
    import torch

    shown = torch.cuda.get_device_name(0)
    for kind in device_kinds():
        machine = _machine(kind)
        if any(name.lower() in shown.lower() for name in machine.torch_names):
            return _lay_out(gpus, machine, (f"GPUs like this machine's: {shown} as {kind}",))
    raise ClusterError(
        f"no hardware file for this machine's GPU, {shown}",
        legal=", ".join(device_kinds()),
        attempt=f"name the nearest kind, as in {gpus}xH100, or write a cluster file",
    )


def _preset_cluster(text: str) -> Cluster:
    match = _PRESET.fullmatch(text)
    if match is None:
        raise _not_a_preset(text)
    gpus = _integer(match["gpus"], "number of GPUs", where=text)
    if match["kind"].strip().lower() in BY_NAME:
        return _instances(match, BY_NAME[match["kind"].strip().lower()], where=text)
    machine = _machine(_resolve(match["kind"], where=text))
    if match["nodes"] is None:
        return _lay_out(gpus, machine, _assumed(machine))
    nodes = _integer(match["nodes"], "number of nodes", where=text)
    if gpus > machine.node_gpus:
        raise ClusterError(
            f"{gpus} GPUs a node: the {machine.device.name}'s link spans {machine.node_gpus}",
            where=text,
            legal=f"1 to {machine.node_gpus} GPUs a node",
            attempt="a cluster file, if your machine differs",
        )
    return _cluster(machine, nodes, gpus, _assumed(machine))


def _instances(match: re.Match[str], instance: Instance, *, where: str) -> Cluster:
    """``4xp5.48xlarge``: four machines, whole."""
    if match["nodes"] is not None and int(match["gpus"]) != instance.gpus:
        raise ClusterError(
            f"{match['gpus']} GPUs a node: {instance.names[0]} has {instance.gpus}",
            where=where,
            legal=f"a number of machines, as in 4x{instance.names[0]}",
            attempt=f"{match['nodes']}x{match['gpus']}x{instance.kind} for a part of a machine",
        )
    count = _integer(match["nodes"] or match["gpus"], "number of machines", where=where)
    base = _machine(instance.kind)
    link = Link(name=instance.link_name, bytes_per_s=instance.bytes_per_s, latency_s=instance.latency_s)
    notes = (f"{instance.names[0]}: {instance.gpus} {instance.kind} a machine, {link.name} between machines",)
    return dataclasses.replace(
        _cluster(base, count, instance.gpus, ()), inter=link, spec=f"{count}x{instance.names[0]}", assumptions=notes
    )


def _not_a_preset(text: str) -> ClusterError:
    kind = _aliases().get(text.lower())
    if kind is None and text[:1].isalpha() and "x" not in text.lower()[1:-1]:
        return _unknown_kind(text)
    attempt = f"say how many: 8x{text}" if kind else "8xH100"
    return ClusterError(f"not a cluster: {text!r}", legal=_LEGAL, attempt=attempt)


def _assumed(machine: _Machine) -> tuple[str, ...]:
    if machine.device.is_cpu:
        return ("cpu: gloo processes of one host with modest assumed speed; fp32 or fp64",)
    return ()


def _lay_out(gpus: int, machine: _Machine, notes: tuple[str, ...]) -> Cluster:
    """``gpus`` over as few nodes as hold them, all alike."""
    _check_positive(gpus, "number of GPUs", where=str(gpus))
    most = machine.node_gpus
    if gpus <= most:
        return _cluster(machine, 1, gpus, notes)
    # A rack-scale domain is seldom used whole (72): take the largest part that all nodes can share evenly.
    per_node = most if gpus % most == 0 else max((n for n in range(4, most, 4) if gpus % n == 0), default=0)
    if per_node == 0 or (per_node != most and most <= 16):
        raise ClusterError(
            f"{gpus} {machine.device.name} do not fill nodes of {most}",
            where=f"{gpus}x{machine.device.name}",
            legal=f"up to {most}, or a multiple of {most}: {gpus // most * most}, {(gpus // most + 1) * most}",
            attempt=f"nodes x GPUs a node x kind, as in 2x{min(most, gpus // 2)}x{machine.device.name}",
        )
    if per_node != most:
        notes = (*notes, f"{gpus} GPUs as {gpus // per_node} NVLink domains of {per_node} (each spans up to {most})")
    return _cluster(machine, gpus // per_node, per_node, notes)


def _cluster(machine: _Machine, nodes: int, gpus: int, notes: tuple[str, ...]) -> Cluster:
    name = machine.device.name
    if nodes > 1:
        link = machine.inter
        notes = (*notes, f"between nodes: {link.name}, {link.bytes_per_s / 1e9:g} GB/s a GPU (default of the {name})")
    spec = f"{nodes}x{gpus}x{name}" if nodes > 1 else f"{gpus}x{name}"
    return Cluster(
        device=machine.device,
        nodes=nodes,
        gpus_per_node=gpus,
        intra=machine.intra,
        inter=machine.inter,
        spec=spec,
        assumptions=notes,
    )


@functools.cache
def _machine(kind: str) -> _Machine:
    path = HARDWARE / f"{kind}.toml"
    return _machine_from(_values(_load_toml(path)), where=str(path))


def _machine_from(data: Mapping[str, Any], *, where: str) -> _Machine:
    efficiency = {f"{key}_efficiency": _number(data["efficiency"], key, where) for key in _EFFICIENCIES}
    device = Device(
        name=str(data["name"]),
        sms=int(_number(data, "sms", where)),
        peak_flops={dtype: _number(data["peak_flops"], dtype, where) for dtype in data["peak_flops"]},
        memory_bytes=_number(data, "memory_bytes", where),
        memory_bytes_per_s=_number(data, "memory_bytes_per_s", where),
        launch_s=_number(data, "launch_s", where),
        context_bytes=_number(data, "context_bytes", where),
        **efficiency,
    )
    node = data["node"]
    links = {
        key: Link(
            name=str(node[key]["name"]),
            bytes_per_s=_number(node[key], "bytes_per_s", where),
            latency_s=_number(node[key], "latency_s", where),
            peers=int(node[key].get("peers", 0)),
        )
        for key in ("intra", "inter")
    }
    return _Machine(
        device=device, node_gpus=int(_number(node, "gpus", where)), torch_names=tuple(data["torch_names"]), **links
    )


@functools.cache
def _aliases() -> dict[str, str]:
    """Lower-case name or alias -> kind."""
    names: dict[str, str] = {}
    for kind in device_kinds():
        data = tomllib.loads((HARDWARE / f"{kind}.toml").read_text(encoding="utf-8"))
        for name in (kind, *data["aliases"]):
            names[name.lower()] = kind
    return names


def _resolve(name: str, *, where: str) -> str:
    kind = _aliases().get(name.strip().lower())
    if kind is None:
        raise _unknown_kind(name, where=where)
    return kind


def _unknown_kind(name: str, *, where: str = "") -> ClusterError:
    known = _aliases() | {alias: instance.names[0] for alias, instance in BY_NAME.items()}
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    kinds = list(dict.fromkeys(known[alias] for alias in near))
    return ClusterError(
        f"unknown GPU kind: {name!r}",
        where=where,
        legal=", ".join(device_kinds()),
        attempt=f"did you mean {' or '.join(kinds)}?" if kinds else "8xH100, or a cluster file (.toml)",
    )


def _read_cluster(path: Path) -> Cluster:
    data = _load_toml(path)
    where = str(path)
    known = ("device", "nodes", "gpus_per_node", "intra", "inter")
    _refuse_unknown(data, known, where=where)
    if "device" not in data:
        raise ClusterError("field `device` is missing", where=where, legal=", ".join(device_kinds()), attempt=_LEGAL)
    machine = _file_machine(data["device"], where=where)
    counts = {
        "nodes": _integer(data.get("nodes", 1), "field `nodes`", where=where),
        "gpus_per_node": _integer(data.get("gpus_per_node", machine.node_gpus), "field `gpus_per_node`", where=where),
    }
    return Cluster(
        device=machine.device,
        intra=_file_link(data.get("intra", {}), machine.intra, field="intra", where=where),
        inter=_file_link(data.get("inter", {}), machine.inter, field="inter", where=where),
        spec=where,
        assumptions=tuple(
            f"{field}: {link.name}, {link.bytes_per_s / 1e9:g} GB/s a GPU (default of the {machine.device.name})"
            for field, link in (("intra", machine.intra), ("inter", machine.inter))
            if field not in data and (field == "intra" or counts["nodes"] > 1)
        ),
        **counts,
    )


def _file_machine(described: object, *, where: str) -> _Machine:
    if isinstance(described, str):
        return _machine(_resolve(described, where=f"{where}, field `device`"))
    if not isinstance(described, dict) or not isinstance(described.get("base"), str):
        raise ClusterError(
            "field `device` is a kind, or a table with `base`", where=where, attempt='device = "H100", or base = "H100"'
        )
    machine = _machine(_resolve(described["base"], where=f"{where}, field `device.base`"))
    changes = {key: value for key, value in _values(described).items() if key != "base"}
    legal = tuple(field.name for field in dataclasses.fields(Device))
    _refuse_unknown(changes, legal, where=where, inside="device.")
    for key, value in changes.items():
        if key == "peak_flops" and isinstance(value, dict):
            changes[key] = machine.device.peak_flops | {k: _number(value, k, f"{where}, `peak_flops`") for k in value}
        elif key != "name":
            changes[key] = _number(changes, key, f"{where}, `device`")
    if "sms" in changes:
        changes["sms"] = int(changes["sms"])
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, **changes))


def _file_link(described: object, default: Link, *, field: str, where: str) -> Link:
    if not isinstance(described, dict):
        raise ClusterError(f"field `{field}` is a table", where=where, attempt=f"[{field}] and bytes_per_s = 25e9")
    _refuse_unknown(described, _LINK_FIELDS, where=where, inside=f"{field}.")
    place = f"{where}, `{field}`"
    changes: dict[str, Any] = {key: _number(described, key, place) for key in described if key != "name"}
    if "gbit_per_s" in changes:
        changes["bytes_per_s"] = changes.pop("gbit_per_s") * 1e9 / 8
    if "oversubscription" in changes:
        if changes["oversubscription"] < 1:
            raise ClusterError(
                "field `oversubscription` is links down over links up", where=place, legal="1 or more", attempt="2"
            )
        changes["bytes_per_s"] = changes.get("bytes_per_s", default.bytes_per_s) / changes.pop("oversubscription")
    if "peers" in changes:
        changes["peers"] = int(changes["peers"])
    if "name" in described:
        changes["name"] = str(described["name"])
    elif changes:
        changes["name"] = f"{default.name} (your figures)"
    return dataclasses.replace(default, **changes)


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ClusterError(f"cannot read the cluster file: {reason}", where=str(path), legal=_LEGAL) from None
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(
            f"not TOML: {error}", where=str(path), attempt='device = "H100", nodes = 2, gpus_per_node = 8, a line each'
        ) from None


def _values(data: Mapping[str, Any]) -> dict[str, Any]:
    """Tables ``{value, source}`` as their value, at any depth."""
    plain: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            plain[key] = value["value"] if "value" in value else _values(value)
        else:
            plain[key] = value
    return plain


def _refuse_unknown(data: Mapping[str, Any], known: tuple[str, ...], *, where: str, inside: str = "") -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ClusterError(
                f"unknown field `{inside}{key}`",
                where=where,
                legal=", ".join(known),
                attempt=f"did you mean `{near[0]}`?" if near else "remove it",
            )


def _number(data: Mapping[str, Any], key: str, where: str) -> float:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ClusterError(f"field `{key}` is a positive number, not {value!r}", where=where, attempt=f"{key} = 25e9")
    return float(value)


def _integer(value: object, what: str, *, where: str) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[+-]?\d+", text):
        raise ClusterError(f"{what}: {text!r} is not a whole number", where=where, legal=_LEGAL)
    _check_positive(int(text), what, where=where)
    return int(text)


def _check_positive(number: int, what: str, *, where: str) -> None:
    if number < 1:
        raise ClusterError(f"{what} must be 1 or more, not {number}", where=where, legal=_LEGAL, attempt="8xH100")
