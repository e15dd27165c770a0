"""One node of the graph as a rule sees it: its operands with their whole shapes, and its arguments by name.

Whole shapes are plain integers: the symbolic batch stands as :data:`autoplan.capture.shapes.MAX_BATCH`, a prime, so
that it never divides by a degree (the batch is the data axis' to split) and reshapes can be followed by arithmetic.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autoplan.capture.shapes import MAX_BATCH, bytes_at, shape_at
from autoplan.errors import AutoplanError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """One occurrence of a tensor (or tuple of tensors) among a node's arguments."""

    node: Node
    shapes: tuple[Shape, ...]
    differentiable: bool

    @property
    def shape(self) -> Shape:
        return self.shapes[0]


@dataclass(frozen=True, slots=True)
class Operation:
    """``key`` names the operator without its overload ("linear", "add_", "mylib.op").

    ``arguments``: by the schema's names, defaults filled in; ``slots``: for each argument that holds tensors, the
    indices of its operands; ``shapes``: of the results.
    """

    node: Node
    key: str
    degree: int
    arguments: dict[str, Any]
    slots: dict[str, tuple[int, ...]]
    operands: tuple[Operand, ...]
    shapes: tuple[Shape, ...]
    differentiable: bool

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    def operand(self, argument: str) -> Operand | None:
        """The operand that is argument ``argument``; None where it is left out."""
        slots = self.slots.get(argument, ())
        return self.operands[slots[0]] if slots else None

    def dim(self, argument: str, rank: int | None = None) -> int:
        """A dimension argument, counted from the front."""
        return int(self.arguments[argument]) % (rank or len(self.operands[0].shape))


@functools.lru_cache(maxsize=4096)
def operator_key(target: Any) -> str:
    """ "linear" of aten.linear.default, "mylib.op" of a custom operator, the name of a Python function."""
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    return getattr(target, "__name__", str(target))


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a node's ``meta["val"]``: itself, or those of a tuple; empty for numbers."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    return ()


def module_path(node: Node) -> str:
    """The user's module that ``node`` was traced in, "" outside of any."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths else ""


class GraphFacts:
    """What is known of every value of one graph before anything is split.

    ``degree``: of the tensor axis; ``parametric``: what a parameter reaches; ``differentiable``: what has a gradient;
    ``answers``: what rules answered at this degree (:mod:`.candidates`).
    """

    def __init__(self, graph_module: GraphModule, degree: int) -> None:
        self.graph_module = graph_module
        self.graph: Graph = graph_module.graph
        self.degree = degree
        self.shapes = _Shapes()
        self.differentiable: dict[Node, bool] = {}
        self.parametric: dict[Node, bool] = {}
        self._parameters: dict[Node, Tensor | None] = {}
        for node in self.graph.nodes:
            if node.op == "get_attr":
                parameter = self.parameter(node)
                self.parametric[node] = parameter is not None
                self.differentiable[node] = parameter is not None and parameter.requires_grad
            else:
                parents = node.all_input_nodes
                self.parametric[node] = any([self.parametric[parent] for parent in parents])
                self.differentiable[node] = self._is_differentiable(node, parents)
        self._operations: dict[Node, Operation] = {}
        self._read_once: dict[Node, Operation] = {}
        self.answers: dict[Any, tuple[Any, ...]] = {}

    def at(self, degree: int) -> GraphFacts:
        """The same facts for another degree: shapes, gradients and what parameters reach are read once."""
        other = copy.copy(self)
        other.degree = degree
        other._operations = {}
        other.answers = {}
        return other

    def operation(self, node: Node) -> Operation:
        """The rule's view of a call_function node."""
        found = self._operations.get(node)
        if found is None:
            if node not in self._read_once:
                self._read_once[node] = self._read(node)
            found = self._operations[node] = dataclasses.replace(self._read_once[node], degree=self.degree)
        return found

    def parameter(self, node: Node) -> Tensor | None:
        """The Parameter that a get_attr node reads, None for buffers and other nodes."""
        if node.op != "get_attr":
            return None
        if node not in self._parameters:
            value = operator.attrgetter(str(node.target))(self.graph_module)
            self._parameters[node] = value if isinstance(value, torch.nn.Parameter) else None
        return self._parameters[node]

    def _is_differentiable(self, node: Node, parents: list[Node]) -> bool:
        if node.op != "call_function" or not any([self.differentiable[parent] for parent in parents]):
            return False
        for tensor in tensors_of(node.meta.get("val")):
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                return operator_key(node.target) != "detach"
        return False

    def _read(self, node: Node) -> Operation:
        arguments, named = _bind(node)
        operands: list[Operand] = []
        slots: dict[str, tuple[int, ...]] = {}

        def note(name: str) -> Callable[[Node], Node]:
            def visit(child: Node) -> Node:
                if self.shapes[child]:
                    slots[name] = (*slots.get(name, ()), len(operands))
                    operands.append(Operand(child, self.shapes[child], self.differentiable[child]))
                return child

            return visit

        for name, value in named:
            torch.fx.node.map_arg(value, note(name))
        return Operation(
            node=node,
            key=operator_key(node.target),
            degree=self.degree,
            arguments=arguments,
            slots=slots,
            operands=tuple(operands),
            shapes=self.shapes[node],
            differentiable=self.differentiable[node],
        )


