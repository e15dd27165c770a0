"""One layer as a pairwise problem: operators' options, parameters' storage, conversions counted once.

Objective, in microseconds of one sample:

    sum of operators' time (divided by the degree where split)
    + for every value and every placement it is wanted in: its conversion there, forward and backward
    + memory: what a replicated parameter, or a saved activation that is not split, wastes

The memory term states what the tensor axis is for: a layer's parameters, all replicated, are worth
:data:`MEMORY_WEIGHT` all-reduces of the widest value that enters or leaves the layer, in proportion to their elements.
So matrices are split wherever that costs a few all-reduces, norms and biases never by gathering activations, at any
size of model; saved activations likewise, at :data:`ACTIVATION_WEIGHT`, and under sequence parallelism, whose purpose
they are, at :data:`MEMORY_WEIGHT`: there a layer is solved for as many samples as make its widest value
:data:`FULL_BYTES`, because an all-gather and a reduce-scatter only cost what an all-reduce does where bytes count and
not start-ups. Whether splitting pays at all is the planner's question, which compares degrees by predicted times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from torch.fx import Node

from autoplan.layers.types import CollectiveName, Operator
from autoplan.sharding.candidates import Candidates
from autoplan.sharding.conversions import steps, without_gradient
from autoplan.sharding.layer_view import LayerView
from autoplan.sharding.local import local_operator
from autoplan.sharding.model import PairwiseModel
from autoplan.sharding.operation import GraphFacts
from autoplan.sharding.placements import Copied, Placement, Shard
from autoplan.sharding.pricing import Pricing
from autoplan.sharding.rules import Option

MEMORY_WEIGHT = 20.0
ACTIVATION_WEIGHT = 1.0
FULL_BYTES = 64 * 2.0**20  # fills the links of any group
_MICROSECONDS = 1e6
STEP_SHARE = 1e-3  # of a collective that is made once a step, in the price of one sample
# Forms that communicate their own result.
_INTERNAL: dict[str, tuple[CollectiveName, ...]] = {
    "add_after_reduce": ("all_reduce",),
    "add_after_scatter": ("reduce_scatter", "all_gather"),
}


@dataclass(slots=True)
class Problem:
    """The model with the meaning of its variables: ``options[variable]`` belongs to ``owner[variable]``."""

    model: PairwiseModel = field(default_factory=PairwiseModel)
    variable: dict[Node, int] = field(default_factory=dict)
    options: dict[Node, tuple[Option, ...]] = field(default_factory=dict)
    stored: dict[Node, tuple[Placement, ...]] = field(default_factory=dict)
    followers: set[int] = field(default_factory=set)


def build_problem(view: LayerView, found: Candidates, pricing: Pricing, fixed: Mapping[Node, Placement]) -> Problem:
    """The problem of one layer; ``fixed`` parameters are stored as said (tied ones must agree over layers)."""
    problem = Problem(options=dict(found.options), stored=dict(found.stored))
    widest = _widest_bytes(view, found)
    if view.shares and widest:
        pricing = pricing.for_samples(max(1.0, FULL_BYTES / widest))
    reference_us = _MICROSECONDS * pricing.collective_s("all_reduce", widest)
    waste = MEMORY_WEIGHT * reference_us / (sum(_elements(view.facts, node) for node in found.stored) or 1)
    kept = (
        (MEMORY_WEIGHT if view.shares else ACTIVATION_WEIGHT)
        * reference_us
        / (sum(operator.saved_bytes for operator in view.operators) or 1)
    )
    kept_us = {node: kept * operator.saved_bytes for node, operator in zip(view.nodes, view.operators, strict=True)}
    for node, operator in zip(view.nodes, view.operators, strict=True):
        costs = [
            _MICROSECONDS
            * (_operator_s(view, node, operator, option, pricing) + _internal_s(view, node, option, pricing))
            + (0.0 if option.keeps_share else kept_us[node])
            for option in found.options[node]
        ]
        problem.variable[node] = problem.model.variable(costs)
        if len(view.facts.operation(node).operands) <= 1:
            problem.followers.add(problem.variable[node])
    for node in found.stored:
        problem.stored[node] = (fixed[node],) if node in fixed else found.stored[node]
        elements = _elements(view.facts, node)
        costs = [
            (0.0 if isinstance(state, Shard) else waste * elements)
            + (_step_us(view, node, pricing) if isinstance(state, Copied) else 0.0)
            for state in problem.stored[node]
        ]
        problem.variable[node] = problem.model.variable(costs)
    _Edges(view, problem, pricing, kept_us).add()
    return problem


class _Edges:
    """Conversions between a value's maker and its readers."""

    def __init__(self, view: LayerView, problem: Problem, pricing: Pricing, kept_us: Mapping[Node, float]) -> None:
        self.view, self.problem, self.pricing, self.kept_us = view, problem, pricing, kept_us

    def add(self) -> None:
        readers: dict[Node, dict[Node, list[int]]] = defaultdict(lambda: defaultdict(list))
        for node in self.view.nodes:
            for slot, operand in enumerate(self.view.facts.operation(node).operands):
                readers[operand.node][node].append(slot)
        for value, by_reader in readers.items():
            self._value(value, by_reader)
        for value in self.view.exported:  # read by another layer
            if value in self.problem.variable and value not in readers:
                self._unary(value, self.view.handed(value))

    def _value(self, value: Node, by_reader: dict[Node, list[int]]) -> None:
        exported = value in self.view.exported
        wanted = {
            reader: [self._wanted(value, option, slots) for option in self.problem.options[reader]]
            for reader, slots in by_reader.items()
        }
        if exported:
            self._unary(value, self.view.handed(value))
        if len(wanted) == 1 and not exported:
            ((reader, needs),) = wanted.items()
            table = [
                [sum(self._cost(value, source, t) for t in need) for need in needs] for source in self._sources(value)
            ]
            self._pair(value, reader, np.array(table))
            return
        targets = sorted({target for needs in wanted.values() for need in needs for target in need}, key=str)
        for target in targets:
            costs = [self._cost(value, source, target) for source in self._sources(value)]
            if not any(costs) or (exported and target == self.view.handed(value)):
                continue
            demand = self.problem.model.variable([0.0, 0.0])
            self.problem.followers.add(demand)
            self._pair_with(value, demand, np.array([[0.0, cost] for cost in costs]))
            for reader, needs in wanted.items():
                rows = [[np.inf if target in need else 0.0, 0.0] for need in needs]
                if any(target in need for need in needs):
                    self.problem.model.pair(self.problem.variable[reader], demand, np.array(rows))

    def _wanted(self, value: Node, option: Option, slots: Sequence[int]) -> frozenset[Placement]:
        states = (option.inputs[slot] for slot in slots)
        gradient = self.view.facts.differentiable[value]
        return frozenset(state if gradient else without_gradient(state) for state in states)

    def _sources(self, value: Node) -> list[Placement]:
        """The placement that each choice of the value's maker gives it."""
        if value in self.problem.options:
            return [option.output for option in self.problem.options[value]]
        return list(self.problem.stored.get(value, (self.view.handed(value),)))

    def _cost(self, value: Node, source: Placement, target: Placement) -> float:
        stored = value in self.problem.stored
        if stored and isinstance(source, Shard) and source != target:
            return float("inf")  # a parameter is split to save memory: it is not gathered again
        path = steps(source, target, differentiable=self.view.facts.differentiable[value])
        if path is None or (path and not isinstance(value.meta["val"], Tensor)):  # tuples are taken apart first
            return float("inf")
        size, _ = self.view.bytes_of(value)
        names = [name for step in path for name in (step.forward, step.backward) if name]
        gathered = bool(path) and isinstance(source, Shard)  # the whole is then what the backward keeps
        kept = self.kept_us.get(value, 0.0) if gathered else 0.0
        return kept + _MICROSECONDS * sum(self.pricing.collective_s(name, size) for name in names)

    def _unary(self, value: Node, target: Placement) -> None:
        costs = np.array([self._cost(value, source, target) for source in self._sources(value)])
        variable = self.problem.variable[value]
        self.problem.model.costs[variable] = self.problem.model.costs[variable] + costs

    def _pair(self, value: Node, reader: Node, table: np.ndarray) -> None:
        if value in self.problem.variable:
            if table.any():
                self.problem.model.pair(self.problem.variable[value], self.problem.variable[reader], table)
        else:
            variable = self.problem.variable[reader]
            self.problem.model.costs[variable] = self.problem.model.costs[variable] + table[0]

    def _pair_with(self, value: Node, demand: int, table: np.ndarray) -> None:
        if value in self.problem.variable:
            self.problem.model.pair(self.problem.variable[value], demand, table)
        else:
            self.problem.model.costs[demand] = self.problem.model.costs[demand] + table[0]


