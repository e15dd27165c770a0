"""What a model or a cluster differs in from the one that a plan was made for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from autoplan.consistency.layers import members
from autoplan.consistency.problems import close
from autoplan.errors import AutoplanError, PlanFileError

if TYPE_CHECKING:
    from autoplan.cluster import Cluster
    from autoplan.layers import LayerGraph
    from autoplan.plan import ClusterSummary, ModelSummary, Plan

# Bytes of a GPU's memory, which older versions of a data sheet may round otherwise.
_MEMORY = 1e-6


def other_model(plan: Plan, layers: LayerGraph) -> str:
    """What ``layers``, of a model, differ in from the model that ``plan`` was made for; "" where it is that model."""
    made_for = plan.model
    if made_for.fingerprint == layers.fingerprint:
        return ""
    names = tuple(layer.name for layer in layers.layers)
    counted = ("parameters", "trainable_parameters", "tokens_per_sample", "dtype")
    pairs = [(name.replace("_", " "), getattr(made_for, name), getattr(layers, name)) for name in counted]
    pairs.append(("layers", len(made_for.layers), len(names)))
    unlike = [f"{name} {_shown(one)} there and {_shown(other)} here" for name, one, other in pairs if one != other]
    if len(made_for.layers) == len(names):
        moved = [(one, other) for one, other in zip(made_for.layers, names, strict=True) if one != other]
        unlike += [f"layer {one} there and {other} here" for one, other in moved[:1]]
    unlike += _unlike_layers(made_for, layers)
    return "; ".join(unlike) or "operators or shapes of the same layers"


def _unlike_layers(made_for: ModelSummary, layers: LayerGraph) -> list[str]:
    """The first layer that is of another kind, where the file says kinds, and how many others are."""
    names = made_for.layers
    there = {names[layer]: digest for digest, spans in made_for.layer_kinds.items() for layer in members(spans)}
    here = [(layer.name, digest) for layer, digest in zip(layers.layers, layers.layer_digests, strict=False)]
    if not there or not here:
        return []
    # By name: a plan may list layers that branch in another order.
    unlike = [index for index, (name, digest) in enumerate(here) if there.get(name, digest) != digest]
    if not unlike:
        return ["the layers are alike, and hand other values on"] if {*there} == {name for name, _ in here} else []
    more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
    return [f"operators, shapes or dtypes of layer {unlike[0]}, {here[unlike[0]][0]}{more}"]


def other_cluster(plan: Plan, cluster: Cluster) -> str:
    """What ``cluster`` differs in from the cluster that ``plan`` was made for; "" where it is that cluster.

    Figures that a plan file does not hold (links, speeds) are compared by the cluster's fingerprint, which the oldest
    files lack.
    """
    if unlike := _unlike_machines(plan, cluster):
        return "; ".join(unlike)
    if plan.cluster.fingerprint in ("", cluster.fingerprint):
        return ""
    return "; ".join(_unlike_links(plan.cluster, cluster)) or "links or other figures of GPUs of the same name"


def other_count(plan: Plan, cluster: Cluster) -> str:
    """As :func:`other_cluster` where the kind does not matter, only how many GPUs there are."""
    return "" if plan.gpus == cluster.gpus else f"{plan.gpus} GPUs there and {cluster.gpus} here"


def not_its_cluster(plan: Plan, cluster: Cluster, unlike: str, *, attempt: str) -> PlanFileError:
    """The error for a plan that is used with ``cluster``, which is ``unlike`` the one that it was made for."""
    return PlanFileError(
        f"the plan was made for {plan.cluster.spec}, and {cluster.spec} is another cluster: {unlike}",
        legal=f"the plan's own cluster: {plan.cluster.describe()}",
        attempt=attempt,
    )


def _unlike_machines(plan: Plan, cluster: Cluster) -> list[str]:
    parts: list[Any] = list(plan.cluster.groups or (plan.cluster,))
    kinds = [" + ".join(names) for names in ([p.device for p in parts], [p.device.name for p in cluster.one_kind])]
    unlike = [f"{kinds[0]} there and {kinds[1]} here"] if kinds[0] != kinds[1] else []
    if count := other_count(plan, cluster):
        return [*unlike, count]
    nodes = [_nodes(parts), _nodes(cluster.one_kind)]
    if nodes[0] != nodes[1]:
        unlike.append(f"{nodes[0]} GPUs there and {nodes[1]} here")
    if unlike:
        return unlike
    for one, other in zip(parts, cluster.one_kind, strict=True):
        if not close(one.memory_bytes, other.device.memory_bytes, _MEMORY):
            unlike.append(f"{_gib(one.memory_bytes)} a GPU there and {_gib(other.device.memory_bytes)} a GPU here")
    return unlike


def _nodes(parts: Iterable[Any]) -> str:
    return " + ".join(f"{part.nodes} x {part.gpus_per_node}" for part in parts)


def _gib(value: float) -> str:
    return f"{value / 2**30:.1f} GiB"


def _unlike_links(made_for: ClusterSummary, cluster: Cluster) -> list[str]:
    """Links that differ, where the cluster that the plan was made for can still be read."""
    from autoplan.cluster import Cluster

    with contextlib.suppress(AutoplanError):
        there = Cluster.parse(made_for.spec)
        if there.fingerprint == made_for.fingerprint:
            named = {
                "inside a node": (there.intra, cluster.intra),
                "between nodes": (there.inter, cluster.inter),
            }
            return [
                f"links {where} {one.bytes_per_s / 1e9:,.5g} GB/s there and {other.bytes_per_s / 1e9:,.5g} here"
                for where, (one, other) in named.items()
                if one.bytes_per_s != other.bytes_per_s
            ]
    return []


def _shown(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
