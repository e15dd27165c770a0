"""Which placements each value of a layer may have, and which options each operator: a fixed point over the rules.

Seeds are the dimensions of the layer's weight matrices that divide by the degree. A placement of a value is handed
to the rules of its maker and its readers, which answer with whole options; their other placements are handed on in
turn. So a packed qkv learns from the output projection behind attention that it must be cut in three parts by heads.

The tensor axis splits what parameters span: features, heads, vocabulary; what layers hand each other, from the next
product on. Samples and positions are for the data and context axes, so a placement that the batch's own dimensions
reach (followed forward from the inputs) is left out.

Under sequence parallelism positions are the tensor axis' too: the shares that layers hand each other are seeds as well,
a parameter may be kept whole with a summand of its gradient on every rank (Copied), and a product whose sum over ranks
becomes a share of the sequence adds its bias to that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autoplan.sharding.operation import GraphFacts, Operation
from autoplan.sharding.placements import COPIED, PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import RESULT, Option, Rule, absent

Marks = Mapping[Node, frozenset[Shard]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """``options`` of each node of the layer; ``stored``: how each of its parameters may be kept."""

    options: dict[Node, tuple[Option, ...]]
    stored: dict[Node, tuple[Placement, ...]]


def alike(found: Candidates, wanted: Sequence[Option]) -> Candidates:
    """Of each node's options those that split what ``wanted`` (another model's, in step with the nodes) splits; all
    of them where none does."""
    options = {}
    for (node, own), model in zip(found.options.items(), wanted, strict=True):
        same = tuple(option for option in own if _pattern(option) == _pattern(model))
        options[node] = same or own
    return Candidates(options, found.stored)


def _pattern(option: Option) -> tuple[object, ...]:
    """An option without its sizes."""
    states = (
        (type(s), s.dim, len(s.parts), bool(s.block)) if isinstance(s, Shard) else (type(s),)
        for s in (*option.inputs, option.output)
    )
    return (option.form, *states)


def candidates(
    facts: GraphFacts, nodes: Sequence[Node], marks: Marks, shares: Mapping[Node, Shard] | None = None
) -> Candidates:
    """All options of ``nodes`` (one layer, in graph order). ``shares``: what layers hand each other as shares of the
    sequence, None without sequence parallelism."""
    search = _Search(facts, nodes, marks)
    if facts.degree == 1:
        return Candidates(
            {node: _whole(facts, node)[:1] for node in nodes}, dict.fromkeys(search.parameters, (REPLICATE,))
        )
    search.run(shares or {})
    partial: dict[Node, bool] = {}
    options: dict[Node, tuple[Option, ...]] = {}
    for node in nodes:
        found = [*_whole(facts, node), *search.options[node], *_summands(facts, node, partial)]
        if shares is not None:
            found += scattered_sums(facts.operation(node), found, search.states[node])
        partial[node] = any(isinstance(option.output, Partial) for option in found)
        options[node] = tuple(dict.fromkeys(found))
    if shares is None:
        options = _whole_streams(facts, nodes, options)
    stored: dict[Node, tuple[Placement, ...]] = {
        node: (*_unsplit(facts, node, shares is not None), *sorted(search.states[node], key=str))
        for node in search.parameters
    }
    return Candidates(options, stored)


def _whole_streams(
    facts: GraphFacts, nodes: Sequence[Node], options: Mapping[Node, tuple[Option, ...]]
) -> dict[Node, tuple[Option, ...]]:
    """Without the options that cut what other layers hand over, whole, before it comes to a product.

    Norms and residual adds of a share of the features would need a collective more each; cutting what is handed over
    is what sequence parallelism does better.
    """
    stream: set[Node] = set()
    inside = set(nodes)
    found = dict(options)
    for node in nodes:
        operands = [operand.node for operand in facts.operation(node).operands]
        if any(facts.parameter(operand) is not None and len(facts.shapes[operand][0]) > 1 for operand in operands):
            continue
        handed = {v for v in operands if v in stream or (v not in inside and v.op != "get_attr")}
        streaming = [value in handed and facts.differentiable[value] for value in operands]
        if not any(streaming):
            continue
        stream.add(node)
        found[node] = tuple(
            option
            for option in options[node]
            if not any(s and isinstance(state, Shard) for s, state in zip(streaming, option.inputs, strict=True))
        )
    return found


def _unsplit(facts: GraphFacts, parameter: Node, sequence: bool) -> tuple[Placement, ...]:
    return (REPLICATE, COPIED) if sequence and facts.differentiable[parameter] else (REPLICATE,)


def scattered_sums(operation: Operation, known: Iterable[Option], states: Iterable[Shard]) -> Iterator[Option]:
    """For each option of a product that adds its bias after the sum over ranks: the sum as a share of one of
    ``states``, and the bias added to that."""
    if operation.key not in ("linear", "addmm"):
        return
    late = [option for option in known if option.form == "add_after_reduce"]
    shares = [state for state in states if state.dim < len(operation.shape) - 1]
    for option in late:
        inputs = tuple(
            absent(operation, slot) if isinstance(state, Replicate) else state
            for slot, state in enumerate(option.inputs)
        )
        for share in shares:
            yield Option(inputs, share, "add_after_scatter", option.gemm)


def batch_marks(
    facts: GraphFacts,
    inputs: Iterable[Node],
    layers: Iterable[Sequence[Node]],
    twins: Mapping[Node, Node],
    *,
    positions: bool = True,
) -> Marks:
    """Placements that split the batch's own dimensions, for every value.

    ``twins``: of every node of a layer the node in its place in the first layer of the kind, whose marks it shares;
    that layer's own are their own. ``layers``: those first ones, ascending. Without ``positions`` only the samples'.
    """
    marks = _Marks(twins)
    for node in inputs:
        shapes = facts.shapes[node]
        dims = range(len(shapes[0]) if positions else min(1, len(shapes[0]))) if shapes else range(0)
        marks[node] = frozenset(Shard(dim) for dim in dims if Shard(dim).divides(shapes[0][dim], facts.degree))
    for layer in layers:
        for node in layer:
            marks[node] = _marks_of(facts, node, marks)
    return marks


class _Marks(dict[Node, frozenset[Shard]]):
    """Of a repeated layer's nodes the marks of their twins; of what is in no layer none."""

    def __init__(self, twins: Mapping[Node, Node]) -> None:
        super().__init__()
        self._twins = twins

    def __missing__(self, node: Node) -> frozenset[Shard]:
        twin = self._twins.get(node, node)
        return self[twin] if twin is not node else frozenset()


