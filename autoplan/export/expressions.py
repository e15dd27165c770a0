"""One node of a graph as a Python expression that people write by hand.

Methods of tensors and functions of torch take the arguments of the operators that they call, in the same order, because
both are made from one schema: ``aten.view.default(x, [2, 3])`` is ``x.view([2, 3])``. What has no such form stays
``torch.ops.aten....``, which is always right. Arithmetic becomes arithmetic, slices become slices.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from autoplan.capture.errors import node_line
from autoplan.errors import StrategyError
from autoplan.passes import context_operators, expert_operators, operators

aten = torch.ops.aten
# Namespaces of operators that come with torch.
_TORCHS_OWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "quantized")

Names = Mapping[Node, str]
DEVICE = "DEVICE"
_AXES = ("tensor", "context", "expert")
# Where the functions stand that passes write into graphs, and operators of others that the folder has itself.
_MODULES = {
    operators.__name__: "collectives",
    context_operators.__name__: "positions",
    expert_operators.__name__: "experts",
}
_REWRITTEN = {"transformers::grouped_mm_fallback": "grouped_mm"}


class Compound(str):
    """An expression that needs parentheses in front of a dot and beside a sign."""

    __slots__ = ()


_BINARY: dict[Any, str] = {
    aten.add.Tensor: "+",
    aten.add.Scalar: "+",
    aten.sub.Tensor: "-",
    aten.sub.Scalar: "-",
    aten.mul.Tensor: "*",
    aten.mul.Scalar: "*",
    aten.div.Tensor: "/",
    aten.div.Scalar: "/",
    aten.pow.Tensor_Scalar: "**",
    aten.matmul.default: "@",
    aten.eq.Scalar: "==",
    aten.eq.Tensor: "==",
    aten.ne.Scalar: "!=",
    aten.ne.Tensor: "!=",
    aten.lt.Scalar: "<",
    aten.lt.Tensor: "<",
    aten.le.Scalar: "<=",
    aten.le.Tensor: "<=",
    aten.gt.Scalar: ">",
    aten.gt.Tensor: ">",
    aten.ge.Scalar: ">=",
    aten.ge.Tensor: ">=",
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.truediv: "/",
    operator.eq: "==",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
# Methods whose Python form takes the arguments of another overload, or none; functions that take a list's items apart.
_AS_OPERATOR = {"copy", "lift_fresh_copy", "slice", "select", "alias", "index"}
_AS_OPERATOR |= {"broadcast_tensors", "cartesian_prod", "block_diag"}
_FUNCTIONAL: dict[Any, str] = {
    aten.linear.default: "F.linear",
    aten.silu.default: "F.silu",
    aten.gelu.default: "F.gelu",
    aten.mish.default: "F.mish",
    aten.scaled_dot_product_attention.default: "F.scaled_dot_product_attention",
}


def expression(node: Node, names: Names) -> str:
    """``node``, a call_function node, with its operands by ``names``; a :class:`Compound` where that must be known."""
    special = _SPECIAL.get(node.target)
    if special is not None:
        text = special(node, names)
        if text is not None:
            return text
    sign = _BINARY.get(node.target)
    if sign is not None and len(node.args) == 2 and not node.kwargs:
        left, right = (_operand(argument, names) for argument in node.args)
        tight = sign == "**" and left.isidentifier() and right.isalnum()
        return Compound(f"{left}**{right}" if tight else f"{left} {sign} {right}")
    if node.target in _FUNCTIONAL:
        return _call(_FUNCTIONAL[node.target], node.args, node.kwargs, names)
    own = of_folder(node)
    if own is not None:  # the functions of a module of the folder know their axis
        return _call(own.name, [each for each in node.args if each not in _AXES], node.kwargs, names)
    if isinstance(node.target, torch._ops.OpOverload):
        return _operator(node, names)
    return _call(getattr(node.target, "__name__", str(node.target)), node.args, node.kwargs, names)


@dataclass(frozen=True, slots=True)
class OfFolder:
    """A function that stands in a module of the emitted folder."""

    module: str
    name: str


def of_folder(node: Node) -> OfFolder | None:
    """What a call_function node calls of the folder's modules; None where it calls torch or Python."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = _REWRITTEN.get(target._schema.name)
        return OfFolder("experts", name) if name else None
    module = _MODULES.get(getattr(target, "__module__", ""))
    if module is None:
        return None
    if target is operators.drawn_apart and "context" in node.args:
        return OfFolder("positions", "drawn_by_positions")
    return OfFolder(module, target.__name__)  # type: ignore[union-attr]


def _operator(node: Node, names: Names) -> str:
    overload: Any = node.target
    name = overload._schema.name.partition("::")[2]
    space = overload.namespace
    receiver = node.args[0] if node.args else None
    if space == "aten" and name not in _AS_OPERATOR and not name.startswith("_"):
        if _first_is_self(overload) and isinstance(receiver, Node) and hasattr(torch.Tensor, name):
            return _call(f"{_operand(receiver, names)}.{name}", node.args[1:], node.kwargs, names)
        if hasattr(torch, name):
            return _call(f"torch.{name}", node.args, node.kwargs, names)
    if space not in _TORCHS_OWN:
        raise StrategyError(
            f"operator {overload._schema.name} is not torch's, and an emitted program has nothing but torch",
            where=node_line(node),
            legal="operators of torch",
            attempt="write it with torch's own in the model, or train by `program.step` and `autoplan run`",
        )
    return _call(f"torch.ops.{space}.{name}.{overload._overloadname}", node.args, node.kwargs, names)


