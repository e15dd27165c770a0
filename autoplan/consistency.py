"""Whether a plan's parts agree with each other: what a schema cannot say.

A plan file is edited, merged and passed on. One whose stages do not cover the layers, or whose degrees do not make its
GPUs, must not be drawn, compared or trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from autoplan.errors import AutoplanError, PlanFileError

if TYPE_CHECKING:
    from autoplan.cluster import Cluster
    from autoplan.layers import LayerGraph
    from autoplan.plan import ClusterSummary, Plan, Stage

# Sums of floats of a file, and figures that a person may have rounded (tokens/s).
_SUM, _ROUNDED = 1e-6, 1e-3
# No figure of a plan comes near: bytes of the largest clusters are about 1e18.
_LARGEST = 1e30
# Data sheets are corrected by less, and no two kinds of one name are nearer (A100 of 40 and of 80 GB).
_CORRECTED = 0.1
_LONGEST_SPEC = 200
_ZERO_STAGES = (0, 1, 2, 3)
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
_POLICIES = ("none", "selective", "full")
_STATUSES = ("optimal", "feasible")
_DEGREES = ("data", "tensor", "pipeline", "virtual_stages", "context", "expert", "micro_batch_size", "micro_batches")
# Differences, which rounding may take a little below zero.
_GAPS = ("gap", "simulated_gap")

# Control characters, of which terminals make commands.
_STEERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Problem = tuple[str, str]


def first_problem(plan: Plan) -> Problem | None:
    """The first field that disagrees with the others, and how; None for a plan that is whole."""
    for check in (_texts, _numbers, _strategy, _machines, _spec, _layers, _stages, _memory, _time, _names):
        for problem in check(plan):
            return problem
    return None


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
    return "; ".join(unlike) or "operators or shapes of the same layers"


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
        if not _close(one.memory_bytes, other.device.memory_bytes, _SUM):
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
                f"links {where} {one.bytes_per_s / 1e9:g} GB/s there and {other.bytes_per_s / 1e9:g} here"
                for where, (one, other) in named.items()
                if one.bytes_per_s != other.bytes_per_s
            ]
    return []


def _shown(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _texts(plan: Plan) -> Iterator[Problem]:
    """Names in a file that somebody sent are printed: none may colour, move or clear a terminal."""
    for path, value in _leaves(plan, ""):
        if _STEERS.search(path) or (isinstance(value, str) and _STEERS.search(value)):
            yield path.encode("unicode_escape").decode(), f"{value!r} has characters that steer a terminal"


def _numbers(plan: Plan) -> Iterator[Problem]:
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    for path, value in _leaves({name: value for name, value in fields.items() if name != "forced"}, ""):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = -_SUM if path.rsplit(".", 1)[-1] in _GAPS else 0
        if not math.isfinite(value) or not least <= value <= _LARGEST:
            yield path, f"{value} is not a number of 0 or more"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tuple):
        items = dict(enumerate(value)).items()
    else:
        yield path, value
        return
    for name, part in items:
        yield from _leaves(part, f"{path}.{name}" if path else str(name))


def _strategy(plan: Plan) -> Iterator[Problem]:
    named = [("strategy", plan.strategy)]
    named += [(f"alternatives.{i}.strategy", other.strategy) for i, other in enumerate(plan.alternatives)]
    named += [(f"other_answers.{i}.strategy", o.strategy) for i, o in enumerate(plan.other_answers) if o.strategy]
    named += [(f"crossings.{i}.strategy", c.strategy) for i, c in enumerate(plan.crossings) if c.strategy]
    for where, strategy in named:
        for name in _DEGREES:
            if getattr(strategy, name) < 1:
                yield f"{where}.{name}", f"{getattr(strategy, name)} is not 1 or more"
        if strategy.zero_stage not in _ZERO_STAGES:
            yield f"{where}.zero_stage", f"{strategy.zero_stage} is not one of {_ZERO_STAGES}"
        if strategy.schedule not in _SCHEDULES:
            yield f"{where}.schedule", f"{strategy.schedule!r} is not one of {', '.join(_SCHEDULES)}"
        if strategy.data * strategy.context % strategy.expert:
            axes = "data" if strategy.context == 1 else "data x context"
            yield f"{where}.expert", f"{strategy.expert} does not divide {axes} = {strategy.data * strategy.context}"
    if plan.certificate.status not in _STATUSES:
        yield "certificate.status", f"{plan.certificate.status!r} is not one of {', '.join(_STATUSES)}"


def _machines(plan: Plan) -> Iterator[Problem]:
    cluster, strategy = plan.cluster, plan.strategy
    if cluster.nodes * cluster.gpus_per_node != plan.gpus:
        yield "gpus", f"{plan.gpus}, but the cluster has {cluster.nodes} x {cluster.gpus_per_node}"
    if strategy.gpus != plan.gpus_used:
        yield "gpus_used", f"{plan.gpus_used}, but the strategy's degrees multiply to {strategy.gpus}"
    if not 1 <= plan.gpus_used <= plan.gpus:
        yield "gpus_used", f"{plan.gpus_used} of {plan.gpus} GPUs"
    if strategy.global_batch != plan.global_batch:
        yield (
            "global_batch",
            f"{plan.global_batch}, but data x micro-batch size x micro-batches: {strategy.global_batch}",
        )
    if cluster.memory_bytes <= 0:
        yield "cluster.memory_bytes", "0"
    yield from _groups(plan)
    if plan.model.trainable_parameters > plan.model.parameters:
        yield "model.trainable_parameters", f"{plan.model.trainable_parameters}, of {plan.model.parameters} parameters"


def _spec(plan: Plan) -> Iterator[Problem]:
    """The cluster's name against what is said of it.

    Of kinds that have a data sheet only: a cluster file may be changed or gone, and a plan is read without it. That a
    fingerprint is another than today's is no contradiction: data sheets are corrected, and older plans stay readable.
    """
    summary = plan.cluster
    if summary.fingerprint and not re.fullmatch("[0-9a-f]{64}", summary.fingerprint):
        yield "cluster.fingerprint", "not 64 hexadecimal digits"
    named = _preset(summary.spec)
    if named is None:
        return
    exact = summary.fingerprint == named.fingerprint
    said: list[Any] = list(summary.groups or (summary,))
    if len(said) != len(named.one_kind):
        yield "cluster.groups", f"{len(said)} kinds of GPUs, but `{summary.spec}` has {len(named.one_kind)}"
        return
    for index, (part, there) in enumerate(zip(said, named.one_kind, strict=True)):
        where = f"cluster.groups.{index}" if summary.groups else "cluster"
        fields = ("device", "nodes", "gpus_per_node")
        for name, means in zip(fields, (there.device.name, there.nodes, there.gpus_per_node), strict=True):
            if (found := getattr(part, name)) != means:
                yield f"{where}.{name}", f"{found!r}, but `{summary.spec}` means {means!r}"
        memory = there.device.memory_bytes
        if not _close(part.memory_bytes, memory, _SUM if exact else _CORRECTED):
            yield f"{where}.memory_bytes", f"{part.memory_bytes}, but a GPU of `{summary.spec}` has {memory}"
    if summary.groups and summary.memory_bytes != (most := max(group.memory_bytes for group in summary.groups)):
        yield "cluster.memory_bytes", f"{summary.memory_bytes}, but the largest GPU has {most}"


def _preset(spec: str) -> Cluster | None:
    """The cluster of a SPEC text that means the same everywhere; None for files and counts of this machine's GPUs."""
    text = spec.strip()
    if len(text) > _LONGEST_SPEC or "/" in text or text.endswith(".toml") or text.lstrip("+-").isdigit():
        return None
    from autoplan.cluster import Cluster

    try:
        return Cluster.parse(text)
    except AutoplanError:  # a file, or a kind, that is not known here
        return None


