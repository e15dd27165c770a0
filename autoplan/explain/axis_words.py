"""An axis in words: when in a step it communicates, and among which GPUs."""

from __future__ import annotations

from autoplan.plan import Axis, Coordinates, Plan

_OF_STATE = {
    0: "gradients beside the last backward",
    1: "gradients beside the last backward, weights after the optimizer",
    2: "gradients beside every backward, weights after the optimizer",
    3: "weights before each layer's forward and backward, gradients beside every backward",
}
_WHEN = {
    "pipeline": "after a stage's forward and backward, in every micro-batch",
    "tensor": "inside each layer, forward and backward, in every micro-batch",
    "context": "around each attention, forward and backward, in every micro-batch",
    "expert": "around each mixture of experts, forward and backward, in every micro-batch",
}
_MOST_NAMED = 4


def when(plan: Plan, axis: Axis) -> str:
    """When the axis communicates."""
    if axis.name == "data":
        return _OF_STATE.get(plan.strategy.zero_stage, "")
    again = axis.name != "pipeline" and any(stage.recompute.get("full") for stage in plan.stages)
    return _WHEN.get(axis.name, "") + (", and again in layers that are recomputed" if again else "")


def members(plan: Plan, axis: Axis) -> str:
    """The ranks of the first group of the axis, such as ``GPUs 0, 4, 8, 12``; "" for an axis that is none of the mesh
    (experts live on data ranks)."""
    strategy = plan.strategy
    if axis.name not in Coordinates._fields:
        return ""
    degree = getattr(strategy, axis.name)
    at = Coordinates(0, 0, 0, 0)
    ranks = [strategy.rank(at._replace(**{axis.name: i})) for i in range(degree)]
    if ranks == list(range(degree)):
        named = f"0-{degree - 1}"
    elif degree > _MOST_NAMED:
        named = f"{', '.join(map(str, ranks[:3]))}, ... {ranks[-1]}"
    else:
        named = ", ".join(map(str, ranks))
    return f"GPUs {named}"
