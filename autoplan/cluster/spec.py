"""SPEC texts: counts, kinds and machines by name, kinds side by side; and the GPUs of this machine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from autoplan.cluster.checks import LEGAL, check_positive, integer
from autoplan.cluster.hardware import (
    DEFAULT_KIND,
    Machine,
    aliases,
    device_kinds,
    machine_of,
    resolve,
    unknown_kind,
)
from autoplan.cluster.types import Cluster, Link
from autoplan.errors import ClusterError
from autoplan.instances import BY_NAME, Instance

_PRESET = re.compile(r"(?:(?P<nodes>[+-]?\d+)x)?(?P<gpus>[+-]?\d+)x(?P<kind>\D.*|\d{4})", re.IGNORECASE)


def parse(spec: str | int | Path | Cluster) -> Cluster:
    """A cluster from SPEC; raises :class:`ClusterError` naming what is wrong."""
    if isinstance(spec, Cluster):
        return spec
    if isinstance(spec, bool) or not isinstance(spec, str | int | Path):
        raise ClusterError(f"not a cluster: {spec!r}", legal=LEGAL, attempt='gpus="8xH100"')
    if isinstance(spec, int):
        return _local_cluster(spec)
    if isinstance(spec, Path) or spec.endswith(".toml") or "/" in spec:
        from autoplan.cluster.files import read_cluster  # files hold SPEC's kinds

        return read_cluster(Path(spec))
    text = spec.strip()
    if re.fullmatch(r"[+-]?\d+", text):
        return _local_cluster(integer(text, "number of GPUs", where=text[:40]))
    return _side_by_side(text) if _has_parts(text) else _preset_cluster(text)


def under_its_own_spec(cluster: Cluster) -> Cluster:
    """``cluster``; where its SPEC means another one, because figures of it were replaced, under a text that says so and
    that :func:`parse` refuses."""
    try:
        meant = parse(cluster.spec)
    except ClusterError:  # a name of the user's own, or a file that is not at hand
        return cluster
    same = meant.fingerprint == cluster.fingerprint
    return cluster if same else dataclasses.replace(cluster, spec=f"{cluster.spec}, changed")


def local_device_count() -> int:
    """GPUs that torch sees on this machine; 0 without a working CUDA or ROCm build."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_parts(text: str) -> bool:
    """Whether a ``+`` joins two kinds, and is neither a sign nor part of a kind's name."""
    match = _PRESET.fullmatch(text)
    if match is not None and match["kind"].strip().lower() in aliases() | BY_NAME:
        return False
    return "+" in text[1:]


def _side_by_side(text: str) -> Cluster:
    """``2x8xH100+2x8xA100-80GB``. Parts of one kind with nodes alike are one group."""
    from autoplan.cluster.mixed import join  # joins clusters of one kind

    parts: list[Cluster] = []
    for piece in text.split("+"):
        if not piece.strip():
            raise ClusterError(f"not a cluster: {text!r}", legal=LEGAL, attempt="2x8xH100+2x8xA100-80GB")
        part = _preset_cluster(piece.strip())
        same = next((i for i, other in enumerate(parts) if _alike(part, other)), None)
        if same is None:
            parts.append(part)
        else:
            parts[same] = _cluster(
                machine_of(part.device.name), parts[same].nodes + part.nodes, part.gpus_per_node, _assumed(part)
            )
    return parts[0] if len(parts) == 1 else join(tuple(parts), spec="+".join(part.spec for part in parts), where=text)


def _alike(one: Cluster, other: Cluster) -> bool:
    """The same kind in nodes of the same size, joined as its kind usually is."""
    usual = one.inter == other.inter == machine_of(one.device.name).inter
    return usual and one.device == other.device and one.gpus_per_node == other.gpus_per_node


def _local_cluster(gpus: int) -> Cluster:
    check_positive(gpus, "number of GPUs", where=str(gpus))
    if local_device_count() == 0:
        note = f"no GPU here: planned for {DEFAULT_KIND}; name the kind as in {gpus}xH100"
        return _lay_out(gpus, machine_of(DEFAULT_KIND), (note,))
    import torch

    shown = torch.cuda.get_device_name(0)
    for kind in device_kinds():
        machine = machine_of(kind)
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
    gpus = integer(match["gpus"], "number of GPUs", where=text)
    if match["kind"].strip().lower() in BY_NAME:
        return _instances(match, BY_NAME[match["kind"].strip().lower()], where=text)
    machine = machine_of(resolve(match["kind"], where=text))
    if match["nodes"] is None:
        return _lay_out(gpus, machine, _assumed(machine))
    nodes = integer(match["nodes"], "number of nodes", where=text)
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
    count = integer(match["nodes"] or match["gpus"], "number of machines", where=where)
    base = machine_of(instance.kind)
    link = Link(name=instance.link_name, bytes_per_s=instance.bytes_per_s, latency_s=instance.latency_s)
    notes = (f"{instance.names[0]}: {instance.gpus} {instance.kind} a machine, {link.name} between machines",)
    return dataclasses.replace(
        _cluster(base, count, instance.gpus, ()), inter=link, spec=f"{count}x{instance.names[0]}", assumptions=notes
    )


def _not_a_preset(text: str) -> ClusterError:
    kind = aliases().get(text.lower())
    if kind is None and text[:1].isalpha() and "x" not in text.lower()[1:-1]:
        return unknown_kind(text)
    attempt = f"say how many: 8x{text}" if kind else "8xH100"
    return ClusterError(f"not a cluster: {text!r}", legal=LEGAL, attempt=attempt)


def _assumed(machine: Machine | Cluster) -> tuple[str, ...]:
    if machine.device.is_cpu:
        return ("cpu: gloo processes of one host with modest assumed speed; fp32 or fp64",)
    return ()


def _lay_out(gpus: int, machine: Machine, notes: tuple[str, ...]) -> Cluster:
    """``gpus`` over as few nodes as hold them, all alike."""
    check_positive(gpus, "number of GPUs", where=str(gpus))
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


def _cluster(machine: Machine, nodes: int, gpus: int, notes: tuple[str, ...]) -> Cluster:
    name = machine.device.name
    check_positive(nodes * gpus, "number of GPUs", where=f"{nodes}x{gpus}x{name}")
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
