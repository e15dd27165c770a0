"""Faults to plant in what is kept between steps and run again: sharded state, recomputed layers, tied copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autoplan.passes import operators, recompute
from autoplan.runtime import data_parallel, gathered
from tests.verification.faulty import LAYER, WEIGHT, Patch

# ------------------------------------------------------------------------------------------------------ sharded state


def _of_the_layer(sync: Any, slices: Any) -> bool:
    return any(sync._names[id(own)].startswith(f"{LAYER}.") for own in slices)


def shares_in_another_order(patch: Patch) -> None:
    """ZeRO-3: what ranks hold of a layer is joined last rank first."""
    original = gathered.Gathered._all_gather

    def turned(self: Any, layer: Any) -> list[Tensor]:
        wholes = original(self, layer)
        if _of_the_layer(self, layer.slices):
            for whole in wholes:
                whole.copy_(whole.reshape(-1).roll(whole.numel() // 2).view(whole.shape))
        return wholes

    patch.setattr(gathered.Gathered, "_all_gather", turned)


def stale_gather(patch: Patch) -> None:
    """ZeRO-3: a layer is used in every later step as it was gathered in the first."""
    original, known = gathered.Gathered.gather, {}

    def first_values(self: Any, shapes: Any, slices: Any) -> list[Tensor]:
        wholes = original(self, shapes, slices)
        if _of_the_layer(self, slices):
            kept = known.setdefault(id(slices[0]), [whole.clone() for whole in wholes])
            for whole, value in zip(wholes, kept, strict=True):
                whole.copy_(value)
        return wholes

    patch.setattr(gathered.Gathered, "gather", first_values)


def gradient_not_scattered(patch: Patch) -> None:
    """ZeRO-3: a rank keeps its slice of its own gradient of a layer, and nobody adds the other's."""
    original = gathered.Gathered.scatter

    def own(self: Any, slices: Any, gradients: Any) -> None:
        if not _of_the_layer(self, slices):
            original(self, slices, gradients)
            return
        for piece, gradient in zip(slices, gradients, strict=True):
            if gradient is not None:
                name, mine = self._names[id(piece)], self._slice(gradient)
                self._gradients[name] = self._gradients.get(name, 0) + mine

    patch.setattr(gathered.Gathered, "scatter", own)


def norm_of_own_slices(patch: Patch) -> None:
    """ZeRO-1: gradients are clipped by the norm of the first rank's slices."""
    patch.setattr(data_parallel.Sharded, "counts_here", lambda self, name: self.mesh.at.data == 0)


def update_not_shared(patch: Patch) -> None:
    """ZeRO-1: after an update each rank goes on with its own slice of a weight and the others' as they were."""
    original = data_parallel.Sharded.refresh

    def partly(self: Any) -> None:
        before = self.working[WEIGHT].detach().clone()
        original(self)
        with torch.no_grad():
            mine, flat = self.extent(WEIGHT), before.view(-1)
            flat[mine.start : mine.stop] = self.working[WEIGHT].view(-1)[mine.start : mine.stop]
            self.working[WEIGHT].copy_(before)

    patch.setattr(data_parallel.Sharded, "refresh", partly)


# ----------------------------------------------------------------------------------------- recompute, chunks, copies


def recomputed_from_other_inputs(patch: Patch) -> None:
    """A layer that runs again in the backward is given its input a second time changed."""
    original = operators.recomputed

    def changed(module: GraphModule, *inputs: Any) -> Any:
        if not any(name.startswith(LAYER.replace(".", "_")) for name in map(str, module.graph.nodes)):
            return original(module, *inputs)
        calls: list[int] = []
        forward = module.forward

        class Again(nn.Module):
            meta = module.meta

            def forward(self, *given: Any) -> Any:
                calls.append(1)
                again = len(calls) > 1
                return forward(*(x * 1.01 if again and isinstance(x, Tensor) and x.dim() == 3 else x for x in given))

        return original(Again(), *inputs)

    patch.setattr(operators, "recomputed", changed)


def lost_gradient_of_a_recomputed_layer(patch: Patch) -> None:
    """What a recomputed layer hands back to the layer before it is dropped."""
    original = operators.recomputed

    def cut(module: GraphModule, *inputs: Any) -> Any:
        if not any(name.startswith(LAYER.replace(".", "_")) for name in map(str, module.graph.nodes)):
            return original(module, *inputs)
        return original(module, *(x.detach() if isinstance(x, Tensor) and x.dim() == 3 else x for x in inputs))

    patch.setattr(operators, "recomputed", cut)


def tied_copies_updated_apart(patch: Patch) -> None:
    """The stage of the head updates its copy of the embedding by its own gradient alone."""
    original = data_parallel.GradientSync._sum_tied

    def apart(self: Any) -> None:
        own = {name: self.parameters[name].grad.clone() for name in self.tied}
        original(self)
        if self.mesh.at.pipeline > 0:
            for name, gradient in own.items():
                self.parameters[name].grad = gradient

    patch.setattr(data_parallel.GradientSync, "_sum_tied", apart)


def statistics_updated_twice(patch: Patch) -> None:
    """A BatchNorm stands in what runs again in the backward, and counts its micro-batch a second time."""
    original = recompute._repeatable

    def anything(facts: Any, node: Node, *others: Any) -> bool:
        return "batch_norm" in str(node.target) or original(facts, node, *others)

    patch.setattr(recompute, "_repeatable", anything)
