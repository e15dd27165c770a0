"""The state of a value from the states of its operands: labels on dimensions, as in einsum.

An operator is described by a label for each dimension of its operands and of its result. The batch follows its label:
kept if the result has the label, summed over if it has not, and a coupling where the operator works *across* the label
(``fixed``: softmax's dimension, a normalised dimension) or where two operands bring the batch under different labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from autoplan.capture.batch_state import (
    Free,
    Mixed,
    Order,
    Permuted,
    PerRow,
    Reduced,
    Rows,
    Sizes,
    State,
    Straight,
    Total,
    operator_name,
    where,
)
from autoplan.capture.shapes import is_data_dependent
from autoplan.capture.types import Coupling

Labels = Sequence[Hashable]
Rule = Callable[["Flow", Node, dict[str, Any]], State]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function in the table for aten operators, names apart by spaces (``namespace::name`` for others)."""

    def enter(function: Rule) -> Rule:
        for name in " ".join(names).split():
            RULES[name if "::" in name else f"aten::{name}"] = function
        return function

    return enter


class Flow:
    """States of a graph's values so far, and what was found on the way."""

    def __init__(self, graph_module: GraphModule, batch_size: int) -> None:
        self.sizes = Sizes(graph_module, batch_size)
        self.states: dict[Node, State] = {}
        self.couplings: dict[tuple[str, str], Coupling] = {}
        self.notes: dict[str, None] = {}
        self.means: set[Node] = set()  # reductions over the batch that are means
        self.sums: set[Node] = set()
        self.data_only: set[Node] = set()  # values computed from the inputs and buffers alone, without chance
        self.tainted: set[Node] = set()  # values that need the totals
        self.sizes_of_parts: set[Node] = set()  # numbers whose parts don't add up to the whole's
        self.selections: dict[str, Node] = {}  # masks that rows were selected by, by the name of their order
        self.counted_by: dict[Node, Node] = {}  # means over selected rows -> the mask
        self.total_uses: dict[tuple[Node, Node], frozenset[Node]] = {}  # (user, argument) -> the sums it is made of
        self._as_free: set[Node] = set()

    def state(self, value: Any) -> State:
        if not isinstance(value, Node) or value in self._as_free:
            return Free()
        return self.states.get(value, Free())

    def shape(self, value: Any) -> tuple[int, ...]:
        if isinstance(value, Node):
            value = value.meta["val"]
        return self.sizes.shape(value) if isinstance(value, Tensor) else ()

    def rank(self, value: Any) -> int:
        return len(self.shape(value))

    def elements(self, value: Any) -> int:
        return prod(self.shape(value))

    def couple(self, node: Node, reason: str) -> Mixed:
        """Record that samples meet here."""
        name = operator_name(node).split("::")[1]
        self.couplings.setdefault((name, where(node)), Coupling(operator=name, where=where(node), reason=reason))
        return Mixed()

    def note(self, text: str) -> None:
        self.notes.setdefault(text)

    def rows(self, value: Any) -> State:
        """The state, with the batch dimension of a Free value that has exactly one of them."""
        state = self.state(value)
        if isinstance(state, Free):
            scaled = [dim for dim, size in enumerate(self.shape(value)) if self.sizes.scales(size)]
            if len(scaled) == 1:
                inner = self.shape(value)[scaled[0]] // self.sizes.batch
                return Rows(dim=scaled[0], order=Straight(outer=1, inner=inner))
        return state

    def use_as_free(self, value: Node) -> None:
        """Take a value as the same for every part while the current operator is looked at."""
        self._as_free.add(value)

    def forget_free(self) -> None:
        self._as_free.clear()

    def known(self, value: Any) -> bool:
        """Whether a part's inputs alone give the value, so that it can be counted before the model runs."""
        return not isinstance(value, Node) or (value in self.data_only and value not in self.tainted)

    def reduced(self, node: Node, order: Order, *, mean: bool, counted: bool = False) -> State:
        """The operator adds up, or averages, rows in ``order`` over the samples. ``counted``: a mean over what the
        operator itself counts among its targets; else it counts every row."""
        if mean and not counted and any(is_data_dependent(x.meta.get("val")) for x in node.all_input_nodes):
            mask = self.selections.get(order.by) if isinstance(order, Permuted) else None
            if mask is None or not self.known(mask):
                return self.couple(
                    node, "the number of values that this mean counts depends on what the model computes"
                )
            self.counted_by[node] = mask
        (self.means if mean else self.sums).add(node)
        operands_known = all(self.known(operand) for operand in node.all_input_nodes)
        total = self.rank(node) == 0 and not mean and node in self.data_only and operands_known
        return Reduced(terms=frozenset({node}), total=total)

    def uniform_along(self, value: Any, dim: int) -> bool:
        """Whether all rows of a Free value along ``dim`` are alike."""
        size = self.shape(value)[dim]
        if size == 1 or self.sizes.dynamic:
            return True  # of a dynamic graph, what is Free and grows with the batch was made by filling or expanding
        return isinstance(value, Node) and _uniform(self, value, dim)


