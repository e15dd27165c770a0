"""Zero bubble: backwards in two parts, the gradients of inputs first and those of weights later (Qi et al. 2024).

Requires the graph of one stage. Guarantees: products with a trainable parameter (linear layers) are those of
:mod:`autoplan.passes.weight_gradients`, under the nodes' own names; all other nodes stay. Other parameters (norms,
embeddings, biases) get their gradients in the first part.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule

from autoplan.passes import weight_gradients
from autoplan.passes.graph_facts import copy_graph
from autoplan.passes.split_stages import StageGraph

NAME = "split_backward"

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStage:
    """The rewritten stage, and the names of parameters (as its graph reads them) that get gradients in the backward's
    first part and in its second; a name may be in both."""

    stage: StageGraph
    first: frozenset[str]
    second: frozenset[str]


# Product -> (what runs in its place, position of the weight among its arguments).
_PRODUCTS: dict[Any, tuple[Any, int]] = {
    aten.linear.default: (weight_gradients.linear_in_parts, 1),
    aten.addmm.default: (weight_gradients.addmm_in_parts, 2),
    aten.mm.default: (weight_gradients.mm_in_parts, 1),
}
# What may stand between a parameter and its product: autograd keeps no tensor for their backward.
_CARRIED = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.alias.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
}


def split_backward(stage: StageGraph) -> SplitStage:
    """``stage`` with its products of inputs and trainable parameters in two parts."""
    module = stage.graph_module
    graph = copy_graph(module)
    carriers: set[tuple[fx.Node, fx.Node]] = set()  # (node that carries a weight, what reads it from there)
    second: set[str] = set()
    for node in list(graph.nodes):
        found = _weight_of(node, module)
        if found is None:
            continue
        name, path = found
        second.add(name)
        node.target = _PRODUCTS[node.target][0]
        carriers |= set(zip(path, (*path[1:], node), strict=True))
    graph.lint()
    first = {
        str(node.target)
        for node in graph.nodes
        if node.op == "get_attr" and _is_trainable(module, node) and any((node, u) not in carriers for u in node.users)
    }
    made = GraphModule(module, graph, class_name=type(module).__name__)
    return SplitStage(
        stage=dataclasses.replace(stage, graph_module=made), first=frozenset(first), second=frozenset(second)
    )


def _weight_of(node: fx.Node, module: nn.Module) -> tuple[str, list[fx.Node]] | None:
    """The trainable parameter that a product multiplies by, and the nodes from it to the product, in order."""
    if node.op != "call_function" or node.target not in _PRODUCTS or node.kwargs:
        return None
    position = _PRODUCTS[node.target][1]
    if len(node.args) <= position or not _has_simple_bias(node):
        return None
    path: list[fx.Node] = []
    at = node.args[position]
    while isinstance(at, fx.Node):
        path.insert(0, at)
        if at.op == "get_attr":
            return (str(at.target), path) if _is_trainable(module, at) else None
        # What others read on the way would get its gradient from two sides.
        if at.op != "call_function" or at.target not in _CARRIED or len(at.users) > 1:
            return None
        at = at.args[0]
    return None


def _has_simple_bias(node: fx.Node) -> bool:
    if node.target is not aten.addmm.default:
        return True
    bias = node.args[0]
    value = bias.meta.get("val") if isinstance(bias, fx.Node) else None
    return isinstance(value, Tensor) and value.dim() == 1


def _is_trainable(module: nn.Module, node: fx.Node) -> bool:
    value = operator.attrgetter(str(node.target))(module)
    return isinstance(value, nn.Parameter) and value.requires_grad
