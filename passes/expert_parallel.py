"""Write the expert axis into a graph: every rank holds a share of each layer's experts, and rows go to theirs.

Requires a graph in which experts are products of rows sorted by expert with stacked weights [experts, ...]
(``grouped_mm`` with offsets, as transformers traces them). Guarantees:

- What such products share their offsets with is one layer of experts. Before the first product its rows are sent to the
  ranks of their experts, after the last they come back (:mod:`autoplan.passes.expert_operators`); the operators in
  between work row by row, and any that does not is refused by name.
- ``parameters``: the stacked weights, of which every rank holds a run of experts, as :class:`Shard` of dimension 0.
  The ranks of the axis have different samples, so a share's gradient is whole on its rank but for the copies of it that
  other expert axes hold.
- ``origin`` names, for every node put in, the original node beside which it belongs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autoplan.capture.errors import node_line
from autoplan.errors import StrategyError
from autoplan.passes import expert_operators
from autoplan.passes.graph_facts import copy_graph
from autoplan.passes.lint_experts import EXPERTS, PRODUCTS, check_experts
from autoplan.passes.rewriting import LocalValues, origin_of, place_of
from autoplan.sharding.operation import GraphFacts, module_path, operator_key
from autoplan.sharding.registry import rule_of

NAME = "expert_parallel"
AXIS = "expert"
_ROWS, _WEIGHT, _OFFSETS = 0, 1, 2  # a product's arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGraph:
    """``parameters``: the names, as the graph reads them, of stacked weights that are split over the axis."""

    graph_module: GraphModule
    parameters: frozenset[str]
    origin: dict[str, str]


def expert_parallel(graph_module: GraphModule, *, degree: int) -> ExpertGraph:
    """``graph_module`` as every rank of an expert axis of ``degree`` runs it. Raises StrategyError where there are no
    experts, where they do not divide, or where an operator between their products does not work row by row;
    AutoplanError where the linter objects."""
    writer = _Writer(graph_module, degree)
    writer.write()
    writer.graph.lint()
    rewritten = GraphModule(graph_module, writer.graph, class_name="ExpertGraph")
    check_experts(rewritten, graph_module, writer.parameters, degree=degree)
    return ExpertGraph(
        graph_module=rewritten,
        parameters=frozenset(writer.parameters),
        origin=writer.origin,
    )


@dataclass(slots=True)
class _Writer:
    original: GraphModule
    degree: int
    graph: Graph = field(init=False)
    facts: GraphFacts = field(init=False)
    local_values: LocalValues = field(init=False)
    parameters: set[str] = field(init=False, default_factory=set)
    origin: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = copy_graph(self.original)
        self.facts = GraphFacts(GraphModule(self.original, self.graph), 1)
        self.local_values = LocalValues(self.degree)

    def write(self) -> None:
        layers: dict[Node, list[Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_function" and operator_key(node.target) in PRODUCTS and len(node.args) > _OFFSETS:
                layers.setdefault(node.args[_OFFSETS], []).append(node)
        if not layers:
            raise StrategyError(
                f"expert {self.degree} spreads experts over ranks, and this graph has no product grouped by expert",
                where="strategy key `expert`",
                legal="expert 1",
            )
        for offsets, products in layers.items():
            self._layer(offsets, products)

    def _layer(self, offsets: Node, products: Sequence[Node]) -> None:
        region = _between(products)
        for product in products:
            self._split_weight(product.args[_WEIGHT], product)
        entering = [(node, operand) for node in region for operand in self._entering_rows(node, products, region)]
        table, counts = self._route(offsets, region[0])
        dispatched: dict[Node, Node] = {}
        for node, operand in entering:
            if operand not in dispatched:
                with self.graph.inserting_before(node):
                    dispatched[operand] = self._exchange(expert_operators.dispatch_rows, operand, table, node)
            node.replace_input_with(operand, dispatched[operand])
        for product in products:
            product.update_arg(_OFFSETS, counts)
        for node in region:
            readers = [reader for reader in node.users if reader not in region]
            if readers:
                with self.graph.inserting_after(node):
                    combined = self._exchange(expert_operators.combine_rows, node, table, node)
                for reader in readers:
                    reader.replace_input_with(node, combined)

    def _route(self, offsets: Node, first: Node) -> tuple[Node, Node]:
        """Where rows go, and the offsets of this rank's experts, before ``first``."""
        value = offsets.meta["val"]
        local = self.local_values.of(value, 0)
        route = value.new_empty((2, self.degree, value.shape[0] // self.degree), dtype=torch.int64, device="cpu")
        with self.graph.inserting_before(first):
            routed = self._insert(expert_operators.route_rows, (offsets, AXIS), f"{offsets.name}_routed", first)
            counts = self._insert(operator.getitem, (routed, 0), f"{offsets.name}_own", first)
            table = self._insert(operator.getitem, (routed, 1), f"{offsets.name}_route", first)
        for node, meta in ((routed, (local, route)), (counts, local), (table, route)):
            node.meta["val"] = meta
        return table, counts

    def _exchange(self, function: Callable[..., Tensor], value: Node, route: Node, beside: Node) -> Node:
        name = {"dispatch_rows": "dispatched", "combine_rows": "combined"}[function.__name__]
        new = self._insert(function, (value, route, AXIS), f"{value.name}_{name}", beside)
        new.meta["val"] = value.meta["val"]
        return new

    def _insert(self, function: Callable[..., Any], args: tuple[Any, ...], name: str, beside: Node) -> Node:
        new = self.graph.create_node("call_function", function, args, {}, name=name)
        new.meta = {**place_of(beside), "autoplan_origin": origin_of(beside)}
        self.origin[new.name] = origin_of(beside)
        return new

    def _entering_rows(self, node: Node, products: Sequence[Node], region: Sequence[Node]) -> list[Node]:
        """The operands that bring rows from outside. Raises StrategyError where ``node`` does not work row by row."""
        if node in products:
            rows = node.args[_ROWS]
            return [rows] if isinstance(rows, Node) and rows not in region else []
        operation, rule = self.facts.operation(node), rule_of(node)
        inside = [slot for slot, operand in enumerate(operation.operands) if operand.node in region]
        for option in rule.options(operation, inside[0], EXPERTS) if rule is not None else ():
            by_row = option.output == EXPERTS and all(option.inputs[slot] == EXPERTS for slot in inside)
            if rule is not None and by_row and not rule.local_arguments(operation, option):
                rows_too = zip(operation.operands, option.inputs, strict=True)
                return [operand.node for operand, state in rows_too if state == EXPERTS and operand.node not in region]
        raise self._refusal(node, "does not work row by row")

    def _split_weight(self, weight: Any, product: Node) -> None:
        """Follow a stacked weight back to its parameter; everything on the way is local from here on."""
        node, reader = weight, product
        while True:
            if not isinstance(node, Node) or any(user is not reader for user in node.users):
                raise self._refusal(product, "has weights that something else reads too")
            (count,) = {shape[0] for shape in self.facts.shapes[node]}
            if count % self.degree:
                legal = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
                raise StrategyError(
                    f"expert {self.degree} does not divide the {count} experts of {module_path(product)}",
                    where=node_line(product),
                    legal=legal,
                )
            node.meta = {**node.meta, "val": self.local_values.of(node.meta["val"], 0)}
            if node.op == "get_attr":
                break
            operands, rule = self.facts.operation(node).operands, rule_of(node)
            kept = rule is not None and [
                option
                for option in rule.options(self.facts.operation(node), 0, EXPERTS)
                if option.output == EXPERTS and not rule.local_arguments(self.facts.operation(node), option)
            ]
            if len(operands) != 1 or not kept:
                raise self._refusal(node, "changes the order of stacked experts")
            node, reader = operands[0].node, node
        if self.facts.parameter(node) is None:
            raise self._refusal(product, "has experts that are no parameter")
        self.parameters.add(str(node.target))

    def _refusal(self, node: Node, why: str) -> StrategyError:
        name, path = operator_key(node.target), module_path(node)
        return StrategyError(
            f"expert {self.degree} spreads experts over ranks, and `{name}`{f' in {path}' if path else ''} {why}",
            where=node_line(node) or node.name,
            legal="expert 1",
        )


def _between(products: Sequence[Node]) -> list[Node]:
    """``products`` and what lies on a path from one to another, in the graph's order."""
    first, last = products[0], products[-1]
    span: list[Node] = []
    node = first
    while node is not last:
        span.append(node)
        node = node.next
    span.append(last)
    below = set(products)
    for node in span:
        if not below.isdisjoint(node.all_input_nodes):
            below.add(node)
    above = set(products)
    for node in reversed(span):
        if not above.isdisjoint(node.users):
            above.add(node)
    return [node for node in span if node in below and node in above]
