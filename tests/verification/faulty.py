"""Compiler faults to plant: each breaks one thing that a pass or the runtime does.

A fault is a function of pytest's ``monkeypatch``. Ranks are forked, so what is patched here is patched there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autoplan.passes import context_operators, expert_operators, operators
from autoplan.passes.shard_tensors import ShardedGraph
from autoplan.passes.split_stages import StageGraph
from autoplan.runtime import build, data_parallel, interpreter, rank_part, state
from autoplan.sharding import Placement, Shard

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
LAYER = "h.1"
WEIGHT = "h.1.c_fc.weight"


# ------------------------------------------------------------------------------------------------ the tensor axis


def _rewritten(patch: Patch, edit: Callable[[ShardedGraph], ShardedGraph]) -> None:
    """The tensor pass, with its result edited after its own linter has passed it."""
    original = build.shard_tensors
    patch.setattr(build, "shard_tensors", lambda *a, **k: edit(original(*a, **k)))


def _of_layer(module: GraphModule, target: Any) -> Node:
    def inside(node: Node) -> bool:
        paths = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
        return any(path == LAYER or path.startswith(f"{LAYER}.") for path in paths)

    return next(node for node in module.graph.nodes if node.target is target and inside(node))


def _without(target: Any) -> Fault:
    def edit(sharded: ShardedGraph) -> ShardedGraph:
        victim = _of_layer(sharded.graph_module, target)
        victim.replace_all_uses_with(victim.all_input_nodes[0])
        sharded.graph_module.graph.erase_node(victim)
        sharded.graph_module.recompile()
        return sharded

    return lambda patch: _rewritten(patch, edit)


dropped_all_reduce = _without(operators.reduce_from_axis)
dropped_gradient_all_reduce = _without(operators.copy_to_axis)


def gathered_gradient_not_summed(patch: Patch) -> None:
    """Under sequence parallelism a rank keeps its slice of its own summand."""

    def edit(sharded: ShardedGraph) -> ShardedGraph:
        _of_layer(sharded.graph_module, operators.gather_for_axis).target = operators.gather_from_axis
        sharded.graph_module.recompile()
        return sharded

    _rewritten(patch, edit)


def forgotten_norm_gradients(patch: Patch) -> None:
    """Under sequence parallelism ranks keep their summands of a norm's gradient."""
    original = rank_part.apart

    def forgetting(working: Any, mesh: Any, tied: Any, summands: Any, *others: Any, **more: Any) -> Any:
        kept = tuple(name for name in summands if not name.startswith(f"{LAYER}."))
        return original(working, mesh, tied, kept, *others, **more)

    patch.setattr(rank_part, "apart", forgetting)


def doubled_all_reduce(patch: Patch) -> None:
    def edit(sharded: ShardedGraph) -> ShardedGraph:
        victim = _of_layer(sharded.graph_module, operators.reduce_from_axis)
        with sharded.graph_module.graph.inserting_after(victim):
            again = sharded.graph_module.graph.call_function(operators.reduce_from_axis, (victim, "tensor"))
        again.meta = dict(victim.meta)
        victim.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
        sharded.origin[again.name] = sharded.origin[victim.name]
        sharded.graph_module.recompile()
        return sharded

    _rewritten(patch, edit)


def wrong_head_order(patch: Patch) -> None:
    """A packed qkv cut in equal slices: rank 0 gets all of q, and no v."""

    def edit(sharded: ShardedGraph) -> ShardedGraph:
        placements: dict[str, Placement] = dict(sharded.parameters)
        for name, placement in placements.items():
            if name.startswith(f"{LAYER}.c_attn") and isinstance(placement, Shard):
                placements[name] = Shard(placement.dim)
        return dataclasses.replace(sharded, parameters=placements)

    _rewritten(patch, edit)


def swapped_shards(patch: Patch) -> None:
    original = build.local_parameters

    def swapped(capture: Any, graphs: Any, ownership: Any, *, tensor_rank: int, degree: int, **rest: Any) -> Any:
        own = original(capture, graphs, ownership, tensor_rank=tensor_rank, degree=degree, **rest)
        other = original(capture, graphs, ownership, tensor_rank=degree - 1 - tensor_rank, degree=degree, **rest)
        return {**own, WEIGHT: other[WEIGHT]}

    patch.setattr(rank_part, "local_parameters", swapped)


# ----------------------------------------------------------------------------------------------- loss and data axis


