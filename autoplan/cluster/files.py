"""Cluster files: a kind in nodes, or groups of nodes of several kinds, in TOML.

One kind::

    device = "H100"             # a kind, or a table: base = "H100", and any field of a device file
    nodes = 4
    gpus_per_node = 8
    [inter]                     # both links optional; a field left out keeps the kind's default
    bytes_per_s = 25e9          # one GPU, one direction; or gbit_per_s = 200
    latency_s = 5e-6
    oversubscription = 2        # leaf switches have half as many links up as down: what all GPUs together get

Several kinds, ranks in the order of the groups::

    [[groups]]
    name = "new"                # optional: the kind's name
    device = "H100"             # and nodes, gpus_per_node, intra, inter as above
    nodes = 2
    [[groups]]
    device = "A100-80GB"
    nodes = 2
    [between]                   # any two groups; left out: the slower of their links between nodes
    gbit_per_s = 100
    [[links]]                   # pairs that differ
    groups = ["new", "A100-80GB-SXM"]
    gbit_per_s = 200
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoplan.cluster.checks import check_positive, figure, integer, load_toml, refuse_unknown, repr_path, text, values
from autoplan.cluster.hardware import Machine, device_kinds, machine_of, resolve
from autoplan.cluster.mixed import join, slower
from autoplan.cluster.types import Cluster, Device, Link
from autoplan.errors import ClusterError

_ONE_KIND = ("device", "nodes", "gpus_per_node", "intra", "inter")
_MIXED = ("groups", "between", "links")
_LINK_FIELDS = ("name", "bytes_per_s", "gbit_per_s", "latency_s", "peers", "oversubscription")
_BETWEEN_FIELDS = ("name", "bytes_per_s", "gbit_per_s", "latency_s", "oversubscription")
_YOURS = " (your figures)"
_DTYPES = ("bf16", "fp16", "tf32", "fp32", "fp64", "fp8", "fp4", "int8")
_GROUPS = '[[groups]], then device = "H100", nodes = 2, gpus_per_node = 8, a line each'


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes; raises :class:`ClusterError` naming file and field."""
    data = load_toml(path)
    where = repr_path(path)
    if not any(key in data for key in _MIXED):
        return dataclasses.replace(_one_kind(data, _ONE_KIND, where=where), spec=where)
    refuse_unknown(data, _MIXED if "device" not in data else (*_MIXED, *_ONE_KIND), where=where)
    if "device" in data:
        raise ClusterError("one kind and groups of kinds", where=where, legal="either `device` or `groups`")
    described = data.get("groups")
    if not isinstance(described, list) or not described or not all(isinstance(each, dict) for each in described):
        raise ClusterError("field `groups` is a list of tables", where=where, attempt=_GROUPS)
    parts = [_group(each, where=f"{where}, group {index}") for index, each in enumerate(described)]
    if len(parts) == 1:
        _refuse_links(data, where=where)
        return dataclasses.replace(parts[0], spec=where)
    plain = join(parts, spec=where, where=where)  # names the groups
    named = [
        dataclasses.replace(part, spec=f"{group.name} of {where}")
        for part, group in zip(parts, plain.groups, strict=True)
    ]
    return join(named, spec=where, where=where, links=_links(data, plain, where=where))


def _group(data: dict[str, Any], *, where: str) -> Cluster:
    cluster = _one_kind(data, ("name", *_ONE_KIND), where=where)
    return dataclasses.replace(cluster, name=text(data, "name", where)) if "name" in data else cluster


def _one_kind(data: dict[str, Any], known: tuple[str, ...], *, where: str) -> Cluster:
    refuse_unknown(data, known, where=where)
    if "device" not in data:
        raise ClusterError(
            "field `device` is missing", where=where, legal=", ".join(device_kinds()), attempt='device = "H100"'
        )
    machine = _machine(data["device"], where=where)
    nodes = integer(data.get("nodes", 1), "field `nodes`", where=where)
    each = integer(data.get("gpus_per_node", machine.node_gpus), "field `gpus_per_node`", where=where)
    check_positive(nodes * each, "fields `nodes` x `gpus_per_node`", where=where)
    links = {"intra": machine.intra, "inter": machine.inter}
    return Cluster(
        device=machine.device,
        nodes=nodes,
        gpus_per_node=each,
        intra=_link(data.get("intra", {}), machine.intra, field="intra", where=where),
        inter=_link(data.get("inter", {}), machine.inter, field="inter", where=where),
        spec=where,
        assumptions=tuple(
            f"{field}: {link.name}, {link.bytes_per_s / 1e9:g} GB/s a GPU (default of the {machine.device.name})"
            for field, link in links.items()
            if field not in data and (field == "intra" or nodes > 1)
        ),
    )


def _links(data: Mapping[str, Any], cluster: Cluster, *, where: str) -> dict[tuple[int, int], Link]:
    """The links between groups that the file gives, by pair."""
    pairs = list(itertools.combinations(range(len(cluster.groups)), 2))
    usual = {pair: slower(*(cluster.groups[i].inter for i in pair)) for pair in pairs}
    given: dict[tuple[int, int], Link] = {}
    if "between" in data:
        for pair, link in usual.items():
            given[pair] = _link(data["between"], link, field="between", where=where, known=_BETWEEN_FIELDS)
    described = data.get("links", [])
    if not isinstance(described, list) or not all(isinstance(each, dict) for each in described):
        raise ClusterError("field `links` is a list of tables", where=where, attempt='[[links]], groups = ["a", "b"]')
    seen: set[tuple[int, int]] = set()
    for index, each in enumerate(described):
        place = f"{where}, link {index}"
        pair = _pair(each, cluster, where=place)
        if pair in seen:
            raise ClusterError("these two groups have a link already", where=place, attempt="remove one of them")
        seen.add(pair)
        rest = {key: value for key, value in each.items() if key != "groups"}
        given[pair] = _link(rest, usual[pair], field="links", where=place, known=_BETWEEN_FIELDS)
    return given


