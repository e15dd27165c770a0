"""The cluster: which stage each GPU holds, and what travels on each link in a step.

Ranks stand as :class:`autoplan.plan.Strategy` says: tensor innermost, then context, then data, then pipeline; experts
inside the data axis. An axis is between nodes where the members of one of its groups stand on several.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.explain.text import seconds, size
from autoplan.plan import Axis, Plan, Stage
from autoplan.report.model_graph import colour

WIDTH = 1000.0
_COLUMNS = 4
_MOST_NODES = 8
_MOST_GPUS = 16  # drawn of a node
_SIDE, _STEP = 24.0, 27.0
# Groups repeat from node to node: of more ranks the first are looked at.
_MOST_RANKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    x: float
    y: float
    colour: str
    label: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    x: float
    y: float
    width: float
    height: float
    label: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one axis sends over a link in a step. ``share`` is of the busiest, in bytes."""

    axis: str
    link: str
    where: str
    bytes_per_step: float
    times: int
    exposed_s: float
    share: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Nodes as they are drawn, ``hidden`` more; the traffic inside nodes and between them."""

    nodes: tuple[Node, ...]
    hidden: int
    height: float
    side: float
    inside: tuple[Traffic, ...]
    between: tuple[Traffic, ...]


def picture(plan: Plan) -> Picture:
    """The cluster of ``plan``."""
    nodes_of_all = sum(part.nodes for part in plan.cluster.groups) or plan.cluster.nodes
    drawn = list(itertools.islice(_machines(plan), _MOST_NODES if nodes_of_all <= _MOST_NODES else _MOST_NODES - 1))
    columns = min(_COLUMNS, len(drawn))
    most = min(_MOST_GPUS, max(gpus for _, _, gpus, _ in drawn))
    across = max(1, min(most, int((WIDTH / columns - 32) // _STEP)))
    height = 34 + -(-most // across) * _STEP
    nodes = tuple(
        _node(plan, machine, at, columns=columns, across=across, height=height) for at, machine in enumerate(drawn)
    )
    rows = -(-len(drawn) // columns)
    traffic = tuple(_traffic(plan))
    return Picture(
        nodes=nodes,
        hidden=nodes_of_all - len(drawn),
        height=rows * (height + 12),
        side=_SIDE,
        inside=tuple(part for part in traffic if part.where.startswith("inside")),
        between=tuple(part for part in traffic if not part.where.startswith("inside")),
    )


def _machines(plan: Plan) -> Iterator[tuple[str, int, int, int]]:
    """(label, first rank, GPUs, those of them that are used) of every node."""
    cluster = plan.cluster
    groups = [(f"{g.name} ", g.nodes, g.gpus_per_node, g.first_rank, g.gpus_used) for g in cluster.groups]
    for name, nodes, gpus, first, used in groups or [("", cluster.nodes, cluster.gpus_per_node, 0, plan.gpus_used)]:
        for node in range(nodes):
            yield f"{name}node {node}", first + node * gpus, gpus, max(0, min(gpus, used - node * gpus))


def _node(plan: Plan, machine: tuple[str, int, int, int], at: int, *, columns: int, across: int, height: float) -> Node:
    label, first, gpus, used = machine
    wide = WIDTH / columns
    x, y = at % columns * wide, at // columns * (height + 12)
    shown = min(gpus, _MOST_GPUS)
    more = f", the first {shown} of {gpus} GPUs" if shown < gpus else ""
    return Node(
        x=x,
        y=y,
        width=wide - 12,
        height=height,
        label=label + more,
        gpus=tuple(
            _gpu(plan, first + i, i < used, x + 10 + i % across * _STEP, y + 26 + i // across * _STEP)
            for i in range(shown)
        ),
    )


def _gpu(plan: Plan, rank: int, used: bool, x: float, y: float) -> Gpu:
    if not used:
        return Gpu(x=x, y=y, colour="idle", label="", title="a GPU that the plan does not use")
    strategy = plan.strategy
    place = rank // (plan.gpus_used // strategy.pipeline)
    held = ", ".join(str(stage) for stage in range(place, len(plan.stages), strategy.pipeline))
    inner = rank % (plan.gpus_used // strategy.pipeline)
    parts = [f"stage {held}"]
    for name, stride in strides(plan).items():
        degree = getattr(strategy, name)
        if degree > 1 and name in ("data", "context", "tensor"):
            parts.append(f"{name} {inner // stride % degree}")
    return Gpu(x=x, y=y, colour=colour(place), label=str(rank), title=f"rank {rank}: {', '.join(parts)}")


def strides(plan: Plan) -> dict[str, int]:
    """How many ranks apart the neighbours of each axis' groups stand."""
    strategy = plan.strategy
    context = strategy.tensor
    data = context * strategy.context
    return {
        "tensor": 1,
        "context": context,
        "data": data,
        "expert": data,
        "pipeline": data * strategy.data,
    }