def _totals(change: Callable[[Any, Any], Any]) -> Fault:
    def plant(patch: Patch) -> None:
        original = rank_part.RankPart._with_totals
        patch.setattr(rank_part.RankPart, "_with_totals", lambda self, parts: change(self, original(self, parts)))

    return plant


def _scaled(parts: Any, factor: float) -> Any:
    def scale(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: t * factor if name.startswith("loss_total") else t for name, t in inputs.items()}

    return [dataclasses.replace(part, inputs=scale(part.inputs)) for part in parts]


missing_loss_scale = _totals(lambda _, parts: _scaled(parts, 1 / len(parts)))


def wrong_micro_batch_weight(patch: Patch) -> None:
    """Each micro-batch divides by a share of the batch instead of by what the whole batch counts."""
    original = rank_part.RankPart._with_totals

    def each(self: Any, parts: Any) -> Any:
        return [_scaled(original(self, [part]), float(len(parts)))[0] for part in parts]

    patch.setattr(rank_part.RankPart, "_with_totals", each)


def totals_of_one_rank(patch: Patch) -> None:
    patch.setattr("autoplan.runtime.collectives.Mesh.sum_over_data", lambda self, tensor: tensor)


def averaged_data_gradient(patch: Patch) -> None:
    original = data_parallel.Replicated._collect

    def averaged(self: Any) -> None:
        original(self)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= self.mesh.strategy.data

    patch.setattr(data_parallel.Replicated, "_collect", averaged)


def unsynchronised_parameter(patch: Patch) -> None:
    original = data_parallel.fill_buckets

    def fewer(parameters: Mapping[str, nn.Parameter], **rest: Any) -> Any:
        return original({name: p for name, p in parameters.items() if name != WEIGHT}, **rest)

    patch.setattr(data_parallel, "fill_buckets", fewer)


def same_rows_on_every_rank(patch: Patch) -> None:
    original = rank_part.rows_of_rank
    patch.setattr(rank_part, "rows_of_rank", lambda batch, strategy, data_rank: original(batch, strategy, 0))


def forgotten_micro_batches(patch: Patch) -> None:
    original = data_parallel.GradientSync.before_backward

    def forgetting(self: Any, *names: frozenset[str]) -> None:
        original(self, *names)
        if WEIGHT in self.working:
            self.working[WEIGHT].grad = None

    patch.setattr(data_parallel.GradientSync, "before_backward", forgetting)


# -------------------------------------------------------------------------------------------------------- pipeline


def doubled_stage_gradient(patch: Patch) -> None:
    original = interpreter.RankInterpreter._receive_gradients

    def doubled(self: Any, *arguments: Any) -> list[Tensor | None]:
        return [None if gradient is None else 2 * gradient for gradient in original(self, *arguments)]

    patch.setattr(interpreter.RankInterpreter, "_receive_gradients", doubled)


def swapped_stage_values(patch: Patch) -> None:
    """The first stage sends its two results under each other's names."""
    original = build.split_stages

    def swapped(*arguments: Any) -> tuple[StageGraph, ...]:
        first, *rest = original(*arguments)
        output = first.graph_module.graph.output_node()
        a, b, *others = output.args[0]
        output.args = ((b, a, *others),)
        first.graph_module.recompile()
        return (first, *rest)

    patch.setattr(build, "split_stages", swapped)


def missing_tied_sum(patch: Patch) -> None:
    patch.setattr(data_parallel.GradientSync, "_sum_tied", lambda self: None)


def untied_copy(patch: Patch) -> None:
    """A tied name gets a parameter of its own, which no optimizer sees."""
    original = build.install

    def untied(stage: StageGraph, ownership: Any, parameters: Any, device: Any) -> StageGraph:
        installed = original(stage, ownership, parameters, device)
        for name in stage.parameters:
            if ownership.canonical[name] != name:
                copied = nn.Parameter(parameters[ownership.canonical[name]].detach().clone())
                build._set(installed.graph_module, name, copied)
        return installed

    patch.setattr(rank_part, "install", untied)


def stale_buffer(patch: Patch) -> None:
    """Statistics are gathered from where nobody updated them."""
    original = state.FullTensors.__init__

    def remember(self: Any, *arguments: Any, buffers: Mapping[str, Tensor], **rest: Any) -> None:
        original(self, *arguments, buffers={n: b.clone() for n, b in buffers.items()}, **rest)

    patch.setattr(state.FullTensors, "__init__", remember)