def _groups(plan: Plan) -> Iterator[Problem]:
    groups = plan.cluster.groups
    names = [group.name for group in groups]
    if not groups:
        named = next((index for index, stage in enumerate(plan.stages) if stage.device), None)
        if named is not None:
            yield f"stages.{named}.device", f"{plan.stages[named].device!r}, but the cluster has no groups"
        return
    if len(set(names)) < len(names):
        yield "cluster.groups", "two of one name"
    for index, stage in enumerate(plan.stages):
        if not stage.device or set(stage.device.split(" + ")) - set(names):
            yield f"stages.{index}.device", f"{stage.device!r} is not one of {', '.join(names)}"
    for field, counted, total in (
        ("nodes", sum(group.gpus for group in groups), plan.gpus),
        ("gpus_used", sum(group.gpus_used for group in groups), plan.gpus_used),
    ):
        if counted != total:
            yield f"cluster.groups.0.{field}", f"all groups have {counted} GPUs, and the plan {total}"
    for index, group in enumerate(groups):
        if group.gpus_used > group.gpus or group.memory_bytes > plan.cluster.memory_bytes:
            field = "gpus_used" if group.gpus_used > group.gpus else "memory_bytes"
            yield f"cluster.groups.{index}.{field}", f"{getattr(group, field)}, more than there is"


def _layers(plan: Plan) -> Iterator[Problem]:
    layers, expected = len(plan.model.layers), plan.strategy.pipeline * plan.strategy.virtual_stages
    if len(plan.stages) != expected:
        yield "stages", f"{len(plan.stages)} of them, but pipeline x virtual_stages is {expected}"
    following = 0
    for index, stage in enumerate(plan.stages):
        if stage.first_layer != following:
            yield f"stages.{index}.first_layer", f"{stage.first_layer}, but the next layer is {following}"
        if stage.last_layer < stage.first_layer:
            yield f"stages.{index}.last_layer", f"{stage.last_layer}, before its first layer {stage.first_layer}"
        following = stage.last_layer + 1
    for index, (source, target) in enumerate(plan.model.edges):
        if not source < target < layers:
            yield f"model.edges.{index}", f"({source}, {target}) is no pair of layers in their order"
    if following != layers:
        yield (
            f"stages.{len(plan.stages) - 1}.last_layer",
            f"{following - 1}, but the model's last layer is {layers - 1}",
        )


