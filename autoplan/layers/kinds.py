"""Canonical form of a layer: two layers with equal forms are of one kind, and cost the same.

The form lists, in graph order: each node's operator, its arguments with tensors replaced by what they are to the layer
(an inner node's index, a boundary input's order, a parameter's order), and the shapes and dtypes of its values, of
boundary inputs the strides too. Names of parameters and modules are left out, and so are devices: a trace on meta and
one on real tensors are alike. Hashes are sha256 over text, so they are equal in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import Node

from autoplan.layers.facts import Facts, tensors
from autoplan.layers.operators import operator_label, operator_name

_PLAIN = (int, float, bool, str, torch.dtype)
_UNBACKED = re.compile(r"\bu\d+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """``digest`` of the canonical form; ``boundary`` inputs and ``parameters`` (get_attr nodes, tied ones once) in
    order of first use, and for each parameter name the canonical one; ``outputs`` are read by other layers."""

    digest: str
    boundary: tuple[Node, ...]
    parameters: tuple[Node, ...]
    outputs: tuple[Node, ...]


class Canon:
    """Writes values without names; shared by all layers of one graph."""

    def __init__(self, facts: Facts, batch: sympy.Symbol | None, shared: Mapping[str, str]) -> None:
        self._facts = facts
        self._batch = batch
        self._shared = shared
        self._sizes: dict[Any, str] = {}
        self._shapes: dict[int, tuple[Any, str]] = {}  # the value is held, so that its id stays its own
        self._bounds: dict[str, str] = {}

    def form(self, nodes: Sequence[Node]) -> Form:
        """The canonical form of the layer that holds ``nodes``."""
        facts = self._facts
        inner = {node: index for index, node in enumerate(nodes)}
        boundary: dict[Node, int] = {}
        parameters: dict[str, Node] = {}
        names: dict[str, int] = {}
        lines: list[str] = []

        def reference(source: Node) -> str:
            if source in inner:
                return f"%{inner[source]}"
            if source in facts.parameters:
                name = canonical_name(facts, source)
                parameters.setdefault(name, source)
                return f"p{names.setdefault(name, len(names))}"
            return f"in{boundary.setdefault(source, len(boundary))}"

        for node in nodes:
            arguments = self._text(node.args, reference), self._text(node.kwargs, reference)
            lines.append(f"{operator_label(node.target)}{arguments} -> {self._shape(node)}")
        outputs = tuple(node for node in nodes if node in facts.travelling and self._is_read_outside(node, inner))
        lines += [f"in {source.op} {self._flags(source)} {self._layout(source)}" for source in boundary]
        lines += [self._parameter(name, source) for name, source in parameters.items()]
        lines.append(f"out {[inner[node] for node in outputs]}")
        digest = hashlib.sha256(self._without_names("\n".join(lines)).encode()).hexdigest()
        return Form(digest=digest, boundary=tuple(boundary), parameters=tuple(parameters.values()), outputs=outputs)

    def _without_names(self, text: str) -> str:
        """Sizes that only data decides (``u7``) by the order in which the layer meets them, with their upper bounds."""
        found = dict.fromkeys(name for name in _UNBACKED.findall(text) if name in self._bounds)
        number = {name: f"u{index}" for index, name in enumerate(found)}
        bounds = "".join(f"\n{number[name]} <= {self._bounds[name]}" for name in found)
        return _UNBACKED.sub(lambda match: number.get(match[0], match[0]), text) + bounds

    def fingerprint(self) -> str:
        """sha256 of the whole graph: operators, arguments, shapes, dtypes and edges; no names, devices or strides.

        Operators that only settle the layout in memory are passed over: the device decides which of them a trace holds.
        """
        return hashlib.sha256("\n".join(self._graph(self._facts.nodes, self._facts.loss)).encode()).hexdigest()

    def layer_digest(self, nodes: Sequence[Node]) -> str:
        """The first 12 digits of the same of the layer that holds ``nodes``: what comes in is known by its shape."""
        text = self._without_names("\n".join(self._graph(nodes, None)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _graph(self, nodes: Iterable[Node], loss: Node | None) -> list[str]:
        facts = self._facts
        number: dict[Node, str] = {}
        names: dict[str, str] = {}
        lines: list[str] = []

        def reference(source: Node) -> str:
            if source in facts.parameters:
                return names.setdefault(canonical_name(facts, source), f"p{len(names)} {self._shape(source)}")
            return number.setdefault(source, f"in{len(number)} {self._shape(source)}")

        for node in nodes:
            if self._is_layout_only(node):
                number[node] = reference(node.all_input_nodes[0])
                continue
            arguments = self._text(node.args, reference), self._text(node.kwargs, reference)
            number[node] = f"%{len(lines)}"
            lines.append(f"{operator_label(node.target)}{arguments} -> {self._shape(node)}")
        if loss is not None:
            lines.append(f"loss {reference(loss)}")
        return lines

    def _is_layout_only(self, node: Node) -> bool:
        if operator_name(node.target) not in ("contiguous", "alias", "to") or not node.all_input_nodes:
            return False
        return self._shape(node) == self._shape(node.all_input_nodes[0])

    def _shape(self, node: Node) -> str:
        """Shapes and dtypes of the node's value, the batch written ``b``."""
        value = node.meta.get("val")
        known = self._shapes.get(id(value))
        if known is None:  # folded blocks share the values of the one that was traced
            known = self._shapes[id(value)] = value, self._value(value)
        return known[1]

    def _layout(self, node: Node) -> str:
        """The same and strides, which decide whether a reader copies."""
        strides = [[self._size(stride) for stride in value.stride()] for value in tensors(node.meta.get("val"))]
        return f"{self._shape(node)} {strides}"

    def _is_read_outside(self, node: Node, inner: Mapping[Node, int]) -> bool:
        return node is self._facts.loss or any(reader not in inner for reader in node.users)

    def _flags(self, node: Node) -> str:
        return f"{node in self._facts.travelling} {node in self._facts.differentiable}"

    def _parameter(self, name: str, source: Node) -> str:
        parameter = self._facts.parameters[source]
        shape = f"{tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        return f"parameter {shape} {self._shared.get(name, '')}"

    def _value(self, value: Any) -> str:
        if isinstance(value, Tensor):
            sizes = ",".join(self._size(size) for size in value.shape)
            return f"{value.dtype}[{sizes}]"
        if isinstance(value, (tuple, list)):
            return f"({','.join(self._value(item) for item in value)})"
        return self._size(value)

    def _size(self, size: Any) -> str:
        if type(size) is int or not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return str(size)
        expression = size.node.expr
        if expression not in self._sizes:
            environment = size.node.shape_env
            for symbol in expression.free_symbols:
                if environment.is_unbacked_symint(symbol):
                    self._bounds[str(symbol)] = str(environment.var_to_range[symbol].upper)
            named = {symbol: sympy.Symbol("b") for symbol in expression.free_symbols if symbol == self._batch}
            self._sizes[expression] = str(expression.xreplace(named))
        return self._sizes[expression]

    def _text(self, value: Any, reference: Any) -> str:
        if isinstance(value, Node):
            return reference(value)
        if value is None or type(value) in _PLAIN:
            return repr(value)
        if isinstance(value, (tuple, list)):
            return f"[{','.join(self._text(item, reference) for item in value)}]"
        if isinstance(value, Mapping):
            items = ((key, item) for key, item in value.items() if key != "device")
            return ",".join(f"{key}={self._text(item, reference)}" for key, item in items)
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, slice):
            return self._text((value.start, value.stop, value.step), reference)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value)
        if isinstance(value, (*_PLAIN, complex, torch.layout, torch.memory_format)):
            return repr(value)
        return operator_label(value) if callable(value) else type(value).__name__


def canonical_name(facts: Facts, source: Node) -> str:
    """The name of a parameter; of tied ones, the name that counts."""
    name = str(source.target)
    return facts.canonical.get(name, name)