def norm_counted_twice(patch: Patch) -> None:
    patch.setattr(rank_part.RankPart, "_counts", lambda self, name: True)


def gradient_of_zeros(patch: Patch) -> None:
    """A parameter that got no gradient gets zeros: AdamW then decays it."""
    original = data_parallel.GradientSync.finish_step

    def filled(self: Any) -> None:
        original(self)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    patch.setattr(data_parallel.GradientSync, "finish_step", filled)


def lost_weight_gradients(patch: Patch) -> None:
    """Backwards in two parts, of which the first micro-batch's second never runs on the first stage."""
    original = interpreter.RankInterpreter._weight_gradients

    def losing(self: Any, action: Any, run: Any, last: Any) -> None:
        if (action.stage, action.micro_batch) != (0, 0):
            original(self, action, run, last)

    patch.setattr(interpreter.RankInterpreter, "_weight_gradients", losing)


def labels_of_another_micro_batch(patch: Patch) -> None:
    original = rank_part.RankPart._with_totals

    def shifted(self: Any, parts: Any) -> Any:
        parts = original(self, parts)
        labels = [part.inputs["labels"] for part in parts]
        if len({value.shape for value in labels}) > 1:
            return parts
        moved = zip(parts, [*labels[1:], labels[0]], strict=True)
        return [dataclasses.replace(part, inputs={**part.inputs, "labels": other}) for part, other in moved]

    patch.setattr(rank_part.RankPart, "_with_totals", shifted)


def norm_of_own_stage(patch: Patch) -> None:
    """Gradients are clipped by the norm of what a stage holds."""
    original = rank_part.RankPart.gradient_norm

    def own(self: Any, norm_type: float) -> Tensor:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(type(self.mesh), "sum_over_world", lambda mesh, tensor: tensor)
            return original(self, norm_type)

    patch.setattr(rank_part.RankPart, "gradient_norm", own)


# ------------------------------------------------------------------------------------------------ the context axis


def wrong_position_share(patch: Patch) -> None:
    """A rank is dealt two neighbouring pieces of the sequence, where it should get one of each end."""

    def neighbouring(x: Tensor, rank: int, ranks: int, dim: int, *_: Any) -> Tensor:
        return x.chunk(ranks, dim)[rank]

    patch.setattr(context_operators, "_deal", neighbouring)


def keys_in_order_of_ranks(patch: Patch) -> None:
    """What ranks gather is joined rank by rank, and not as the sequence goes."""
    patch.setattr(context_operators, "_collect", lambda shards, dim, *_: torch.cat(shards, dim))


def missing_reduce_scatter(patch: Patch) -> None:
    """A rank keeps its slice of its own gradient of the keys and values, and nobody adds the others'."""

    def alone(ctx: Any, gradient: Tensor) -> Any:
        rank, ranks = ctx.communicator.rank(ctx.axis), ctx.communicator.size(ctx.axis)
        return context_operators._deal(gradient, rank, ranks, *ctx.layout), None, None, None, None

    patch.setattr(context_operators._AllPositions, "backward", staticmethod(alone))


# ------------------------------------------------------------------------------------------------- the expert axis


def rows_returned_in_another_order(patch: Patch) -> None:
    """Results of experts come back as they lay at the experts."""

    def back(x: Tensor, route: Tensor, communicator: Any, axis: str) -> Tensor:
        sent, received = route.sum(-1).tolist()
        return communicator.all_to_all(x.contiguous(), received, sent, axis)

    patch.setattr(expert_operators, "_back", back)


def dropped_count(patch: Patch) -> None:
    """One row that a rank got is not counted as its expert's: the next expert takes it for its own."""
    original = expert_operators.route_rows

    def uncounted(offsets: Tensor, axis: str) -> tuple[Tensor, Tensor]:
        ends, route = original(offsets, axis)
        return torch.cat([(ends[:1] - 1).clamp(min=0), ends[1:]]), route

    patch.setattr(expert_operators, "route_rows", uncounted)


def experts_of_another_rank(patch: Patch) -> None:
    """Each rank holds the experts whose rows go to the other."""
    from autoplan.runtime.collectives import Mesh

    turned = property(lambda self: self.expert_degree - 1 - self.at.data % self.expert_degree)
    patch.setattr(Mesh, "expert_index", turned)
