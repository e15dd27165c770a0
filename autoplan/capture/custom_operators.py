"""Operators that were registered with torch.library and cannot be trained through, where a gradient has to pass."""

from __future__ import annotations

from operator import attrgetter

from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from autoplan.capture.errors import node_line
from autoplan.errors import CaptureError

_CUT = ("aten.detach.default", "aten.detach_.default")


def check_formulas(graph_module: GraphModule) -> None:
    """Raise CaptureError for a custom operator without a backward between a trained parameter and the loss."""
    training: set[Node] = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(graph_module)
            if isinstance(value, nn.Parameter) and value.requires_grad:
                training.add(node)
        elif node.op == "call_function" and not training.isdisjoint(node.all_input_nodes) and _carries(node):
            if _has_no_formula(node):
                raise _refusal(node)
            training.add(node)


def _carries(node: Node) -> bool:
    """Whether a gradient may pass through the operator."""
    value = node.meta.get("val")
    floats = not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
    return floats and str(node.target) not in _CUT


def _has_no_formula(node: Node) -> bool:
    target = node.target
    definition = OPDEFS.get(target._schema.name) if isinstance(target, OpOverload) else None
    return definition is not None and definition._backward_fn is None


def _refusal(node: Node) -> CaptureError:
    name = str(node.target).removesuffix(".default").replace(".", "::")
    return CaptureError(
        f"the custom operator {name} has no autograd formula, and a gradient has to pass through it",
        where=node_line(node),
        legal="operators with a backward, or given nothing that needs a gradient",
        attempt=f"register one with torch.library.register_autograd({name!r}, backward), or detach() its inputs",
    )
