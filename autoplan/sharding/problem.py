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

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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


def build_problem(costs: Costs, fixed: Mapping[Node, Placement]) -> Problem:
    """The problem of one layer; ``fixed`` parameters are stored as said (tied ones must agree over layers)."""
    view, found = costs.view, costs.found
    problem = Problem(options=dict(found.options), stored=dict(found.stored))
    for node, each in costs.of_options.items():
        problem.variable[node] = problem.model.variable(each)
        if len(view.facts.operation(node).operands) <= 1:
            problem.followers.add(problem.variable[node])
    for node in found.stored:
        problem.stored[node] = (fixed[node],) if node in fixed else found.stored[node]
        problem.variable[node] = problem.model.variable(costs.of_storage(node, problem.stored[node]))
    _Edges(costs, problem).add()
    return problem


class Costs:
    """What a layer's options, storage and conversions cost, in microseconds, each priced once: the problem is stated
    again for every placement of a parameter that layers share."""

    def __init__(self, view: LayerView, found: Candidates, pricing: Pricing) -> None:
        self.view, self.found = view, found
        widest = _widest_bytes(view, found)
        if view.shares and widest:
            pricing = pricing.for_samples(max(1.0, FULL_BYTES / widest))
        self._collective_s = functools.cache(pricing.collective_s)
        reference_us = _MICROSECONDS * self._collective_s("all_reduce", widest)
        self._waste = MEMORY_WEIGHT * reference_us / (sum(_elements(view.facts, node) for node in found.stored) or 1)
        kept = (
            (MEMORY_WEIGHT if view.shares else ACTIVATION_WEIGHT)
            * reference_us
            / (sum(operator.saved_bytes for operator in view.operators) or 1)
        )
        of_nodes = list(zip(view.nodes, view.operators, strict=True))
        self._kept_us = {node: kept * operator.saved_bytes for node, operator in of_nodes}
        self.of_options: dict[Node, list[float]] = {}
        for node, operator in of_nodes:
            priced = _PricedOptions(view, node, operator, pricing)
            self.of_options[node] = [
                _MICROSECONDS * (priced.seconds(option) + self._internal_s(node, option))
                + (0.0 if option.keeps_share else self._kept_us[node])
                for option in found.options[node]
            ]
        self._conversions: dict[tuple[Node, Placement], dict[Placement, float]] = defaultdict(dict)

    @functools.cached_property
    def readers(self) -> dict[Node, dict[Node, tuple[int, ...]]]:
        """Of every value who reads it, and as which operands."""
        found: dict[Node, dict[Node, tuple[int, ...]]] = defaultdict(dict)
        for node in self.view.nodes:
            for slot, operand in enumerate(self.view.facts.operation(node).operands):
                found[operand.node][node] = (*found[operand.node].get(node, ()), slot)
        return found

    @functools.cached_property
    def wanted(self) -> dict[Node, dict[Node, list[frozenset[Placement]]]]:
        """Of every value the placements that each option of each reader wants it in."""
        return {
            value: {
                reader: [self._wanted(value, option, slots) for option in self.found.options[reader]]
                for reader, slots in by_reader.items()
            }
            for value, by_reader in self.readers.items()
        }

    def of_storage(self, parameter: Node, states: Sequence[Placement]) -> list[float]:
        """What storing a parameter in each of ``states`` costs."""
        elements = _elements(self.view.facts, parameter)
        return [
            (0.0 if isinstance(state, Shard) else self._waste * elements)
            + (self._step_us(parameter) if isinstance(state, Copied) else 0.0)
            for state in states
        ]

    def conversions(self, value: Node, sources: Sequence[Placement], target: Placement) -> list[float]:
        """From each of ``sources`` to ``target``."""
        known = self._conversions[value, target]
        for source in sources:
            if source not in known:
                known[source] = self._conversion(value, source, target)
        return [known[source] for source in sources]

    def _conversion(self, value: Node, source: Placement, target: Placement) -> float:
        stored = value in self.found.stored
        if stored and isinstance(source, Shard) and source != target:
            return float("inf")  # a parameter is split to save memory: it is not gathered again
        path = steps(source, target, differentiable=self.view.facts.differentiable[value])
        if path is None or (path and not isinstance(value.meta["val"], Tensor)):  # tuples are taken apart first
            return float("inf")
        size, _ = self.view.bytes_of(value)
        names = [name for step in path for name in (step.forward, step.backward) if name]
        gathered = bool(path) and isinstance(source, Shard)  # the whole is then what the backward keeps
        kept = self._kept_us.get(value, 0.0) if gathered else 0.0
        return kept + _MICROSECONDS * sum([self._collective_s(name, size) for name in names])

    def _wanted(self, value: Node, option: Option, slots: Sequence[int]) -> frozenset[Placement]:
        states = [option.inputs[slot] for slot in slots]
        gradient = self.view.facts.differentiable[value]
        return frozenset(states if gradient else [without_gradient(state) for state in states])

    def _internal_s(self, node: Node, option: Option) -> float:
        names = _INTERNAL.get(option.form, ())
        return sum([self._collective_s(name, self.view.bytes_of(node)[0]) for name in names])

    def _step_us(self, parameter: Node) -> float:
        """The sum over ranks of a parameter's gradient, once a step."""
        return STEP_SHARE * _MICROSECONDS * self._collective_s("all_reduce", self.view.bytes_of(parameter)[0])


