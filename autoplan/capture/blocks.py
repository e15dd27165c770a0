"""``with torch.no_grad():`` and ``with torch.enable_grad():`` in a forward.

torch.export makes each such block a submodule called through a higher-order operator. Other rooms read flat graphs, so
the blocks are put in line where that keeps every number and every gradient, and refused at the user's line elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autoplan.capture.errors import node_line
from autoplan.errors import CaptureError

aten = torch.ops.aten


def inline_blocks(module: GraphModule) -> None:
    """``with torch.no_grad():`` and ``torch.enable_grad():`` blocks, which export makes submodules, put in line."""
    blocks = [node for node in module.graph.nodes if node.target in _BLOCKS]
    for node in blocks:
        _BLOCKS[node.target](module, node)


def _inline_set_grad(module: GraphModule, node: Node) -> None:
    """No gradient leaves a no_grad block, none of its values needs one: the same as detaching what goes in."""
    arguments: list[Any] = [*node.args]
    enabled, block, *operands = arguments
    body = _attribute(module, block.target)
    if not enabled:
        if any(inner.target in _BLOCKS for inner in body.graph.nodes):
            raise _refusal("a no_grad block holds another block that sets gradients", body, node)
        operands = [_detached(module, node, operand) for operand in operands]
    inline_blocks(body)
    _splice(module, node, body, operands)
    _forget(module, block)


_BLOCKS: dict[Any, Any] = {torch.ops.higher_order.wrap_with_set_grad_enabled: _inline_set_grad}


def _refusal(what: str, body: GraphModule, node: Node) -> CaptureError:
    inner = next((item for item in body.graph.nodes if item.meta.get("stack_trace")), node)
    return CaptureError(
        what,
        where=node_line(inner),
        legal="plain no_grad blocks, and plain enable_grad blocks",
        attempt="take the inner block out of the outer one, or detach() its results instead",
    )


def _detached(module: GraphModule, before: Node, operand: Any) -> Any:
    """The operand without its gradient, if it can have one."""
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return operand
    if operand.op == "placeholder":
        return operand
    if operand.op == "get_attr" and not isinstance(_attribute(module, operand.target), nn.Parameter):
        return operand
    with module.graph.inserting_before(before):
        detached = module.graph.call_function(aten.detach.default, (operand,))
    detached.meta = {**before.meta, "val": value}
    return detached


def _splice(module: GraphModule, node: Node, body: GraphModule, operands: Sequence[Any]) -> None:
    """Copy the body's nodes before ``node`` and give its users the body's results."""
    copies: dict[Node, Any] = {}
    inputs = iter(operands)
    results: Any = None
    with module.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = next(inputs)
            elif inner.op == "output":
                results = torch.fx.node.map_arg(inner.args[0], copies.__getitem__)
            else:
                copies[inner] = module.graph.node_copy(inner, copies.__getitem__)
                if inner.op == "get_attr":
                    copies[inner].target = _adopt(module, body, inner.target)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        else:
            user.replace_input_with(node, results[0] if isinstance(results, (tuple, list)) else results)
    module.graph.erase_node(node)


def _adopt(module: GraphModule, body: GraphModule, target: str) -> str:
    """A constant of a block's, under a free name of the whole graph's."""
    name = f"constant_{target.replace('.', '_')}"
    while hasattr(module, name):
        name += "_"
    value = _attribute(body, target)
    module.register_buffer(name, value) if isinstance(value, Tensor) else setattr(module, name, value)
    return name


def _forget(module: GraphModule, block: Node) -> None:
    if not block.users:
        module.graph.erase_node(block)


def _attribute(module: GraphModule, target: Any) -> Any:
    return operator.attrgetter(target)(module)
