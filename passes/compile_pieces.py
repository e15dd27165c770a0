"""compile_pieces: what a stage computes between its collectives, each such piece under torch.compile.

Requires the graph of one stage, with all passes applied and its parameters in place. Guarantees: what talks to other
ranks, keeps values for a later part of the backward, draws random numbers apart or runs again (every function of
:mod:`autoplan.passes`) is called as before, in the same order; the operators between two of them are one compiled
function of the values, parameters and buffers that they read. The graphs of recomputed groups are cut likewise.
Numbers are the same up to rounding, and random numbers those of eager mode.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node

NAME = "compile_pieces"
BACKEND = "inductor"
_OURS = "autoplan.passes"


def compile_pieces(module: GraphModule) -> GraphModule:
    """``module`` with its pieces compiled at their first run; parameters and buffers are its own."""
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    made: dict[str, nn.Module] = {}
    piece: list[Node] = []

    def close() -> None:
        if piece:
            name = f"piece_{len(made)}"
            made[name] = _compiled(_piece(module, piece))
            _call(graph, new, name, piece)
            piece.clear()

    for node in module.graph.nodes:
        if _is_graph(node):
            inner = _attribute(node)
            if any(_is_ours(user) for user in node.users):
                name = f"cut_{len(made)}"
                made[name] = compile_pieces(inner)
                made[name].meta.update(inner.meta)  # type: ignore[union-attr, operator]
                new[node] = graph.get_attr(name)
        elif node.op in ("placeholder", "get_attr"):
            new[node] = graph.node_copy(node)
        elif node.op == "output":
            close()
            graph.output(fx.node.map_arg(node.args[0], lambda n: new[n]))
        elif _is_ours(node):
            close()
            new[node] = graph.node_copy(node, lambda n: new[n])
        else:
            piece.append(node)
    for name, each in made.items():
        setattr(module, name, each)
    graph.lint()
    found = GraphModule(module, graph, class_name=type(module).__name__)
    for name in made:
        delattr(module, name)
    return found


def _is_ours(node: Node) -> bool:
    return node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith(_OURS)


def _is_graph(node: Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(node), GraphModule)


def _attribute(node: Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _inputs(piece: list[Node]) -> list[Node]:
    """What the piece reads from outside; graphs of higher-order operators it holds itself."""
    inside = set(piece)
    read = (n for node in piece for n in node.all_input_nodes if n not in inside and not _is_graph(n))
    return list(dict.fromkeys(read))


def _outputs(piece: list[Node]) -> list[Node]:
    inside = set(piece)
    return [node for node in piece if any(user not in inside for user in node.users)]


def _piece(module: GraphModule, piece: list[Node]) -> GraphModule:
    graph = fx.Graph()
    new = {node: graph.placeholder(node.name) for node in _inputs(piece)}
    for node in piece:
        for source in node.all_input_nodes:
            if source not in new:
                new[source] = graph.node_copy(source)
        new[node] = graph.node_copy(node, lambda n: new[n])
    graph.output(tuple(new[node] for node in _outputs(piece)))
    graph.lint()
    return GraphModule(module, graph, class_name="Piece")


def _compiled(piece: GraphModule) -> nn.Module:
    # Its own generator would draw other numbers than eager mode does.
    options: dict[str, Any] | None = {"fallback_random": True} if BACKEND == "inductor" else None
    return torch.compile(piece, backend=BACKEND, options=options)  # type: ignore[return-value]


def _call(graph: fx.Graph, new: dict[Node, Node], name: str, piece: list[Node]) -> None:
    call = graph.call_module(name, tuple(new[node] for node in _inputs(piece)))
    for index, node in enumerate(_outputs(piece)):
        new[node] = graph.create_node("call_function", operator.getitem, (call, index), name=node.name)
        new[node].meta = dict(node.meta)
