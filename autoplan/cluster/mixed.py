"""Node groups of several kinds as one cluster.

Its own device and links are the weakest of the groups', so that whatever looks at no groups plans for what holds on all
GPUs; the search gives each group its own price.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from autoplan.cluster.checks import MOST_GPUS
from autoplan.cluster.types import Cluster, Device, Link
from autoplan.errors import ClusterError

MOST_GROUPS = 6


def join(
    parts: Sequence[Cluster], *, spec: str, where: str, links: Mapping[tuple[int, int], Link] | None = None
) -> Cluster:
    """``parts``, each of one kind, as one cluster in this rank order. ``links``: those between pairs (i, j), i < j,
    that are not just the slower of the two groups' own."""
    _check(parts, where=where)
    names = _names(parts)
    groups = tuple(dataclasses.replace(part, name=name) for part, name in zip(parts, names, strict=True))
    pairs = list(itertools.combinations(range(len(groups)), 2))
    given = links or {}
    between = tuple(given.get(pair) or slower(*(groups[i].inter for i in pair)) for pair in pairs)
    width = math.gcd(*(group.gpus_per_node for group in groups))
    notes = [f"{group.name}: {note}" for group in groups for note in group.assumptions]
    notes += [
        f"between {names[i]} and {names[j]}: {link.name}, {link.bytes_per_s / 1e9:g} GB/s a GPU (the slower of theirs)"
        for (i, j), link in zip(pairs, between, strict=True)
        if (i, j) not in given
    ]
    return Cluster(
        device=weakest([group.device for group in groups]),
        nodes=sum(group.gpus for group in groups) // width,
        gpus_per_node=width,
        intra=slower(*(group.intra for group in groups)),
        inter=slower(*(group.inter for group in groups), *between),
        spec=spec,
        assumptions=tuple(dict.fromkeys(notes)),
        groups=groups,
        between=between,
    )


def weakest(devices: Sequence[Device]) -> Device:
    """A device that does what all of them can: the least of every figure, and only dtypes that all have."""
    base = min(devices, key=lambda device: device.flops("bf16") * device.gemm_efficiency)
    shared = [dtype for dtype in base.peak_flops if all(dtype in device.peak_flops for device in devices)]
    least = (
        "memory_bytes",
        "memory_bytes_per_s",
        "gemm_efficiency",
        "attention_forward_efficiency",
        "attention_backward_efficiency",
        "memory_efficiency",
    )
    changes = {name: min(getattr(device, name) for device in devices) for name in least}
    changes |= {name: max(getattr(device, name) for device in devices) for name in ("launch_s", "context_bytes")}
    name = base.name if base.is_cpu else " + ".join(dict.fromkeys(device.name for device in devices))
    return dataclasses.replace(
        base,
        name=name,
        peak_flops={dtype: min(device.peak_flops[dtype] for device in devices) for dtype in shared},
        **changes,
    )


def slower(*links: Link) -> Link:
    """The link with the least bandwidth, and the longest latency of all."""
    least = min(links, key=lambda link: link.bytes_per_s)
    return dataclasses.replace(least, latency_s=max(link.latency_s for link in links))


def _names(parts: Sequence[Cluster]) -> list[str]:
    """A name for each group: its own, or its kind's with a number where that is there twice."""
    wanted = [part.name or part.device.name for part in parts]
    counts, names, seen = Counter(wanted), [], Counter[str]()
    for name in wanted:
        seen[name] += 1
        names.append(name if counts[name] == 1 else f"{name}-{seen[name]}")
    return names


def _check(parts: Sequence[Cluster], *, where: str) -> None:
    if len(parts) > MOST_GROUPS:
        raise ClusterError(
            f"{len(parts)} groups of nodes",
            where=where,
            legal=f"up to {MOST_GROUPS}",
            attempt="join groups of one kind",
        )
    if len({part.device.is_cpu for part in parts}) > 1:
        raise ClusterError(
            "cpu processes and GPUs cannot train one model together", where=where, attempt="groups of GPUs, or of cpu"
        )
    named = [part.name for part in parts if part.name]
    if twice := next((name for name, count in Counter(named).items() if count > 1), None):
        raise ClusterError(f"two groups are called {twice!r}", where=where, legal="a `name` of its own for each group")
    if sum(part.gpus for part in parts) > MOST_GPUS:
        raise ClusterError("more GPUs than any cluster has", where=where, legal=f"1 to {MOST_GPUS}")