def _first_is_self(overload: Any) -> bool:
    arguments = overload._schema.arguments
    return bool(arguments) and arguments[0].name == "self" and isinstance(arguments[0].type, torch.TensorType)


def _call(function: str, args: Any, kwargs: Mapping[str, Any], names: Names) -> str:
    parts = [value(argument, names) for argument in args]
    parts += [f"{key}={value(argument, names)}" for key, argument in kwargs.items() if not _needless(key, argument)]
    return f"{function}({', '.join(parts)})"


def _needless(key: str, argument: Any) -> bool:
    return (key == "pin_memory" and not argument) or (key == "layout" and argument is torch.strided)


def value(argument: Any, names: Names) -> str:
    """Any argument of a node as Python."""
    if isinstance(argument, Node):
        return names[argument]
    if isinstance(argument, torch.device):
        return DEVICE
    if isinstance(argument, float) and not math.isfinite(argument):
        return f'float("{argument}")'
    if isinstance(argument, tuple | list):
        inner = ", ".join(value(each, names) for each in argument)
        if isinstance(argument, list):
            return f"[{inner}]"
        return f"({inner},)" if len(argument) == 1 else f"({inner})"
    if isinstance(argument, slice):
        return _range(argument.start, argument.stop, argument.step, names)
    if isinstance(argument, str):
        return f'"{argument}"'
    if isinstance(argument, torch._ops.OpOverload):
        return f"torch.ops.{argument.namespace}.{argument.__name__}"
    return repr(argument)


def _operand(argument: Any, names: Names) -> str:
    """In front of a dot or beside a sign."""
    text = value(argument, names)
    return f"({text})" if isinstance(text, Compound) or text.startswith("-") else text


def _index(node: Node, names: Names) -> str | None:
    """``x[:, :, 3]`` or ``x[:, 0:8]`` for select and slice."""
    dim = node.args[1] if len(node.args) > 1 else 0
    if node.kwargs or not isinstance(dim, int):
        return None
    if node.target is aten.select.int:
        inside = value(node.args[2], names)
    else:
        start, stop, step = _filled(node.args[2:], (None, None, 1))
        inside = _range(start, stop, step, names)
    if dim >= 0:
        places = [":"] * dim + [inside]
        return f"{_operand(node.args[0], names)}[{', '.join(places)}]"
    places = ["...", inside] + [":"] * (-dim - 1)
    return f"{_operand(node.args[0], names)}[{', '.join(places)}]"


def _filled(given: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*given, *defaults[len(given) :])


def _range(start: Any, stop: Any, step: Any, names: Names) -> str:
    first = "" if start in (None, 0) else value(start, names)
    last = "" if stop is None or (isinstance(stop, int) and stop >= sys.maxsize) else value(stop, names)
    return f"{first}:{last}" + (f":{value(step, names)}" if step not in (None, 1) else "")


def _item(node: Node, names: Names) -> str:
    return f"{_operand(node.args[0], names)}[{value(node.args[1], names)}]"


def _size(node: Node, names: Names) -> str:
    return f"{_operand(node.args[0], names)}.shape[{value(node.args[1], names)}]"


def _negative(node: Node, names: Names) -> str:
    return Compound(f"-{_operand(node.args[0], names)}")


def _cross_entropy(node: Node, names: Names) -> str | None:
    """torch numbers reductions; people name them."""
    given: dict[str, Any] = dict(
        zip(("logits", "target", "weight", "reduction", "ignore_index", "label_smoothing"), node.args, strict=False)
    )
    given |= node.kwargs
    arguments = [value(given["logits"], names), value(given["target"], names)]
    if given.get("weight") is not None:
        arguments.append(f"weight={value(given['weight'], names)}")
    reduction = {0: "none", 1: "mean", 2: "sum"}[given.get("reduction", 1)]
    arguments.append(f'reduction="{reduction}"')
    for key, default in (("ignore_index", -100), ("label_smoothing", 0.0)):
        if given.get(key, default) != default:
            arguments.append(f"{key}={value(given[key], names)}")
    return f"F.cross_entropy({', '.join(arguments)})"


def _embedding(node: Node, names: Names) -> str | None:
    """F.embedding has the table second."""
    table, rows = node.args[:2]
    padding, scaled, sparse = _filled(node.args[2:], (-1, False, False))
    if node.kwargs or scaled or sparse:
        return None
    tail = "" if padding == -1 else f", padding_idx={value(padding, names)}"
    return f"F.embedding({value(rows, names)}, {value(table, names)}{tail})"


_SPECIAL: dict[Any, Callable[[Node, Names], str | None]] = {
    aten.slice.Tensor: _index,
    aten.select.int: _index,
    operator.getitem: _item,
    aten.sym_size.int: _size,
    aten.neg.default: _negative,
    operator.neg: _negative,
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
}
