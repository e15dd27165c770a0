"""Storage shared between values of the graph: views, and what writes into them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch.fx import GraphModule, Node


class Memory:
    """Which nodes share storage, and which write into it."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
        self.root: dict[Node, Node] = {}
        self.members: dict[Node, list[Node]] = {}
        self.writers: dict[Node, list[Node]] = {}
        for node in graph_module.graph.nodes:
            source = _aliased(node)
            root = self.root[source] if source is not None else node
            self.root[node] = root
            self.members.setdefault(root, []).append(node)
            for operand in written(node):
                self.writers.setdefault(self.root[operand], []).append(node)

    def needs(self, node: Node) -> list[Node]:
        """What a node's value depends on: its operands, and earlier writes into what they share storage with."""
        found = list(node.all_input_nodes)
        for operand in node.all_input_nodes:
            for writer in self.writers.get(self.root[operand], ()):
                if self.position[writer] < self.position[node]:
                    found.append(writer)
        return found

    def ancestors(self, nodes: Iterable[Node]) -> set[Node]:
        """Every node that ``nodes`` depend on, themselves included."""
        seen: set[Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(self.needs(node))
        return seen


def writes(node: Node) -> bool:
    """Whether the operator changes an operand in place."""
    return next(written(node), None) is not None


def written(node: Node) -> Iterator[Node]:
    """The operands that an operator changes: in place, or as its ``out=``."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Node):
                    yield item


def _aliased(node: Node) -> Node | None:
    """The operand whose memory the operator's result is."""
    if node.op != "call_function":
        return None
    changed = next(written(node), None)
    if changed is not None:
        return changed
    if not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target is operator.getitem:
        return node.args[0]
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.arguments:
        return None
    return node.args[0] if node.target._schema.arguments[0].alias_info is not None else None