def _elements(facts: GraphFacts, node: Node) -> int:
    parameter = facts.parameter(node)
    return 0 if parameter is None else parameter.numel()


def _operator_s(view: LayerView, node: Node, operator: Operator, option: Option, pricing: Pricing) -> float:
    return pricing.operator_s(local_operator(view, node, operator, option, whole=False))


def _internal_s(view: LayerView, node: Node, option: Option, pricing: Pricing) -> float:
    size, _ = view.bytes_of(node)
    return sum(pricing.collective_s(name, size) for name in _INTERNAL.get(option.form, ()))


def _step_us(view: LayerView, parameter: Node, pricing: Pricing) -> float:
    """The sum over ranks of a parameter's gradient, once a step."""
    return STEP_SHARE * _MICROSECONDS * pricing.collective_s("all_reduce", view.bytes_of(parameter)[0])


def _widest_bytes(view: LayerView, found: Candidates) -> float:
    """Bytes a sample of the widest value that enters or leaves the layer; of a lone layer, that a matrix makes."""
    inside = set(view.nodes)
    crossing = {*view.exported, *(operand for node in view.nodes for operand in node.all_input_nodes)}
    sizes = [
        view.bytes_of(value)[0]
        for value in crossing
        if (value in view.exported or value not in inside)
        and view.facts.differentiable[value]
        and view.facts.parameter(value) is None
        and view.facts.shapes[value][0]
    ]
    return max(
        sizes or [view.bytes_of(node)[0] for node in view.nodes if _reads_matrix(view, found, node)], default=0.0
    )


def _reads_matrix(view: LayerView, found: Candidates, node: Node) -> bool:
    operands = view.facts.operation(node).operands
    return any(operand.node in found.stored and len(operand.shape) > 1 for operand in operands)