def _pair(data: Mapping[str, Any], cluster: Cluster, *, where: str) -> tuple[int, int]:
    names = [group.name for group in cluster.groups]
    named = data.get("groups")
    legal = ", ".join(names)
    if not isinstance(named, list) or len(named) != 2 or not all(isinstance(name, str) for name in named):
        raise ClusterError(
            "field `groups` of a link names two groups", where=where, legal=legal, attempt=f"groups = {names[:2]}"
        )
    found = [next((i for i, name in enumerate(names) if name.lower() == each.strip().lower()), None) for each in named]
    for each, index in zip(named, found, strict=True):
        if index is None:
            raise ClusterError(f"no group is called {each!r}", where=where, legal=legal)
    one, other = sorted(index for index in found if index is not None)
    if one == other:
        raise ClusterError(
            f"a link from {names[one]} to itself",
            where=where,
            legal="two different groups",
            attempt="the group's own `inter`",
        )
    return one, other


def _refuse_links(data: Mapping[str, Any], *, where: str) -> None:
    for field in ("between", "links"):
        if field in data:
            raise ClusterError(
                f"field `{field}` joins groups, and there is one", where=where, attempt="the group's own `inter`"
            )


def _machine(described: object, *, where: str) -> Machine:
    if isinstance(described, str):
        return machine_of(resolve(described, where=f"{where}, field `device`"))
    if not isinstance(described, dict) or not isinstance(described.get("base"), str):
        raise ClusterError(
            "field `device` is a kind, or a table with `base`", where=where, attempt='device = "H100", or base = "H100"'
        )
    machine = machine_of(resolve(described["base"], where=f"{where}, field `device.base`"))
    changes = {key: value for key, value in values(described).items() if key != "base"}
    legal = tuple(field.name for field in dataclasses.fields(Device))
    refuse_unknown(changes, legal, where=where, inside="device.")
    place = f"{where}, `device`"
    for key in changes:
        if key == "peak_flops":
            changes[key] = machine.device.peak_flops | _peaks(changes[key], where=place)
        elif key == "name":
            changes[key] = _device_name(changes, machine, where=place)
        else:
            changes[key] = figure(changes, key, place)
    if "sms" in changes:
        changes["sms"] = int(changes["sms"])
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, **changes))


def _device_name(changes: Mapping[str, Any], machine: Machine, *, where: str) -> str:
    """The name tells cpu processes from GPUs, so neither may take the other's."""
    name = text(changes, "name", where)
    if (name == "cpu") != machine.device.is_cpu:
        legal = "cpu, and a group's own `name` to tell them apart" if machine.device.is_cpu else "any name but cpu"
        raise ClusterError(f"field `name` of a {machine.device.name} cannot be {name!r}", where=where, legal=legal)
    return name


def _peaks(described: object, *, where: str) -> dict[str, float]:
    if not isinstance(described, dict):
        raise ClusterError("field `peak_flops` is a table", where=where, attempt="peak_flops = { bf16 = 200e12 }")
    refuse_unknown(described, _DTYPES, where=where, inside="peak_flops.")
    return {dtype: figure(described, dtype, f"{where}, `peak_flops`") for dtype in described}


def _link(described: object, default: Link, *, field: str, where: str, known: tuple[str, ...] = _LINK_FIELDS) -> Link:
    if not isinstance(described, dict):
        raise ClusterError(f"field `{field}` is a table", where=where, attempt=f"[{field}] and bytes_per_s = 25e9")
    refuse_unknown(described, known, where=where, inside=f"{field}.")
    place = f"{where}, `{field}`"
    if "bytes_per_s" in described and "gbit_per_s" in described:
        raise ClusterError("the bandwidth is given twice", where=place, legal="`bytes_per_s` or `gbit_per_s`")
    changes: dict[str, Any] = {key: figure(described, key, place) for key in described if key != "name"}
    if "gbit_per_s" in changes:
        changes["bytes_per_s"] = changes.pop("gbit_per_s") * 1e9 / 8
    if "oversubscription" in changes:
        changes["bytes_per_s"] = changes.get("bytes_per_s", default.bytes_per_s) / changes.pop("oversubscription")
    if "peers" in changes:
        changes["peers"] = int(changes["peers"])
    if "name" in described:
        changes["name"] = text(described, "name", place)
    elif changes:
        changes["name"] = _own_name(described, default)
    return dataclasses.replace(default, **changes)


def _own_name(described: Mapping[str, Any], default: Link) -> str:
    """Of a link with figures of the file's own: a bandwidth of its own makes it another link than ``default``, whatever
    that is called; a latency or an oversubscription of its own leaves it what it is."""
    name = default.name.removesuffix(_YOURS)
    if "gbit_per_s" in described:
        name = f"{float(described['gbit_per_s']):g} Gb/s a GPU"
    elif "bytes_per_s" in described:
        name = f"{float(described['bytes_per_s']) / 1e9:g} GB/s a GPU"
    if "oversubscription" in described:
        name += f", oversubscribed {float(described['oversubscription']):g} times"
    return f"{name}{_YOURS}"