class _Edges:
    """Conversions between a value's maker and its readers."""

    def __init__(self, costs: Costs, problem: Problem) -> None:
        self.costs, self.view, self.problem = costs, costs.view, problem

    def add(self) -> None:
        readers = self.costs.wanted
        for value, wanted in readers.items():
            self._value(value, wanted)
        for value in self.view.exported:  # read by another layer
            if value in self.problem.variable and value not in readers:
                self._unary(value, self.view.handed(value))

    def _value(self, value: Node, wanted: Mapping[Node, Sequence[frozenset[Placement]]]) -> None:
        exported, sources = value in self.view.exported, self._sources(value)
        if exported:
            self._unary(value, self.view.handed(value))
        if len(wanted) == 1 and not exported:
            ((reader, needs),) = wanted.items()
            columns = {need: self._sums(value, sources, need) for need in set(needs)}
            self._pair(value, reader, np.array([columns[need] for need in needs]).T)
            return
        targets = sorted({target for needs in wanted.values() for need in needs for target in need}, key=str)
        for target in targets:
            costs = self.costs.conversions(value, sources, target)
            if not any(costs) or (exported and target == self.view.handed(value)):
                continue
            demand = self.problem.model.variable([0.0, 0.0])
            self.problem.followers.add(demand)
            self._pair_with(value, demand, np.array([[0.0, cost] for cost in costs]))
            for reader, needs in wanted.items():
                rows = [[np.inf if target in need else 0.0, 0.0] for need in needs]
                if any(target in need for need in needs):
                    self.problem.model.pair(self.problem.variable[reader], demand, np.array(rows))

    def _sums(self, value: Node, sources: Sequence[Placement], targets: Iterable[Placement]) -> list[float]:
        """From each of ``sources`` to all of ``targets``."""
        each = [self.costs.conversions(value, sources, target) for target in targets]
        return [sum(column) for column in zip(*each, strict=True)]

    def _sources(self, value: Node) -> list[Placement]:
        """The placement that each choice of the value's maker gives it."""
        if value in self.problem.options:
            return [option.output for option in self.problem.options[value]]
        return list(self.problem.stored.get(value, (self.view.handed(value),)))

    def _unary(self, value: Node, target: Placement) -> None:
        costs = np.array(self.costs.conversions(value, self._sources(value), target))
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


class _PricedOptions:
    """Seconds of one operator under each of its options; those that divide it alike, along whatever dimension, are
    priced once."""

    def __init__(self, view: LayerView, node: Node, operator: Operator, pricing: Pricing) -> None:
        self._view, self._node, self._operator, self._pricing = view, node, operator, pricing
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, option: Option) -> float:
        divided = [isinstance(state, Shard) for state in (*option.inputs, option.output)]
        key = (*divided, option.keeps_share, option.gemm) if any(divided) else ()
        found = self._known.get(key)
        if found is None:
            local = local_operator(self._view, self._node, self._operator, option, whole=False)
            found = self._known[key] = self._pricing.operator_s(local)
        return found


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
