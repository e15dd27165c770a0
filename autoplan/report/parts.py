"""What is inside a forward or a backward: its computation and the collectives that it waits for, as the plan has them.

The plan holds what they take on each stage in one micro-batch; inside an action they are spread evenly over the stage's
layers. What a stage computes and what it waits for are exact in their sums, and not in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.cost_models.schedule import Event
from autoplan.explain.text import seconds
from autoplan.plan import AXES_IN_LAYERS, Axis, Plan, Stage

# Terms that are waited for, and the axes that they come from.
COLLECTIVES = {"sharded_state": ("data",), "tensor_communication": AXES_IN_LAYERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """``term`` of the plan's step from ``start_s`` to ``end_s``, in the action's ``piece``, from 0."""

    term: str
    piece: int
    start_s: float
    end_s: float


def terms(stage: Stage, kind: str) -> dict[str, float]:
    """Seconds by term of an action of ``kind`` (F, B, I, W) on ``stage``; empty where the plan does not say. Weights'
    gradients alone (W) wait for nothing, and leave the rest to the gradients of inputs (I)."""
    if kind == "F":
        return stage.forward_terms
    if kind == "W" or not stage.backward_terms:
        return {}
    computed = stage.backward_terms.get("backward", 0.0)
    return stage.backward_terms | {"backward": computed - (stage.weight_gradients_s if kind == "I" else 0.0)}


def inside(event: Event, stage: Stage, *, pieces: int) -> Iterator[Part]:
    """What an action waits for and what it computes again, in ``pieces`` that are alike: weights are gathered first,
    then a layer is computed again, and a layer ends with its collectives."""
    every = terms(stage, event.action.kind)
    whole = sum(every.values())
    if not whole:
        return
    scale = (event.end_s - event.start_s) / whole / pieces
    before = [name for name in ("sharded_state", "recompute") if every.get(name)]
    for piece in range(pieces):
        at = event.start_s + (event.end_s - event.start_s) * piece / pieces
        for name in before:
            yield Part(term=name, piece=piece, start_s=at, end_s=at + every[name] * scale)
            at += every[name] * scale
        if every.get("tensor_communication"):
            end = event.start_s + (event.end_s - event.start_s) * (piece + 1) / pieces
            lasts_s = every["tensor_communication"] * scale
            yield Part(term="tensor_communication", piece=piece, start_s=end - lasts_s, end_s=end)


def hidden_s(plan: Plan, event: Event) -> float:
    """Seconds of the data axis's transfers beside ``event``: gradients, summed while others are made."""
    strategy, stage = plan.strategy, plan.stages[event.action.stage]
    makes_gradients = ("B", "W") if stage.weight_gradients_s else ("B", "I")
    if event.action.kind not in makes_gradients:
        return 0.0
    if strategy.zero_stage >= 2:  # every micro-batch's
        return min(stage.hidden_s / strategy.micro_batches, event.end_s - event.start_s)
    if event.action.micro_batch < strategy.micro_batches - 1:
        return 0.0
    return min(stage.hidden_s, event.end_s - event.start_s)


def axes_of(plan: Plan, term: str) -> list[Axis]:
    """The axes that wait for each other in ``term``."""
    return [axis for axis in plan.axes if axis.name in COLLECTIVES.get(term, ())]


def named(plan: Plan, term: str) -> str:
    """A term in words, collectives with the axes that they run over."""
    return "; ".join(f"{axis.name}: {axis.collective}" for axis in axes_of(plan, term)) or term.replace("_", " ")


def said(plan: Plan, event: Event) -> str:
    """What an action is made of, in a few words; "" for nothing but computation, or where the plan does not say."""
    every = terms(plan.stages[event.action.stage], event.action.kind)
    shown = [f"{name.replace('_', ' ')} {seconds(value)}" for name, value in every.items() if value]
    return ", ".join(shown) if len(shown) > 1 else ""
