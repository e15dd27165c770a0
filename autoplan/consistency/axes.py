"""The table of axes: a row for each axis in use, with what follows from the strategy and the stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoplan.consistency.machines import as_made_for
from autoplan.consistency.problems import EXACT, Problem, close
from autoplan.plan import AXES_IN_LAYERS
from autoplan.schedules import sends_a_micro_batch

if TYPE_CHECKING:
    from autoplan.plan import Axis, Plan, Stage

# Outermost first, as ranks are laid out.
_ORDER = ("pipeline", "data", "context", "expert", "tensor")
_SPLITS = {
    "pipeline": "layers",
    "context": "tokens of each sample",
    "expert": "experts of each layer",
}
_STATE = (
    "the batch",
    "the batch and optimizer state",
    "the batch, optimizer state and gradients",
    "the batch, optimizer state, gradients and weights",
)
_COLLECTIVES = {
    "pipeline": "send and receive",
    "context": "all-gather of keys and values, reduce-scatter of their gradients",
    "expert": "all-to-all of routed rows",
}
_OF_DATA = (
    "all-reduce of gradients",
    "reduce-scatter of gradients, all-gather of weights",
    "reduce-scatter of gradients, all-gather of weights",
    "all-gather of weights, reduce-scatter of gradients",
)
# Since this revision each axis inside of layers counts its own collectives alone.
_EACH_ITS_OWN = 7
_OF_TENSOR = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")


def axes(plan: Plan) -> Iterator[Problem]:
    """The rows of the axes in use, each once and in order."""
    used = [name for name in _ORDER if getattr(plan.strategy, name) > 1]
    written = [axis.name for axis in plan.axes]
    if written != used:
        yield (
            "axes",
            f"{', '.join(written) or 'none'}, but the strategy's axes are {', '.join(used) or 'none'}, in this order",
        )
        return
    for index, axis in enumerate(plan.axes):
        for field, problem in _row(plan, axis):
            yield f"axes.{index}.{field}", problem


def _row(plan: Plan, axis: Axis) -> Iterator[Problem]:
    strategy = plan.strategy
    if axis.degree != (degree := getattr(strategy, axis.name)):
        yield "degree", f"{axis.degree}, but the strategy says {axis.name} = {degree}"
    splits = _SPLITS | {
        "data": _STATE[strategy.zero_stage],
        "tensor": "matrices and the sequence" if strategy.sequence_parallel else "matrices",
    }
    if axis.splits != splits[axis.name]:
        yield "splits", f"{axis.splits!r}, but the strategy splits {splits[axis.name]!r}"
    collectives = _COLLECTIVES | {"data": _OF_DATA[strategy.zero_stage]}
    if axis.name == "tensor":
        if axis.collective != "none" and not set(axis.collective.split(", ")) <= set(_OF_TENSOR):
            yield "collective", f"{axis.collective!r}, but it must be of {', '.join(_OF_TENSOR)}, or none"
    elif axis.collective != collectives[axis.name]:
        yield "collective", f"{axis.collective!r}, but the axis needs {collectives[axis.name]!r}"


def transfers(plan: Plan) -> Iterator[Problem]:
    """How often an axis communicates, how much, for how long, and over what."""
    for index, axis in enumerate(plan.axes):
        for check in (_times, _bytes, _exposed, _link):
            for field, problem in check(plan, axis):
                yield f"axes.{index}.{field}", problem


def _times(plan: Plan, axis: Axis) -> Iterator[Problem]:
    strategy, micro = plan.strategy, plan.strategy.micro_batches
    layers = sum(stage.last_layer - stage.first_layer + 1 for stage in plan.busiest)
    exact = {
        "pipeline": micro * sends_a_micro_batch(ranks=strategy.pipeline, virtual_stages=strategy.virtual_stages),
        "data": (layers, 2 * layers, (micro + 1) * layers, 3 * micro * layers)[strategy.zero_stage],
    }
    if axis.name in exact and axis.times_per_step != exact[axis.name]:
        yield "times_per_step", f"{axis.times_per_step}, but it must be {exact[axis.name]}"
    if axis.times_per_step % micro and axis.name not in exact:
        yield "times_per_step", f"{axis.times_per_step}, but each of {micro} micro-batches needs as many"
    if len({axis.times_per_step > 0, axis.bytes_per_step > 0, axis.exposed_s > 0}) > 1 and axis.name not in exact:
        yield (
            "times_per_step",
            f"{axis.times_per_step}, with {axis.bytes_per_step} bytes in {axis.exposed_s} s: all are 0, or none",
        )


def _bytes(plan: Plan, axis: Axis) -> Iterator[Problem]:
    """Of the data axis: what a ring passes on of the busiest rank's gradients and weights."""
    if axis.name != "data" or plan.strategy.expert > 1 or plan.strategy.context > 1:
        return
    strategy, stages = plan.strategy, plan.busiest
    weights, gradients = _whole(plan, stages, "weights", 3), _whole(plan, stages, "gradients", 2)
    micro, share = strategy.micro_batches, (strategy.data - 1) / strategy.data
    expected = (
        share
        * (
            2 * gradients,
            gradients + weights,
            gradients * micro + weights,
            (2 * weights + gradients) * micro,
        )[strategy.zero_stage]
    )
    if strategy.virtual_stages == 1 and not close(axis.bytes_per_step, expected):
        yield "bytes_per_step", f"{axis.bytes_per_step}, but of the stage's weights and gradients it is {expected}"


