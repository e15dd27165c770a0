"""What a value of the graph has to do with the samples of the batch.

The batch may be split when every value is one of these, from the inputs to the loss:

=============  ==================================================================================================
state          the value
=============  ==================================================================================================
``Free``       depends on no sample; where a dimension's size grows with the batch, its rows are all alike
``Rows``       row i along ``dim`` depends on the one sample that owns row i
``RowIds``     numbers of rows in a table of rows (``arange(batch)``, the permutation that ``sort`` gives)
``Slots``      the inverse of such a permutation
``Offsets``    how many rows each expert gets, in the order of that permutation
``Starts``     where runs of equally many rows begin (``arange(0, batch * k, k)``): a part's are the whole's first
``Reduced``    a linear function of sums and means over the samples: what a loss is made of
``Total``      a function of sums over the inputs alone (counts): known for the whole batch before the model runs
``Mixed``      anything else; the reason was recorded where it arose
=============  ==================================================================================================

Samples are counted along a dimension of size ``outer x batch x inner``: [B*T, ...] has inner T, [T*B, ...] outer T.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx import GraphModule, Node

from autoplan.capture.errors import node_frame
from autoplan.capture.shapes import batch_symbol, size_at

# A prime, so that no other size of a model is a multiple of it, and below shapes.MAX_BATCH.
PROBE_BATCH = 1_048_573


@dataclass(frozen=True, slots=True, kw_only=True)
class Straight:
    """Rows in the order (outer, batch, inner)."""

    outer: int
    inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Permuted:
    """Rows in an order that the data decides, given by the node named ``by``."""

    by: str


Order = Straight | Permuted


@dataclass(frozen=True, slots=True)
class Free:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """``sorted_by``: the values are the keys that the node of this name sorted, ascending."""

    dim: int
    order: Order
    sorted_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIds:
    dim: int
    order: Order
    table: Straight


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    dim: int
    order: Straight
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """``runs`` a sample of ``step`` rows each."""

    runs: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """``terms``: the reductions it is made of. ``total``: made of sums of the inputs alone, so it may be a Total."""

    terms: frozenset[Node]
    total: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    sources: frozenset[Node]


@dataclass(frozen=True, slots=True)
class Mixed:
    pass


State = Free | Rows | RowIds | Slots | Offsets | Starts | Reduced | Total | Mixed | tuple["State", ...]
PerRow = (Rows, RowIds, Slots)


def moved(state: State, dim: int, order: Order | None = None) -> State:
    """The same rows along another dimension, or cut otherwise."""
    if isinstance(state, Rows):
        return Rows(dim=dim, order=order or state.order)
    if isinstance(state, RowIds):
        same = order is None or order == state.order
        return replace(state, dim=dim) if same else Rows(dim=dim, order=order or state.order)
    if isinstance(state, Slots):
        return replace(state, dim=dim)
    return state


class Sizes:
    """Sizes at a probe batch, where a multiple of the batch is recognised by its divisor."""

    def __init__(self, graph_module: GraphModule, batch_size: int) -> None:
        self.symbol = batch_symbol(graph_module)
        self.dynamic = self.symbol is not None
        self.batch = PROBE_BATCH if self.dynamic else batch_size
        self._cache: dict[Any, int] = {}
        self._shapes: dict[int, tuple[Tensor, tuple[int, ...]]] = {}  # the tensor is held, so that its id stays its own

    def value(self, size: int | SymInt | Node) -> int:
        number = size.meta["val"] if isinstance(size, Node) else size
        if not isinstance(number, SymInt):
            return int(number)
        key = number.node.expr
        if key not in self._cache:
            self._cache[key] = size_at(number, self.batch)
        return self._cache[key]

    def shape(self, value: Node | Tensor) -> tuple[int, ...]:
        tensor = value.meta["val"] if isinstance(value, Node) else value
        known = self._shapes.get(id(tensor))
        if known is None:  # folded blocks share the values of the one that was traced
            known = tensor, tuple(map(self.value, tensor.shape))
            self._shapes[id(tensor)] = known
        return known[1]

    def grows(self, value: Node) -> bool:
        """Whether a size of the value has the batch in it, as a multiple or otherwise."""
        if not self.dynamic:
            return False
        sizes: list[Any] = list(value.meta["val"].shape)
        return any(is_symbolic(size) and self.symbol in size.node.expr.free_symbols for size in sizes)

    def scales(self, size: int) -> bool:
        """Whether an evaluated size grows with the batch; never known of a static graph."""
        return self.dynamic and size > 0 and size % self.batch == 0


def is_symbolic(value: Any) -> bool:
    return isinstance(value, (SymInt, SymFloat)) and not value.node.expr.is_number


def operator_name(node: Node) -> str:
    """``aten::add`` of ``aten.add_.Tensor``: namespace and name, overload and in-place mark aside."""
    return _name_of(node.target)


@functools.cache
def _name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name
        return name if name.endswith("__") else name.rstrip("_")
    return f"python::{getattr(target, '__name__', str(target))}"


def short_name(node: Node) -> str:
    """``add`` of ``aten.add_.Tensor``."""
    return operator_name(node).split("::")[1] if node.op == "call_function" else node.op


def bound(node: Node) -> dict[str, Any]:
    """Arguments by the names of the operator's schema, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {str(index): argument for index, argument in enumerate(node.args)} | dict(node.kwargs)
    names, defaults = _signature(node.target)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return {
        name: given[name] if name in given else defaults[name] for name in names if name in given or name in defaults
    }


@functools.cache
def _signature(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of an operator's arguments, and the defaults of those that have one."""
    arguments = target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return tuple(argument.name for argument in arguments), defaults


def where(node: Node) -> str:
    """``file:line`` of the user's code; of what is written where the write itself is nobody's line: a buffer that gets
    another tensor."""
    candidate: Node | None = node
    while candidate is not None:
        frame = node_frame(candidate)
        if frame is not None:
            return f"{frame.filename}:{frame.lineno}"
        candidate = next(reversed(candidate.all_input_nodes), None)
    return f"node {node.name}"


def tensors(arguments: Iterable[Any]) -> list[Node]:
    """The nodes with tensor values among arguments, lists opened."""
    found: list[Node] = []
    for argument in arguments:
        if isinstance(argument, Node):
            if isinstance(argument.meta.get("val"), (Tensor, tuple, list)):
                found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend(tensors(argument))
    return found
