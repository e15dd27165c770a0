"""Whether two traces of a model make their loss alike: of a first call, and of a second that finds what the first left.

A counter that nothing reads, a tensor kept for inspection, a mask built at the first call change nothing: the program
may do without. What the next call reads (a step number, a hidden state) does; see :mod:`.side_effects`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.traceback import annotate, preserve_node_meta

from autoplan.capture.batch_memory import writes, written
from autoplan.capture.blocks import inline_blocks
from autoplan.capture.errors import node_line

_BEFORE = "autoplan_calls_before"
_DETACH = "aten.detach.default"
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
# Operators that read the shape of what they are given, and not its numbers.
_OF_SHAPES = re.compile(r"aten\.(sym_\w+|(zeros|ones|empty|full|rand|randn)_like|new_\w+)\.")
# A value by how it was made: what made it, and the values that went in.
Made = tuple[Any, ...]


@contextlib.contextmanager
def calls_before() -> Iterator[None]:
    """Around the calls before the last: what they leave in parameters and buffers is where the last starts from."""
    with preserve_node_meta(), annotate({_BEFORE: True}):
        yield


def first_difference(one: GraphModule, other: GraphModule) -> str | None:
    """Where ``other`` first makes what ``one`` does not, on the way to its output; None where both make their output
    by the same operators on the same inputs, parameters and constants."""
    for module in (one, other):
        inline_blocks(module)
    numbers: dict[Made, int] = {}
    wanted, _ = _output(one, numbers)
    known = len(numbers)
    found, of_node = _output(other, numbers)
    if found == wanted:
        return None
    new = next((node for node, number in of_node.items() if number >= known and node.op == "call_function"), None)
    return node_line(new if new is not None else next(iter(of_node)))


def _output(module: GraphModule, numbers: dict[Made, int]) -> tuple[int, dict[Node, int]]:
    """The number of the output's making, and of every node's that it is made of; equal makings share a number."""
    of_node: dict[Node, int] = {}
    without_gradient: set[int] = set()
    nodes = list(module.graph.nodes)
    needed = _ancestors(nodes[-1])
    for node in nodes:
        if node not in needed:
            continue
        operand = _handed_on(node) or _advanced(node, module)
        if operand is None and str(node.target) == _DETACH and of_node[node.args[0]] in without_gradient:
            operand = node.args[0]
        if operand is not None:
            of_node[node] = of_node[operand]
        else:
            known = _as_of_an_earlier_call(node, of_node, numbers)
            made = (node.op, *_what(node, module, numbers), _plain(node.args, known), _plain(node.kwargs, known))
            of_node[node] = numbers.setdefault(made, len(numbers))
            if node.op == "get_attr" and not isinstance(attrgetter(str(node.target))(module), nn.Parameter):
                without_gradient.add(of_node[node])
    return of_node[nodes[-1]], of_node


def _as_of_an_earlier_call(node: Node, of_node: dict[Node, int], numbers: dict[Made, int]) -> Mapping[Node, int]:
    """``of_node`` for the operands of ``node``: to a call before the last, the inputs' values are another batch's."""
    if not (node.meta.get("custom") or {}).get(_BEFORE) or _OF_SHAPES.match(str(node.target)):
        return of_node
    return {
        operand: numbers.setdefault(("earlier", of_node[operand]), len(numbers))
        if operand.op == "placeholder"
        else of_node[operand]
        for operand in node.all_input_nodes
    }


def _advanced(node: Node, module: GraphModule) -> Node | None:
    """The parameter or buffer that a call before the last changes in place: the program keeps it, from step to step."""
    if not (node.meta.get("custom") or {}).get(_BEFORE):
        return None
    operand = next(written(node), None)
    base: Any = operand
    while isinstance(base, Node) and base.op == "call_function" and (writes(base) or _is_alias(base)):
        base = next(written(base), base.args[0] if base.args else None)
    if operand is None or not isinstance(base, Node) or base.op != "get_attr":
        return None
    value = attrgetter(str(base.target))(module)
    return operand if isinstance(value, Tensor) and not _is_constant(base, value, module) else None


def _is_alias(node: Node) -> bool:
    return _handed_on(node) is not None or str(node.target) == _DETACH


def written_constant(module: GraphModule) -> Node | None:
    """The first operator that writes into a tensor of the user's that is neither parameter nor buffer."""
    for node in module.graph.nodes:
        for operand in written(node):
            value = attrgetter(str(operand.target))(module) if operand.op == "get_attr" else None
            if isinstance(value, Tensor) and _is_constant(operand, value, module):
                return node
    return None


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
            return ("region", _output(value, numbers)[0])
        if isinstance(value, Tensor) and _is_constant(node, value, module):
            return ("constant", tuple(value.shape), str(value.dtype), repr(value.tolist()))
    return (str(node.target),)


def _is_constant(node: Node, value: Tensor, module: GraphModule) -> bool:
    """Whether it is a tensor made while tracing, whose name says nothing, with numbers to look at."""
    # What is the user's has a path; a constant of a no_grad block is a buffer of the trace's own making.
    target = str(node.target)
    owned = isinstance(value, nn.Parameter) or ("." in target and target in dict(module.named_buffers()))
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