_FILLED = set(
    [
        "full",
        "zeros",
        "ones",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand",
        "randn",
        "rand_like",
        "randn_like",
    ]
)


def _uniform(flow: Flow, value: Node, dim: int) -> bool:
    """The static case, where sizes don't tell: follow the value to what filled or expanded it."""
    name = operator_name(value).split("::")[1] if value.op == "call_function" else ""
    if name in _FILLED:
        return True
    source = value.args[0] if value.args else None
    if not isinstance(source, Node):
        return False
    shift = flow.rank(value) - flow.rank(source)
    if name == "expand":
        return dim < shift or flow.uniform_along(source, dim - shift)
    if name in {"to", "_to_copy", "contiguous", "clone", "alias", "dropout"} and shift == 0:
        return flow.uniform_along(source, dim)
    return False


def combine(
    flow: Flow,
    node: Node,
    operands: Sequence[tuple[Any, Labels]],
    result: Labels,
    *,
    fixed: Collection[Hashable] = (),
) -> State:
    """The state of ``node`` from labelled operands; see the module."""
    operands = [(value, labels) for value, labels in operands if isinstance(value, Node)]
    found: tuple[Hashable, Order] | None = None
    positions = False
    for value, labels in operands:
        gone = [dim for dim, label in enumerate(labels) if label in fixed or label not in result]
        state = flow.rows(value) if gone else flow.state(value)
        if isinstance(state, Free) and any(flow.sizes.scales(flow.shape(value)[dim]) for dim in gone):
            return flow.couple(node, "its value depends on the size of the batch")
        if isinstance(state, (Mixed, Reduced, Total)) or not isinstance(state, (Free, *PerRow)):
            return Mixed() if isinstance(state, Mixed) else flow.couple(node, "it uses a value of the whole batch")
        if isinstance(state, Free):
            continue
        positions |= not isinstance(state, Rows)
        here = (labels[state.dim], state.order)
        if found is None:
            found = here
        elif found[0] != here[0]:
            return flow.couple(node, "it brings every sample of the batch together with every other")
        elif found[1] != here[1]:
            return flow.couple(node, "it brings values of different samples together")
    if found is None:
        return Free()
    label, order = found
    if not _alike_along(flow, operands, label):
        return flow.couple(node, "an operand that is no input has a row of its own for each sample of the batch")
    if label in fixed:
        return flow.couple(node, f"{operator_name(node).split('::')[1]} works across the samples of the batch")
    if label not in result:
        return flow.reduced(node, order, mean=False)
    dim = list(result).index(label)
    if positions:
        flow.couple(node, "the values depend on where a sample stands in the batch")
    return Rows(dim=dim, order=order)


def _alike_along(flow: Flow, operands: Sequence[tuple[Any, Labels]], label: Hashable) -> bool:
    return all(
        flow.uniform_along(value, list(labels).index(label))
        for value, labels in operands
        if label in labels and isinstance(value, Node) and isinstance(flow.state(value), Free)
    )
