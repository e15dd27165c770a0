"""Regions: runs of a graph's nodes that become a graph of their own, called in their place."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch.fx import GraphModule, Node


def inputs(region: list[Node]) -> list[Node]:
    """What the region reads from outside, in order of first use; graphs of higher-order operators it holds itself."""
    inside = set(region)
    found = [n for node in region for n in node.all_input_nodes if n not in inside and not is_graph(n)]
    return list(dict.fromkeys(found))


def outputs(region: list[Node]) -> list[Node]:
    """What is read outside the region."""
    inside = set(region)
    return [node for node in region if any(user not in inside for user in node.users)]


def body(region: list[Node]) -> tuple[fx.Graph, tuple[Node, ...]]:
    """The region as a graph of its inputs, which still lacks its output, and its outputs there."""
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    for node in inputs(region):
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in region:
        for source in node.all_input_nodes:
            if source not in new:
                new[source] = graph.node_copy(source)
        new[node] = graph.node_copy(node, lambda n: new[n])
    return graph, tuple(new[node] for node in outputs(region))


def unpack(graph: fx.Graph, call: Node, values: list[Node], new: dict[Node, Node]) -> None:
    """``call`` gives a tuple of ``values``: each under its own name, noted in ``new``."""
    for index, node in enumerate(values):
        new[node] = graph.create_node("call_function", operator.getitem, (call, index), name=node.name)
        new[node].meta = dict(node.meta)


def is_graph(node: Node) -> bool:
    """Whether a node reads the graph of a higher-order operator."""
    return node.op == "get_attr" and isinstance(attribute(node), GraphModule)


def attribute(node: Node) -> Any:
    """What a get_attr node reads."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)
