"""Faults to plant in rewritten graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Node


def copied(graph_module: GraphModule) -> GraphModule:
    """The same program in nodes of its own."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, val_map={}))
    for new, old in zip(graph.nodes, graph_module.graph.nodes, strict=True):
        new.meta = copy.copy(old.meta)
    return GraphModule(graph_module, graph)


def calls(graph_module: GraphModule, *functions: Callable[..., Any]) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.target in functions]


def without(node: Node) -> None:
    """Its readers read its first argument instead."""
    source = node.args[0]
    assert isinstance(source, Node)
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def each_dropped(graph_module: GraphModule, *functions: Callable[..., Any]) -> Iterator[GraphModule]:
    """``graph_module`` without one call of ``functions``, once for each such call."""
    for index in range(len(calls(graph_module, *functions))):
        broken = copied(graph_module)
        without(calls(broken, *functions)[index])
        yield broken
