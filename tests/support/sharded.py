"""A model split over thread ranks next to the same graph in one process: losses and whole gradients of both.

Models are cast to float64, and so are the float32 casts that stand in their graphs (norms and rotary tables of
transformers), for the comparison to be about the split and not about rounding to float32 in the middle.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from autoplan.capture import Capture, capture, gather_inputs
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.layers.types import LayerGraph
from autoplan.passes.shard_tensors import ShardedGraph, shard_tensors
from autoplan.sharding import Copied, Replicate, Sharding, assemble, shard_model, take_shard
from tests.support.threads import ThreadWorld

Builder = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


@dataclass(frozen=True)
class Traced:
    """A model in float64 with its graph, layers, batch in placeholder order, and reference numbers."""

    capture: Capture
    layers: LayerGraph
    inputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Ran:
    """What the ranks found. ``counts``: one rank's collectives, by name, forward and in all."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    forward: Counter[str]
    total: Counter[str]


def cluster() -> Cluster:
    return Cluster.parse("8xA100-80GB")


def trace(build: Builder) -> Traced:
    """Capture ``build()`` in eval mode (no dropout), and run its graph in one process."""
    model, batch = build()
    model = model.double().eval()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    captured = capture(model, batch)
    widen(captured.graph_module)
    inputs = gather_inputs(captured, batch)
    loss = captured.graph_module(*inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Traced(captured, build_layers(captured), inputs, loss.detach(), gradients)


def widen(graph_module: GraphModule) -> None:
    """Replace float32 in the graph's literals by float64."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            node.args = map_aggregate(node.args, _widened)
            node.kwargs = map_aggregate(node.kwargs, _widened)
    graph_module.recompile()


def shard(
    traced: Traced, degree: int, graph_module: GraphModule | None = None, *, sequence: bool = False
) -> tuple[Sharding, ShardedGraph]:
    """The sharding and the rewritten graph: of the capture, or of what another pass made of it."""
    sharding = shard_model(traced.capture, traced.layers, degree=degree, cluster=cluster(), sequence=sequence)
    return sharding, shard_tensors(graph_module or traced.capture.graph_module, sharding)


def run(traced: Traced, sharded: ShardedGraph, parts: Sequence[Sequence[Tensor]] = ()) -> Ran:
    """Forward and backward on every rank; gradients are assembled, replicated ones checked to be alike.

    ``parts``: inputs of micro-batches whose losses and gradients add up, instead of the whole batch.
    """
    world = ThreadWorld(sharded.degree)
    # Before there are threads: while fx writes code it renames the nodes of the graph, which the modules share.
    modules = [local_module(sharded, rank) for rank in range(sharded.degree)]

    def body(rank: int) -> tuple[Tensor, dict[str, Tensor | None], Counter[str]]:
        module, local = modules[rank]
        loss = torch.stack([module(*inputs) for inputs in parts or [traced.inputs]]).sum()
        forward = Counter(world.counts[rank])
        loss.backward()
        return loss.detach(), {name: parameter.grad for name, parameter in local.items()}, forward

    results = world.run(body)
    gradients = {}
    for name in results[0][1]:
        shards = [gradient for _, by_name, _ in results if (gradient := by_name[name]) is not None]
        placement = sharded.parameters[name]
        if isinstance(placement, Replicate):
            assert all(torch.allclose(shard, shards[0], rtol=1e-12, atol=1e-14) for shard in shards), name
        if shards:
            summands = isinstance(placement, Copied)  # which a program sums over the axis once a step
            gradients[name] = torch.stack(shards).sum(0) if summands else assemble(shards, placement)
    return Ran([loss for loss, _, _ in results], gradients, results[0][2], Counter(world.counts[0]))


def local_module(sharded: ShardedGraph, rank: int) -> tuple[GraphModule, dict[str, nn.Parameter]]:
    """The graph with this rank's own parameters; tied names share one."""
    root, local = nn.Module(), {}
    made: dict[int, nn.Parameter] = {}
    for node in sharded.graph_module.graph.nodes:
        if node.op != "get_attr":
            continue
        name = str(node.target)
        value: Any = functools.reduce(getattr, name.split("."), sharded.graph_module)
        if isinstance(value, nn.Parameter):
            if id(value) not in made:
                part = take_shard(value, sharded.parameters[name], index=rank, degree=sharded.degree)
                made[id(value)] = nn.Parameter(part, requires_grad=value.requires_grad)
            value = local[name] = made[id(value)]
        _put(root, name, value)
    return GraphModule(root, sharded.graph_module.graph), local


def worst_error(found: dict[str, Tensor], wanted: dict[str, Tensor], *, floor: float = 1e-3) -> float:
    """The largest relative error of a gradient; gradients that are zero in exact arithmetic are measured against
    ``floor``."""
    return max(
        ((gradient - wanted[name]).norm() / (wanted[name].norm() + floor)).item() for name, gradient in found.items()
    )


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _put(root: nn.Module, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    elif isinstance(value, nn.Module):
        root.add_module(last, value)
    else:
        root.register_buffer(last, value)
