"""Random operators that an axis splits draw numbers of each rank's own.

Requires the graph before and after :mod:`autoplan.passes.shard_tensors` or :mod:`autoplan.passes.context_parallel`,
whose nodes keep their names. Guarantees:
an operator that draws random numbers and whose result is smaller than it was, a rank's part of it, becomes a call of
:func:`autoplan.passes.operators.drawn_apart`; without it, dropout would drop the same places of every rank's part.
Operators that every rank computes whole are left to draw alike, and so are those that write in place.

Dropout of a share of the sequence (values [batch, sequence, hidden] under sequence parallelism) becomes a call of
:func:`autoplan.passes.operators.drawn_in_part`: its part of what the program without sequence parallelism draws; of a
rank's positions, on the context axis, one of :func:`autoplan.passes.context_operators.drawn_for_positions`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autoplan.passes import operators
from autoplan.passes.context_operators import drawn_for_positions, positions_attention, positions_attention_apart
from autoplan.passes.graph_facts import GraphFacts, copy_graph

NAME = "draw_apart"
_SEQUENCE = 1  # of [batch, sequence, hidden]


def draw_apart(sharded: GraphModule, original: GraphModule, *, axis: str = "tensor") -> GraphModule:
    """``sharded`` with what is split and random drawn apart."""
    graph = copy_graph(sharded)
    facts = GraphFacts(graph, sharded)
    whole = {node.name: node for node in original.graph.nodes}
    for node in facts.order:
        if facts.is_random(node) and not facts.writes(node) and _is_part(node, whole.get(node.name)):
            with graph.inserting_before(node):
                apart = _drawn(graph, node, whole[node.name], axis)
            apart.meta = dict(node.meta)
            node.replace_all_uses_with(apart)
            name = node.name
            graph.erase_node(node)
            apart.name = name
    graph.lint()
    return GraphModule(sharded, graph, class_name="ShardedGraph")


def _drawn(graph: Graph, node: Node, whole: Node, axis: str) -> Node:
    """``node``'s operator as a call that draws for a part."""
    local, full = node.meta["val"].shape, whole.meta["val"].shape
    split = [dim for dim, (part, size) in enumerate(zip(local, full, strict=True)) if part != size]
    is_dropout = node.target is torch.ops.aten.dropout.default and not node.kwargs
    args: Any
    if is_dropout and len(full) == 3 and split == [_SEQUENCE]:
        args = (node.target, axis, _SEQUENCE, *node.args)
        in_part = drawn_for_positions if axis == "context" else operators.drawn_in_part
        return graph.call_function(in_part, args)
    if node.target is positions_attention:  # of ours, which a graph's code cannot hold as an argument
        return graph.call_function(positions_attention_apart, node.args)
    args = (node.target, axis, *node.args)
    return graph.call_function(operators.drawn_apart, args, dict(node.kwargs))


def _is_part(node: Node, whole: Node | None) -> bool:
    local, full = node.meta.get("val"), whole.meta.get("val") if whole is not None else None
    return isinstance(local, Tensor) and isinstance(full, Tensor) and tuple(local.shape) != tuple(full.shape)