def _stages(plan: Plan) -> Iterator[Problem]:
    for index, stage in enumerate(plan.stages):
        for what, problem in _recompute(stage):
            yield f"stages.{index}.{what}", problem


def _recompute(stage: Stage) -> Iterator[Problem]:
    layers = stage.last_layer - stage.first_layer + 1
    counted = {policy: number for policy, number in stage.recompute.items() if number}
    if unknown := [policy for policy in (*stage.recompute, *stage.layer_recompute) if policy not in _POLICIES]:
        yield "recompute", f"{unknown[0]!r} is not one of {', '.join(_POLICIES)}"
    if sum(counted.values()) != layers:
        yield "recompute", f"counts {sum(counted.values())} layers of {layers}"
    if stage.layer_recompute and Counter(stage.layer_recompute) != Counter(counted):
        yield "layer_recompute", "does not name as many layers of each policy as `recompute` counts"


def _memory(plan: Plan) -> Iterator[Problem]:
    for index, stage in enumerate(plan.stages):
        terms = sum(stage.memory_terms.values())
        if not _close(terms, stage.peak_memory_bytes, _SUM):
            yield f"stages.{index}.peak_memory_bytes", f"{stage.peak_memory_bytes}, but its terms sum to {terms}"
        if stage.peak_memory_bytes > (most := plan.cluster.memory_of(stage)) * (1 + _SUM):
            yield f"stages.{index}.peak_memory_bytes", f"more than the GPU's {most}"
    peak = max(stage.peak_memory_bytes for stage in plan.stages)
    if not _close(peak, plan.predicted.peak_memory_bytes, _SUM):
        yield "predicted.peak_memory_bytes", f"{plan.predicted.peak_memory_bytes}, but the fullest stage's is {peak}"


def _time(plan: Plan) -> Iterator[Problem]:
    predicted, strategy = plan.predicted, plan.strategy
    step = predicted.step_time_s
    if step <= 0:
        yield "predicted.step_time_s", f"{step}"
    terms = sum(predicted.time_terms.values())
    if not _close(terms, step, _SUM):
        yield "predicted.step_time_s", f"{step}, but its terms sum to {terms}"
    for index, stage in enumerate(plan.stages):
        busy = strategy.micro_batches * (stage.forward_s + stage.backward_s) + stage.synchronise_s + stage.optimizer_s
        if busy > step * (1 + _SUM):
            yield "predicted.step_time_s", f"{step}, but stage {index} works for {busy}"
        for name in ("forward", "backward"):
            parts, whole = getattr(stage, f"{name}_terms"), getattr(stage, f"{name}_s")
            if parts and not _close(sum(parts.values()), whole, _SUM):
                yield f"stages.{index}.{name}_s", f"{whole}, but its terms sum to {sum(parts.values())}"
    if (least := plan.certificate.lower_bound_s) > step * (1 + _SUM):
        yield "certificate.lower_bound_s", f"{least}, more than the plan's own step of {step}"
    tokens = plan.global_batch * plan.model.tokens_per_sample / step
    if not _close(tokens, predicted.tokens_per_s, _ROUNDED):
        yield "predicted.tokens_per_s", f"{predicted.tokens_per_s}, but batch, tokens and step time make {tokens}"
    flops = sum(stage.flops for stage in plan.stages) * strategy.micro_batches * strategy.data
    if flops and not _close(flops, told := predicted.model_tflops_per_gpu * 1e12 * plan.gpus_used * step, _ROUNDED):
        yield "predicted.model_tflops_per_gpu", f"makes {told} FLOPs a step, but the stages' make {flops}"
    for name, limit in (("bubble_fraction", 1.0), ("exposed_communication_s", step)):
        if getattr(predicted, name) > limit * (1 + _SUM):
            yield f"predicted.{name}", f"{getattr(predicted, name)}, more than {limit}"


def _names(plan: Plan) -> Iterator[Problem]:
    for index, axis in enumerate(plan.axes):
        degree = getattr(plan.strategy, axis.name, None) if axis.name in _DEGREES else None
        if degree is not None and degree != axis.degree:
            yield f"axes.{index}.degree", f"{axis.degree}, but the strategy says {axis.name} = {degree}"
    for index, other in enumerate(plan.alternatives):
        if other.step_time_s == 0:
            yield f"alternatives.{index}.step_time_s", "0"


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(one, other)
