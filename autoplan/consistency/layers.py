"""Layers: their names, the stages that they stand in, and what each recomputes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoplan.consistency.problems import Problem

if TYPE_CHECKING:
    from autoplan.plan import Plan, Stage

_DIGEST = re.compile("[0-9a-f]{12}")
_SPANS = re.compile(r"\d{1,7}(-\d{1,7})?(, \d{1,7}(-\d{1,7})?)*")
# Of a text that somebody sent: longer ones, and wider spans, are of no model.
_LONGEST, _MOST = 1_000_000, 1_000_000
_POLICIES = ("none", "selective", "full")


def layers(plan: Plan) -> Iterator[Problem]:
    """Every layer has a name of its own, and is in one stage."""
    yield from _model(plan)
    yield from _stages(plan)
    for index, stage in enumerate(plan.stages):
        for what, problem in _recompute(stage):
            yield f"stages.{index}.{what}", problem


def _model(plan: Plan) -> Iterator[Problem]:
    model = plan.model
    if model.trainable_parameters > model.parameters:
        yield "model.trainable_parameters", f"{model.trainable_parameters}, of {model.parameters} parameters"
    count: Counter[str] = Counter()
    for index, name in enumerate(model.layers):
        count[name] += 1
        if not name:
            yield f"model.layers.{index}", "'' is no name of a layer"
        if count[name] > 1:
            yield f"model.layers.{index}", f"{name!r}, but another layer has this name: each has one of its own"
    for index, (source, target) in enumerate(model.edges):
        if not source < target < len(model.layers):
            yield f"model.edges.{index}", f"({source}, {target}) is no pair of layers in their order"
    if list(model.edges) != sorted(set(model.edges)):
        yield "model.edges", "each pair is there once, and in order"
    yield from _kinds(plan)


def _kinds(plan: Plan) -> Iterator[Problem]:
    kinds, count = plan.model.layer_kinds, len(plan.model.layers)
    if not kinds:
        return
    for digest in kinds:
        if not _DIGEST.fullmatch(digest):
            yield f"model.layer_kinds.{digest}", "its name is not 12 hexadecimal digits"
    if sorted(layer for spans in kinds.values() for layer in members(spans)) != list(range(count)):
        yield "model.layer_kinds", f"each of the layers 0 to {count - 1} must be there once, such as 0, 2-{count - 1}"


def members(spans: str) -> list[int]:
    """The layers of "0, 2-5"; [] for what is no such text."""
    if len(spans) > _LONGEST or not _SPANS.fullmatch(spans):
        return []
    ends = [tuple(map(int, part.split("-"))) for part in spans.split(", ")]
    return [layer for span in ends if span[-1] - span[0] < _MOST for layer in range(span[0], span[-1] + 1)]


def _stages(plan: Plan) -> Iterator[Problem]:
    count, expected = len(plan.model.layers), plan.strategy.pipeline * plan.strategy.virtual_stages
    if len(plan.stages) != expected:
        yield "stages", f"{len(plan.stages)} of them, but pipeline x virtual_stages is {expected}"
    following = 0
    for index, stage in enumerate(plan.stages):
        if stage.first_layer != following:
            yield f"stages.{index}.first_layer", f"{stage.first_layer}, but the next layer is {following}"
        if stage.last_layer < stage.first_layer:
            yield f"stages.{index}.last_layer", f"{stage.last_layer}, before its first layer {stage.first_layer}"
        following = stage.last_layer + 1
    if following != count:
        yield (
            f"stages.{len(plan.stages) - 1}.last_layer",
            f"{following - 1}, but the model's last layer is {count - 1}",
        )


def _recompute(stage: Stage) -> Iterator[Problem]:
    count = stage.last_layer - stage.first_layer + 1
    counted = {policy: number for policy, number in stage.recompute.items() if number}
    if unknown := [policy for policy in (*stage.recompute, *stage.layer_recompute) if policy not in _POLICIES]:
        yield "recompute", f"{unknown[0]!r} is not one of {', '.join(_POLICIES)}"
    if sum(counted.values()) != count:
        yield "recompute", f"counts {sum(counted.values())} layers of {count}"
    if stage.layer_recompute and Counter(stage.layer_recompute) != Counter(counted):
        yield "layer_recompute", "does not name as many layers of each policy as `recompute` counts"