def _marks_of(facts: GraphFacts, node: Node, marks: Marks) -> frozenset[Shard]:
    rule = rule_of(node)
    if rule is None or not facts.shapes[node]:
        return frozenset()
    operation = facts.operation(node)
    found: set[Shard] = set()
    for slot, operand in enumerate(operation.operands):
        for state in marks[operand.node]:
            answers = _answers(facts, rule, operation, slot, state)
            found |= {option.output for option in answers if isinstance(option.output, Shard)}
    return frozenset(found)


def _answers(facts: GraphFacts, rule: Rule, operation: Operation, slot: int, state: Shard) -> tuple[Option, ...]:
    """What a rule answers, asked once a degree: with and without sequence parallelism the questions are the same."""
    key = (operation.node, slot, state)
    known = facts.answers.get(key)
    if known is None:
        known = facts.answers[key] = tuple(rule.options(operation, slot, state))
    return known


class _Search:
    def __init__(self, facts: GraphFacts, nodes: Sequence[Node], marks: Marks) -> None:
        self.facts, self.marks = facts, marks
        # What no parameter reaches is computed on every stage that needs it, whole.
        self.nodes = [node for node in nodes if facts.parametric[node]]
        self.inside = set(self.nodes)
        self.options: dict[Node, list[Option]] = {node: [] for node in nodes}
        self.states: dict[Node, set[Shard]] = defaultdict(set)
        self.readers: dict[Node, list[tuple[Operation, int]]] = defaultdict(list)
        for node in self.nodes:
            if rule_of(node) is not None and facts.shapes[node]:
                operation = facts.operation(node)
                for slot, operand in enumerate(operation.operands):
                    self.readers[operand.node].append((operation, slot))
        read = dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes)
        self.parameters = [node for node in read if facts.parameter(node) is not None]
        self.queue: deque[tuple[Node, Shard]] = deque()

    def run(self, shares: Mapping[Node, Shard]) -> None:
        read = {operand for node in self.nodes for operand in node.all_input_nodes}
        for value, state in shares.items():
            if value in self.inside or value in read:
                self.states[value].add(state)
                self.queue.append((value, state))
        for parameter in self.parameters:
            shape = self.facts.shapes[parameter][0]
            if len(shape) > 1:
                for dim in range(len(shape)):
                    self._note(parameter, Shard(dim))
        while self.queue:
            value, state = self.queue.popleft()
            for operation, slot in self.readers[value]:
                self._ask(operation, slot, state)
            if value in self.inside and rule_of(value) is not None:
                self._ask(self.facts.operation(value), RESULT, state)

    def _ask(self, operation: Operation, slot: int, state: Shard) -> None:
        rule = rule_of(operation.node)
        if rule is None:
            return
        for option in _answers(self.facts, rule, operation, slot, state):
            if option not in self.options[operation.node] and self._legal(operation, option):
                self.options[operation.node].append(option)
                for operand, placement in zip(operation.operands, option.inputs, strict=True):
                    self._note(operand.node, placement)
                self._note(operation.node, option.output)

    def _note(self, value: Node, state: Placement) -> None:
        known = value in self.inside or value in self.parameters
        if isinstance(state, Shard) and known and state not in self.states[value] and self._fits(value, state):
            self.states[value].add(state)
            self.queue.append((value, state))

    def _legal(self, operation: Operation, option: Option) -> bool:
        placed = [*zip((operand.node for operand in operation.operands), option.inputs, strict=True)]
        placed.append((operation.node, option.output))
        return all(self._fits(value, state) for value, state in placed if isinstance(state, Shard))

    def _fits(self, value: Node, state: Shard) -> bool:
        shapes = self.facts.shapes[value]
        divides = all(state.dim < len(shape) and state.divides(shape[state.dim], self.facts.degree) for shape in shapes)
        return divides and state not in self.marks[value]


def _whole(facts: GraphFacts, node: Node) -> tuple[Option, ...]:
    """Run whole on every rank; with gradients alike, or as summands (then its operands' are summands too)."""
    operation = facts.operation(node)
    alike = Option((REPLICATE,) * len(operation.operands), REPLICATE)
    in_place = operation.key.endswith("_") and not operation.key.startswith("__")
    if not operation.differentiable or in_place or rule_of(node) is None:
        return (alike,)
    return alike, Option(tuple(absent(operation, slot) for slot in range(len(operation.operands))), COPIED)


def _summands(facts: GraphFacts, node: Node, partial: Mapping[Node, bool]) -> tuple[Option, ...]:
    """Pass summands on, where the operator is linear and all its operands may be summands."""
    rule = rule_of(node)
    operation = facts.operation(node)
    can = bool(operation.operands) and all(partial.get(operand.node, False) for operand in operation.operands)
    if rule is None or not can or not rule.passes_partial(operation):
        return ()
    return (Option((PARTIAL,) * len(operation.operands), PARTIAL),)
