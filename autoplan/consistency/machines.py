"""GPUs: how many there are and are used, what the cluster's name means, which kind runs which stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autoplan.consistency.problems import Problem, close
from autoplan.cost_models.precision import product_dtype
from autoplan.errors import AutoplanError

if TYPE_CHECKING:
    from autoplan.cluster import Cluster
    from autoplan.plan import Plan, Stage

# Data sheets are corrected by less, and no two kinds of one name are nearer (A100 of 40 and of 80 GB).
_CORRECTED = 0.1
_LONGEST_SPEC = 200


def machines(plan: Plan) -> Iterator[Problem]:
    """The cluster, and the plan's place on it."""
    yield from _counts(plan)
    yield from _spec(plan)
    yield from _groups(plan)
    yield from _ranks(plan)


def _counts(plan: Plan) -> Iterator[Problem]:
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


def _groups(plan: Plan) -> Iterator[Problem]:
    groups = plan.cluster.groups
    names = [group.name for group in groups]
    if not groups:
        named = next((index for index, stage in enumerate(plan.stages) if stage.device), None)
        if named is not None:
            yield f"stages.{named}.device", f"{plan.stages[named].device!r}, but the cluster has no groups"
        return
    if len(groups) == 1:
        yield "cluster.groups", "one group, but a cluster of one kind has none"
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
        if group.gpus_used > group.gpus:
            yield f"cluster.groups.{index}.gpus_used", f"{group.gpus_used}, more than there is"
    most = max(group.memory_bytes for group in groups)
    if plan.cluster.memory_bytes != most:
        yield "cluster.memory_bytes", f"{plan.cluster.memory_bytes}, but the largest GPU has {most}"
    kinds = dict.fromkeys(group.device for group in groups)
    if set(plan.cluster.device.split(" + ")) != set(kinds) and plan.cluster.device not in kinds:
        yield "cluster.device", f"{plan.cluster.device!r}, but the groups are of {' + '.join(kinds)}"


def _ranks(plan: Plan) -> Iterator[Problem]:
    """Ranks follow the stages: the GPUs of a stage are those of the groups that it names."""
    groups = plan.cluster.groups
    following = 0
    for index, group in sorted(enumerate(groups), key=lambda pair: (pair[1].first_rank, pair[1].gpus_used)):
        expected = following if group.gpus_used else 0
        if group.first_rank != expected:
            yield f"cluster.groups.{index}.first_rank", f"{group.first_rank}, but it must be {expected}"
        following += group.gpus_used
    width = plan.gpus_used // plan.strategy.pipeline
    for index, stage in enumerate(plan.stages if groups else ()):
        first = index % plan.strategy.pipeline * width
        running = {
            group.name
            for group in groups
            if group.gpus_used and group.first_rank < first + width and first < group.first_rank + group.gpus_used
        }
        if set(stage.device.split(" + ")) != running:
            ranks = f"ranks {first} to {first + width - 1}"
            yield f"stages.{index}.device", f"{stage.device!r}, but its {ranks} are {' + '.join(sorted(running))}"


def _spec(plan: Plan) -> Iterator[Problem]:
    """The cluster's name against what is said of it.

    Of kinds that have a data sheet only: a cluster file may be changed or gone, and a plan is read without it. That a
    fingerprint is another than today's is no contradiction: data sheets are corrected, and older plans stay readable.
    """
    summary = plan.cluster
    if summary.fingerprint and not re.fullmatch("[0-9a-f]{64}", summary.fingerprint):
        yield "cluster.fingerprint", "not 64 hexadecimal digits"
    named = preset(summary.spec)
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
        if not close(part.memory_bytes, memory, *(() if exact else (_CORRECTED,))):
            yield f"{where}.memory_bytes", f"{part.memory_bytes}, but a GPU of `{summary.spec}` has {memory}"


def preset(spec: str) -> Cluster | None:
    """The cluster of a SPEC text that means the same everywhere; None for files and counts of this machine's GPUs."""
    text = spec.strip()
    if len(text) > _LONGEST_SPEC or "/" in text or text.endswith(".toml") or text.lstrip("+-").isdigit():
        return None
    from autoplan.cluster import Cluster

    try:
        return Cluster.parse(text)
    except AutoplanError:  # a file, or a kind, that is not known here
        return None


def as_made_for(plan: Plan) -> Cluster | None:
    """The plan's cluster with every figure that it was made for, where its name still means that."""
    found = preset(plan.cluster.spec)
    return found if found is not None and found.fingerprint == plan.cluster.fingerprint else None


def peak_flops(plan: Plan, stage: Stage) -> float:
    """FLOP/s that a GPU of ``stage`` can compute, of the weakest where they are of several kinds; 0 if not known."""
    groups = [group.peak_flops for group in plan.cluster.groups if group.name in stage.device.split(" + ")]
    return min(groups, default=plan.cluster.peak_flops)


def peaks(plan: Plan) -> Iterator[Problem]:
    """What GPUs compute at most is said of all kinds, and is the data sheets' where the cluster's name means those."""
    groups = plan.cluster.groups
    if groups and plan.cluster.peak_flops:
        yield "cluster.peak_flops", f"{plan.cluster.peak_flops}, but its groups say their own: it must be 0"
    if not groups and not plan.cluster.peak_flops:
        yield "cluster.peak_flops", "0, which only older files say"
    for index, group in enumerate(groups):
        if not group.peak_flops:
            yield f"cluster.groups.{index}.peak_flops", "0, which only older files say"
    if (named := as_made_for(plan)) is None:
        return
    said: list[Any] = list(groups or (plan.cluster,))
    for index, (part, there) in enumerate(zip(said, named.one_kind, strict=True)):
        peak = there.device.flops(product_dtype(plan.precision))
        if not close(part.peak_flops, peak):
            where = f"cluster.groups.{index}" if groups else "cluster"
            written = f"{part.peak_flops}, but a GPU of `{plan.cluster.spec}` computes {peak} in {plan.precision}"
            yield f"{where}.peak_flops", written