def rebuild(node: Node, replacements: tuple[Any, ...], other: Callable[[Node], Any]) -> tuple[tuple[Any, ...], dict]:
    """``node``'s args and kwargs with its k-th operand replaced by the k-th of ``replacements``, and every node that
    is no tensor through ``other``. The order is that of :attr:`Operation.operands`."""
    remaining = iter(replacements)

    def visit(child: Node) -> Any:
        return next(remaining) if tensors_of(child.meta.get("val")) else other(child)

    args = tuple(torch.fx.node.map_arg(value, visit) for value in node.args)
    kwargs = {name: torch.fx.node.map_arg(value, visit) for name, value in node.kwargs.items()}
    return args, kwargs


def sample_bytes(node: Node, *, batch_size: int, dynamic: bool) -> tuple[float, bool]:
    """Bytes of a value and whether they grow with the batch: (bytes per sample, True) or (bytes, False).

    Of a static trace a value counts as batched when its first dimension divides by the batch.
    """
    tensors = tensors_of(node.meta.get("val"))
    one, two = (sum(bytes_at(tensor, batch) for tensor in tensors) for batch in (1, 2))
    if dynamic:
        return (float(two - one), True) if two != one else (float(one), False)
    batched = (
        batch_size > 1 and node.op != "get_attr" and all(t.dim() and t.shape[0] % batch_size == 0 for t in tensors)
    )
    return (one / batch_size, True) if batched else (float(one), False)


class _Shapes(dict[Node, tuple[Shape, ...]]):
    """Whole shapes, worked out when first asked for: of repeated layers only the first is looked at.

    Of a tuple whose elements are unlike (a bag's sums beside its offsets), only those that are read.
    """

    def __missing__(self, node: Node) -> tuple[Shape, ...]:
        tensors = tensors_of(node.meta.get("val"))
        if len({tensor.dim() for tensor in tensors}) > 1:
            read = {user.args[1] for user in node.users if operator_key(user.target) == "getitem" and user.users}
            tensors = tuple(tensor for index, tensor in enumerate(tensors) if index in read)
        try:
            self[node] = tuple(shape_at(tensor, MAX_BATCH) for tensor in tensors)
        except AutoplanError:  # a size that only the data decides, without a bound: nothing can be split
            self[node] = tuple((1,) * tensor.dim() for tensor in tensors)
        return self[node]


def _bind(node: Node) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Arguments by name with defaults, and those written in the graph in the order args, kwargs."""
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        names = [argument.name for argument in schema]
        defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    else:
        names, defaults = [], {}
    positional = [names[i] if i < len(names) else f"argument_{i}" for i in range(len(node.args))]
    named = [*zip(positional, node.args, strict=True), *node.kwargs.items()]
    return {**defaults, **dict(named)}, named