def crosses_nodes(plan: Plan, axis: str, ranks: range | None = None) -> bool:
    """Whether a group of ``axis`` has members on several nodes; of ``ranks`` alone where they are given."""
    stride, width = strides(plan).get(axis, 1), getattr(plan.strategy, axis, 1) * strides(plan).get(axis, 1)
    looked_at = (ranks or range(plan.gpus_used))[:_MOST_RANKS]
    firsts = (rank for rank in looked_at if rank % width < stride)
    return any(_node_of(plan, rank) != _node_of(plan, rank + width - stride) for rank in firsts)


def _node_of(plan: Plan, rank: int) -> tuple[int, int]:
    """The group and the node in it where ``rank`` stands."""
    for index, group in enumerate(plan.cluster.groups):
        if 0 <= rank - group.first_rank < group.gpus_used:
            return index, (rank - group.first_rank) // group.gpus_per_node
    return -1, rank // plan.cluster.gpus_per_node


def _traffic(plan: Plan) -> Iterator[Traffic]:
    most = max((axis.bytes_per_step for axis in plan.axes), default=0.0)
    for axis in plan.axes:
        used = [group.name for group in plan.cluster.groups if group.gpus_used]
        if axis.name in ("data", "tensor") and len({axis.link_on(name) for name in used}) > 1:
            yield from (_on_group(plan, axis, name, most) for name in used)
        else:
            yield _of(axis, crosses_nodes(plan, axis.name), axis.bytes_per_step / most if most else 0.0)


def _on_group(plan: Plan, axis: Axis, group: str, most: float) -> Traffic:
    """What ``axis`` sends on the GPUs of one kind: of the data axis by the state of their stage with most of it, of
    the tensor axis by their layers, of which each is taken to send as much."""
    held, longest = _held(plan, group), max(plan.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    share, whole = max(_load(stage, axis) for stage in held), _load(longest, axis)
    of_group = dataclasses.replace(
        axis,
        link=axis.link_on(group),
        bytes_per_step=axis.bytes_per_step * share / whole if whole else 0.0,
        times_per_step=round(axis.times_per_step * max(map(_layers, held)) / _layers(longest)),
        exposed_s=max(_exposed_s(plan, stage, axis) for stage in held),
    )
    crosses = _crosses_on(plan, axis.name, group)
    return _of(of_group, crosses, of_group.bytes_per_step / most if most else 0.0, on=group)


def _held(plan: Plan, group: str) -> list[Stage]:
    """The stages that GPUs of ``group`` run."""
    return [stage for stage in plan.stages if group in stage.device.split(" + ")] or list(plan.stages)


def _layers(stage: Stage) -> int:
    return stage.last_layer - stage.first_layer + 1


def _load(stage: Stage, axis: Axis) -> float:
    """What the bytes of an axis grow with from stage to stage."""
    return float(stage.parameters if axis.name == "data" else _layers(stage))


def _exposed_s(plan: Plan, stage: Stage, axis: Axis) -> float:
    """Of a step, what shows of the axis on ``stage``."""
    term = "sharded_state" if axis.name == "data" else "tensor_communication"
    each = stage.forward_terms.get(term, 0.0) + stage.backward_terms.get(term, 0.0)
    return plan.strategy.micro_batches * each + (stage.synchronise_s if axis.name == "data" else 0.0)


def _crosses_on(plan: Plan, axis: str, group: str) -> bool:
    """Whether a group of ``axis`` among the GPUs of one kind has members on several nodes."""
    found = next(each for each in plan.cluster.groups if each.name == group)
    return crosses_nodes(plan, axis, range(found.first_rank, found.first_rank + found.gpus_used))


def _of(axis: Axis, crosses: bool, share: float, *, on: str = "") -> Traffic:
    where = "between nodes" if crosses else "inside a node"
    where += f" of {on}" if on else ""
    return Traffic(
        axis=axis.name,
        link=axis.link,
        where=where,
        bytes_per_step=axis.bytes_per_step,
        times=axis.times_per_step,
        exposed_s=axis.exposed_s,
        share=share,
        title=(
            f"{axis.name}: {axis.collective}, {size(axis.bytes_per_step)} a step from each GPU over {axis.link}, "
            f"{where}; {seconds(axis.exposed_s)} of the step shows"
        ),
    )
