"""Tensor parallelism of a model: one exact problem a kind of layer, the same answer for all its layers.

Layers hand each other whole values (Replicate), or under sequence parallelism shares (:mod:`.sequence`). A kind's
candidates come from :mod:`.candidates`, its costs from :mod:`.problem`, the minimum from :mod:`.minimum`. Parameters
that several layers share (a tied embedding and head) are stored alike everywhere: the placement with the least sum over
the layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch.fx import Node

from autoplan.capture.errors import node_line
from autoplan.capture.types import Capture
from autoplan.cluster import Cluster
from autoplan.errors import StrategyError
from autoplan.layers.types import Edge, LayerGraph, LayerKind
from autoplan.sharding import minimum
from autoplan.sharding.candidates import Candidates, alike, batch_marks, candidates
from autoplan.sharding.heads import check_heads
from autoplan.sharding.layer_view import LayerView
from autoplan.sharding.local import local_kind
from autoplan.sharding.model import PairwiseModel
from autoplan.sharding.operation import GraphFacts, module_path
from autoplan.sharding.placements import REPLICATE, Placement, Shard
from autoplan.sharding.pricing import Pricing, price_on
from autoplan.sharding.problem import Costs, Problem, build_problem
from autoplan.sharding.registry import needs_no_rule, rule_of
from autoplan.sharding.rules import Option
from autoplan.sharding.sequence import handed_over

Minimise = Callable[[PairwiseModel, set[int]], list[int]]

_SHOWN = 4  # operators without a rule that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An operator without a rule: it runs whole on every rank. ``bytes_per_sample``: of its result."""

    operator: str
    node: str
    bytes_per_sample: float
    module_path: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSharding:
    """One kind of layer under a tensor degree. ``kind``: as one rank runs it; ``options``: in step with the nodes of
    its layers; ``stored``: in step with its parameters; ``objective_us``: see :mod:`.problem`; ``whole``: operators
    without a rule."""

    kind: LayerKind
    degree: int
    options: tuple[Option, ...]
    stored: tuple[Placement, ...]
    objective_us: float
    whole: tuple[Whole, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """A whole model under a tensor degree: what :mod:`autoplan.passes.shard_tensors` writes into the graph.

    ``options`` and ``layer_of`` by node name, ``parameters`` by the user's names (every name of a tied one).
    ``shares``: by node name what layers hand each other as shares of the sequence; empty without sequence parallelism.
    """

    degree: int
    kinds: tuple[KindSharding, ...]
    options: dict[str, Option]
    layer_of: dict[str, int]
    parameters: dict[str, Placement]
    shares: dict[str, Shard] = field(default_factory=dict)

    def edges(self, whole: tuple[Edge, ...]) -> tuple[Edge, ...]:
        """The edges between layers with the bytes that one rank sends, in step with ``whole``."""
        return _edges(whole, self.shares, self.degree)

    @property
    def whole(self) -> tuple[Whole, ...]:
        """Operators without a rule, once a kind of layer."""
        return tuple(entry for kind in self.kinds for entry in kind.whole)


def shard_kind(
    capture: Capture,
    layers: LayerGraph,
    kind: int,
    *,
    degree: int,
    cluster: Cluster | None = None,
    pricing: Pricing | None = None,
    sequence: bool = False,
) -> KindSharding:
    """The best split of one kind of layer over ``degree`` ranks; parameters shared with other kinds agree with them.

    Raises StrategyError where ``degree`` does not divide its attention heads; see :func:`shard_model`.
    """
    return _Solver(_Model(capture, layers), degree, _prices(cluster, degree, pricing), sequence=sequence).kind(kind)


def shard_model(
    capture: Capture,
    layers: LayerGraph,
    *,
    degree: int,
    cluster: Cluster | None = None,
    pricing: Pricing | None = None,
    like: Sharding | None = None,
    sequence: bool = False,
) -> Sharding:
    """The best split of every kind of layer. Raises StrategyError where ``degree`` does not divide attention heads.

    ``sequence``: layers hand each other shares of the sequence (sequence parallelism); raises StrategyError where they
    hand over none that ``degree`` divides. ``like``: the sharding of a larger model of the same kinds; what it splits
    is split here, as far as the sizes allow.
    """
    prices = _prices(cluster, degree, pricing)
    return _Solver(_Model(capture, layers), degree, prices, like, sequence=sequence).all_kinds()


class Shardings:
    """The shardings of one model on one cluster: what they have in common is read once, each is solved once."""

    def __init__(self, capture: Capture, layers: LayerGraph, cluster: Cluster) -> None:
        self._cluster = cluster
        self._model = _Model(capture, layers)
        self._solvers: dict[tuple[int, bool], _Solver] = {}

    def at(self, degree: int, *, sequence: bool = False) -> Sharding:
        """What :func:`shard_model` gives; raises as it does."""
        return self._solver(degree, sequence).all_kinds()

    def kinds(self, degree: int, *, sequence: bool = False) -> tuple[LayerKind, ...]:
        """The kinds of layers as one rank runs them: all that a plan is priced by."""
        return tuple(solved.kind for solved in self._solver(degree, sequence).kinds)

    def edges(self, degree: int, *, sequence: bool = False) -> tuple[Edge, ...]:
        """The edges between layers with the bytes that one rank sends."""
        return _edges(self._model.layers.edges, self._solver(degree, sequence).shares_by_name, degree)

    def without_rule(self, degree: int) -> tuple[str, ...]:
        """Which operators run whole on every rank, for want of a rule, and what that costs, as a sentence; () if none
        does."""
        found: dict[str, Whole] = {}
        for solved in self._solver(degree, False).kinds:
            for entry in solved.whole:
                if entry.operator not in found or entry.bytes_per_sample > found[entry.operator].bytes_per_sample:
                    found[entry.operator] = entry
        if not found:
            return ()
        shown = [_described(entry) for entry in sorted(found.values(), key=lambda each: -each.bytes_per_sample)]
        more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        said = f"no rule says how these split, so each tensor rank runs them whole: {', '.join(shown[:_SHOWN])}{more}"
        return (f"{said} (autoplan.sharding.register_rule gives one)",)

    def _solver(self, degree: int, sequence: bool) -> _Solver:
        key = (degree, sequence)
        if key not in self._solvers:
            self._solvers[key] = _Solver(self._model, degree, price_on(self._cluster, degree), sequence=sequence)
        return self._solvers[key]


def _described(entry: Whole) -> str:
    bytes_ = entry.bytes_per_sample
    size = f"{bytes_ / 2**20:.1f} MiB" if bytes_ >= 2**20 else f"{bytes_ / 2**10:.1f} KiB"
    return f"{entry.operator.removesuffix('.default')} ({size} a sample{f', {entry.source}' if entry.source else ''})"


def _edges(whole: tuple[Edge, ...], shares: Mapping[str, Shard], degree: int) -> tuple[Edge, ...]:
    return tuple(
        dataclasses.replace(edge, bytes_per_sample=edge.bytes_per_sample / degree) if edge.value in shares else edge
        for edge in whole
    )


def _prices(cluster: Cluster | None, degree: int, pricing: Pricing | None) -> Pricing:
    if pricing is not None:
        return pricing
    if cluster is None:
        raise StrategyError("splitting tensors needs a cluster to price it on", legal="cluster= or pricing=")
    return price_on(cluster, degree)


class _Model:
    """What no degree changes: the graph's facts, its nodes by name and by layer, its parameters."""

    def __init__(self, capture: Capture, layers: LayerGraph) -> None:
        self.capture, self.layers = capture, layers
        self.facts = GraphFacts(capture.graph_module, 1)
        self.by_name = {node.name: node for node in self.facts.graph.nodes}
        self.first = _first_of_kind(layers)
        self.counts = [sum(layer.kind == index for layer in layers.layers) for index in range(len(layers.kinds))]
        self.sizes: dict[Node, tuple[float, bool]] = {}
        self._facts_at: dict[int, GraphFacts] = {}

    def facts_at(self, degree: int) -> GraphFacts:
        """The graph's facts for a degree, the same for all who ask."""
        if degree not in self._facts_at:
            self._facts_at[degree] = self.facts.at(degree)
        return self._facts_at[degree]

    @cached_property
    def inputs(self) -> list[Node]:
        """The batch's tensors."""
        return [node for node in self.facts.graph.nodes if node.op == "placeholder"]

    @cached_property
    def twins(self) -> dict[Node, Node]:
        """Of every layer's node the one in its place in the first layer of the kind."""
        found: dict[Node, Node] = {}
        for layer, nodes in zip(self.layers.layers, self.layer_nodes, strict=True):
            found.update(zip(nodes, self.layer_nodes[self.first[layer.kind]], strict=True))
        return found

    @cached_property
    def parameters(self) -> dict[Node, int]:
        """The nodes that read a Parameter, with its identity."""
        read = ((node, self.facts.parameter(node)) for node in self.facts.graph.nodes if node.op == "get_attr")
        return {node: id(parameter) for node, parameter in read if parameter is not None}

    @cached_property
    def parameter_ids(self) -> dict[str, int]:
        """The identity of every Parameter by the names under which the graph reads it."""
        return {str(node.target): parameter for node, parameter in self.parameters.items()}

    @cached_property
    def reads(self) -> Counter[int]:
        """How many nodes read each Parameter."""
        return Counter(self.parameters.values())

    @cached_property
    def aliases(self) -> dict[str, tuple[str, ...]]:
        """All names of each tied Parameter."""
        return {name: tuple(group) for group in self.capture.tied for name in group}

    @cached_property
    def layer_nodes(self) -> list[tuple[Node, ...]]:
        """The nodes of each layer."""
        return [tuple(self.by_name[name] for name in layer.nodes) for layer in self.layers.layers]

    @cached_property
    def exported(self) -> list[Node]:
        """What layers read of each other, or nothing reads."""
        layer_of = {node: index for index, nodes in enumerate(self.layer_nodes) for node in nodes}
        return [node for node, i in layer_of.items() if any(layer_of.get(reader) != i for reader in node.users)]


class _Solver:
    """All kinds of one model at one degree."""

    def __init__(
        self,
        model: _Model,
        degree: int,
        pricing: Pricing,
        like: Sharding | None = None,
        *,
        sequence: bool = False,
    ) -> None:
        if degree < 1:
            raise StrategyError(f"tensor degree {degree}", legal="a whole number of at least 1")
        self.model, self.pricing = model, pricing
        self.capture, self.layers, self.first = model.capture, model.layers, model.first
        self.facts = model.facts_at(degree)
        # A matter of shapes, so alike in layers of a kind.
        self.shares = handed_over(self.capture, self.facts, model.exported) if sequence and degree > 1 else None
        self.views = [self._view(index) for index in self.first]
        for view in self.views:
            check_heads(self.facts, view.nodes)
        firsts = [model.layer_nodes[index] for index in sorted(self.first)]
        marks = batch_marks(self.facts, model.inputs, firsts, model.twins, positions=self.shares is None)
        self.found: list[Candidates] = [candidates(self.facts, view.nodes, marks, self.shares) for view in self.views]
        if like is not None:
            self.found = [alike(found, like.kinds[index].options) for index, found in enumerate(self.found)]
        self._priced: dict[int, Costs] = {}
        self._answers: dict[tuple[object, ...], tuple[Problem, list[int]]] = {}
        self.owners = self._owners()
        self.shared = self._agree()

    @cached_property
    def kinds(self) -> tuple[KindSharding, ...]:
        """Every kind's minimum."""
        return tuple(self.kind(kind) for kind in range(len(self.layers.kinds)))

    @cached_property
    def shares_by_name(self) -> dict[str, Shard]:
        """What layers hand each other as shares of the sequence."""
        return {node.name: state for node, state in (self.shares or {}).items()}

    def all_kinds(self) -> Sharding:
        """Every kind's minimum, written to every layer."""
        kinds = self.kinds
        options: dict[str, Option] = {}
        layer_of: dict[str, int] = {}
        for index, layer in enumerate(self.layers.layers):
            options.update(zip(layer.nodes, kinds[layer.kind].options, strict=True))
            layer_of.update(dict.fromkeys(layer.nodes, index))
        return Sharding(
            degree=self.facts.degree,
            kinds=kinds,
            options=options,
            layer_of=layer_of,
            parameters=self._parameter_names(kinds),
            shares=self.shares_by_name,
        )

    def kind(self, index: int) -> KindSharding:
        """The kind's minimum with shared parameters as agreed."""
        view = self.views[index]
        problem, choices = self._solve(index, self._fixed(index, self.shared))
        chosen = {node: problem.options[node][choices[problem.variable[node]]] for node in view.nodes}
        stored = {node: states[choices[problem.variable[node]]] for node, states in problem.stored.items()}
        by_parameter = {self.model.parameters[node]: state for node, state in stored.items()}
        layer = self.layers.layers[self.first[index]]
        by_role = tuple(by_parameter.get(self._parameter_id(name), REPLICATE) for name in layer.parameters)
        return KindSharding(
            kind=local_kind(view, self.layers.kinds[index], chosen, stored, by_role),
            degree=self.facts.degree,
            options=tuple(chosen[node] for node in view.nodes),
            stored=by_role,
            objective_us=problem.model.objective(choices),
            whole=tuple(_whole(view, node) for node in view.nodes if self._lacks_rule(node)),
        )

    def _parameter_names(self, kinds: tuple[KindSharding, ...]) -> dict[str, Placement]:
        """The placement of every parameter, by each of its names."""
        found: dict[str, Placement] = {}
        for layer in self.layers.layers:
            for name, placement in zip(layer.parameters, kinds[layer.kind].stored, strict=True):
                for alias in self.model.aliases.get(name, (name,)):
                    found[alias] = placement
        for name in self.model.parameter_ids:
            found.setdefault(name, REPLICATE)
        return found

    def _view(self, index: int) -> LayerView:
        layer, nodes = self.layers.layers[index], self.model.layer_nodes[index]
        inside = set(nodes)
        exported = {
            node for node in nodes if any(reader not in inside for reader in node.users) and self.facts.shapes[node]
        }
        return LayerView(
            facts=self.facts,
            nodes=nodes,
            operators=self.layers.kinds[layer.kind].operators,
            exported=frozenset(exported),
            batch_size=self.capture.batch_size,
            dynamic=self.capture.dynamic_batch,
            shares=self.shares or {},
            sizes=self.model.sizes,
        )

    def _solve(self, index: int, fixed: Mapping[Node, Placement]) -> tuple[Problem, list[int]]:
        key = (index, *fixed.items())
        if key not in self._answers:
            problem = build_problem(self._costs(index), fixed)
            self._answers[key] = problem, minimum.minimise(problem.model, problem.followers)
        return self._answers[key]

    def _costs(self, index: int) -> Costs:
        if index not in self._priced:
            self._priced[index] = Costs(self.views[index], self.found[index], self.pricing)
        return self._priced[index]

    def _owners(self) -> dict[int, set[int]]:
        """Kinds that use each Parameter, by its identity."""
        owners: dict[int, set[int]] = defaultdict(set)
        for index, found in enumerate(self.found):
            for node in found.stored:
                owners[self.model.parameters[node]].add(index)
        return owners

    def _agree(self) -> dict[int, Placement]:
        """One placement for each Parameter that several layers, or several names in one, use."""
        agreed: dict[int, Placement] = {}
        for parameter in self._shared_parameters():
            options = [
                {
                    state
                    for node, states in self.found[kind].stored.items()
                    for state in states
                    if self.model.parameters[node] == parameter
                }
                for kind in self.owners[parameter]
            ]
            best: tuple[float, Placement] = (math.inf, REPLICATE)
            for state in sorted(set.intersection(*options), key=str):
                total = 0.0
                for kind in sorted(self.owners[parameter]):
                    problem, choices = self._solve(kind, self._fixed(kind, {**agreed, parameter: state}))
                    total += self.model.counts[kind] * problem.model.objective(choices)
                best = min(best, (total, state), key=lambda entry: entry[0])
            agreed[parameter] = best[1]
        return agreed

    def _shared_parameters(self) -> list[int]:
        reads = self.model.reads
        return [p for p, kinds in self.owners.items() if len(kinds) > 1 or reads[p] > 1]

    def _fixed(self, kind: int, agreed: Mapping[int, Placement]) -> dict[Node, Placement]:
        stored = self.found[kind].stored
        return {node: agreed[p] for node in stored if (p := self.model.parameters[node]) in agreed}

    def _parameter_id(self, name: str) -> int:
        names = self.model.aliases.get(name, (name,))
        return next((self.model.parameter_ids[alias] for alias in names if alias in self.model.parameter_ids), 0)

    def _lacks_rule(self, node: Node) -> bool:
        return rule_of(node) is None and self.facts.differentiable[node] and not needs_no_rule(node)


def _first_of_kind(layers: LayerGraph) -> list[int]:
    first: dict[int, int] = {}
    for index, layer in enumerate(layers.layers):
        first.setdefault(layer.kind, index)
    return [first[kind] for kind in range(len(layers.kinds))]


def _whole(view: LayerView, node: Node) -> Whole:
    return Whole(
        operator=str(node.target),
        node=node.name,
        bytes_per_sample=view.bytes_of(node)[0],
        module_path=module_path(node),
        source=node_line(node),
    )
