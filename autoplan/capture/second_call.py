"""Whether a second call computes what the first did, where a forward changes attributes of its modules.

A counter that nothing reads, a tensor kept for inspection, a mask built at the first call are side effects and no more:
the program may do without. What the next call reads (a step number, a hidden state) would be lost: the traced program
would repeat the first call for ever. Which it is, is told by calling twice under one trace, so that the second finds
what the first left, and comparing how the second's loss is made.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autoplan.capture.errors import forward_line
from autoplan.errors import CaptureError

_LOOKED_AT = 2**16  # elements of a constant
# Operators that return the very tensor they were given where there is nothing to do.
_HANDING_ON = (
    "aten.contiguous.default",
    "aten.to.device",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.other",
    "aten.alias.default",
)
# A value by how it was made: what made it, and the values that went in.
Made = tuple[Any, ...]


def same_loss(one: GraphModule, other: GraphModule) -> bool:
    """Whether both make their output by the same operators on the same inputs, parameters and constants."""
    numbers: dict[Made, int] = {}
    return _output(one, numbers) == _output(other, numbers)


def _output(module: GraphModule, numbers: dict[Made, int]) -> int:
    """The number of the output's making; equal makings share a number in ``numbers``."""
    of_node: dict[Node, int] = {}
    nodes = list(module.graph.nodes)
    needed = _ancestors(nodes[-1])
    for node in nodes:
        if node not in needed:
            continue
        if (operand := _handed_on(node)) is not None:
            of_node[node] = of_node[operand]
        else:
            made = (node.op, *_what(node, module, numbers), _plain(node.args, of_node), _plain(node.kwargs, of_node))
            of_node[node] = numbers.setdefault(made, len(numbers))
    return of_node[nodes[-1]]


def _handed_on(node: Node) -> Node | None:
    """The operand that an operator hands on as it is. Where that is an input or a parameter, a trace takes it for the
    operator's from then on, and the second call reads it so."""
    target = str(node.target)
    operand: Any = node.args[0] if node.args else None
    if target in _HANDING_ON or (target == "aten.dropout.default" and not node.args[2]):
        pass
    elif isinstance(operand, Node) and str(operand.target) == "aten.broadcast_tensors.default":
        operand = operand.args[0][node.args[1]]  # type: ignore[index]
    else:
        return None
    return operand if isinstance(operand, Node) and _shape(operand) == _shape(node) else None


def _shape(node: Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(node)


def _ancestors(last: Node) -> set[Node]:
    found, open_ = {last}, [last]
    while open_:
        for node in open_.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                open_.append(node)
    return found


def _what(node: Node, module: GraphModule, numbers: dict[Made, int]) -> tuple[Any, ...]:
    """What a node is, past its operands: a region is what it makes, a constant its numbers, all else its target."""
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(module)
        if isinstance(value, GraphModule):
            return ("region", _output(value, numbers))
        if isinstance(value, Tensor) and _is_constant(node, value, module):
            return ("constant", tuple(value.shape), str(value.dtype), repr(value.tolist()))
    return (str(node.target),)


def _is_constant(node: Node, value: Tensor, module: GraphModule) -> bool:
    """Whether it is a tensor made while tracing, whose name says nothing, with numbers to look at."""
    owned = isinstance(value, nn.Parameter) or str(node.target) in dict(module.named_buffers())
    return not owned and not value.is_meta and value.numel() <= _LOOKED_AT


def _plain(argument: Any, of_node: Mapping[Node, int]) -> Any:
    """An operand as something to compare."""
    if isinstance(argument, Node):
        return ("node", of_node[argument])
    if isinstance(argument, (list, tuple)):
        return tuple(_plain(item, of_node) for item in argument)
    if isinstance(argument, dict):
        return tuple((key, _plain(item, of_node)) for key, item in argument.items())
    return (type(argument).__name__, str(argument))


def refusal(model: nn.Module, changed: Sequence[str]) -> CaptureError:
    """The error of a model whose next call reads one of ``changed``, its attributes by path."""
    place = next((line for name in changed if (line := _line(model, name))), forward_line(model))
    names = " and ".join(f"self.{name}" for name in changed)
    return CaptureError(
        f"forward changes {names}, and the next call computes something else for it: the captured program would "
        "repeat the first call for ever",
        where=place,
        legal="state in buffers, which is kept from step to step; attributes that no later call reads",
        attempt=f"self.register_buffer({changed[0].rpartition('.')[2]!r}, torch.zeros(...)) and change it in place, or "
        "pass the value as an input",
    )


def _line(model: nn.Module, name: str) -> str:
    """Where the forward of the attribute's module first names it; "" where its source is not to be had."""
    path, _, attribute = name.rpartition(".")
    try:
        forward: Callable[..., Any] = type(model.get_submodule(path)).forward
        lines, first = inspect.getsourcelines(forward)
        file = inspect.getsourcefile(forward)
    except (AttributeError, OSError, TypeError):
        return ""
    for number, line in enumerate(lines, first):
        if re.search(rf"\bself\.{re.escape(attribute)}\b", line):
            return f"{file}:{number}"
    return ""