def _whole(plan: Plan, stages: tuple[Stage, ...], term: str, sharded_from: int) -> float:
    """Bytes of a state before ZeRO divides it."""
    shards = plan.strategy.data if plan.strategy.zero_stage >= sharded_from else 1
    return stages[0].memory_terms.get(term, 0.0) * shards


def _exposed(plan: Plan, axis: Axis) -> Iterator[Problem]:
    terms = plan.predicted.time_terms
    data_s = terms.get("sharded_state", 0.0) + terms.get("gradient_synchronisation", 0.0)
    others_s = sum(other.exposed_s for other in plan.axes if other.name in AXES_IN_LAYERS and other is not axis)
    most = {
        "pipeline": 2 * sum(stage.send_s for stage in plan.stages),
        "data": data_s,
    }.get(axis.name, terms.get("tensor_communication", 0.0) - others_s)
    exact = not _may_tie(plan) if axis.name == "data" else axis.name == "pipeline" or _sum_to_a_term(plan)
    if (exact and not close(axis.exposed_s, most)) or axis.exposed_s > most * (1 + EXACT) + EXACT * others_s:
        yield "exposed_s", f"{axis.exposed_s}, but of the step's terms it is {'' if exact else 'at most '}{most}"


def _sum_to_a_term(plan: Plan) -> bool:
    """Whether what shows of the axes inside of layers is the step's term to the rounding. Files before revision 7 gave
    the whole term to the tensor axis, and nothing says what two others without it were priced from."""
    strategy = plan.strategy
    return plan.first_revision >= _EACH_ITS_OWN or strategy.tensor > 1 or strategy.expert == 1


def _may_tie(plan: Plan) -> bool:
    """Whether stages may hold one parameter together, whose gradients are summed beside the data axis's."""
    held = sum(stage.parameters for stage in plan.stages) * plan.strategy.tensor * plan.strategy.expert
    return len(plan.stages) > 1 and held != plan.model.parameters


def _link(plan: Plan, axis: Axis) -> Iterator[Problem]:
    if (cluster := as_made_for(plan)) is None:
        return
    names = {link.name for part in cluster.one_kind for link in (part.intra, part.inter)}
    names |= {link.name for link in (cluster.intra, cluster.inter, *cluster.between)}
    each = {f"{name} on {group.name}" for name in names for group in cluster.groups}
    if axis.link not in names and not set(axis.link.split("; ")) <= each:
        yield "link", f"{axis.link!r}, but the links of {plan.cluster.spec} are {', '.join(sorted(names))}"
