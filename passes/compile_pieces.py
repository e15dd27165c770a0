"""compile_pieces: what a stage computes between its collectives, each such piece under torch.compile.

Requires the graph of one stage, with all passes applied and its parameters in place. Guarantees: what talks to other
ranks, keeps values for a later part of the backward, draws random numbers apart or runs again (every function of
:mod:`autoplan.passes`) is called as before, in the same order; the operators between two of them are one compiled
function of the values, parameters and buffers that they read. The graphs of recomputed groups are cut likewise.
Numbers are the same up to rounding, and random numbers those of eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node

from autoplan.passes import regions

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
        if regions.is_graph(node):
            inner = regions.attribute(node)
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


def _piece(module: GraphModule, piece: list[Node]) -> GraphModule:
    graph, outputs = regions.body(piece)
    graph.output(outputs)
    graph.lint()
    return GraphModule(module, graph, class_name="Piece")


def _compiled(piece: GraphModule) -> nn.Module:
    # Its own generator would draw other numbers than eager mode does.
    options: dict[str, Any] | None = {"fallback_random": True} if BACKEND == "inductor" else None
    return torch.compile(piece, backend=BACKEND, options=options)  # type: ignore[return-value]


def _call(graph: fx.Graph, new: dict[Node, Node], name: str, piece: list[Node]) -> None:
    call = graph.call_module(name, tuple(new[node] for node in regions.inputs(piece)))
    regions.unpack(graph, call, regions.outputs(piece), new)
