"""Write the context axis into a graph: every rank works on its positions of each sequence of the batch.

Requires a graph whose nodes carry ``meta["val"]`` and whose loss adds up over parts
(:mod:`autoplan.passes.weight_loss`); the tensor axis may be written into it already. Guarantees:

- The batch's tensors and what is computed of them alone (positions, masks, labels) stay whole on every rank, which
  takes its positions of them where they meet a value that is split; so positions are those of the whole sequence.
- From the first parameter on a value is one of three: this rank's positions (:class:`Shard`), whole with a summand of
  its gradient on every rank (:class:`Copied`, as every parameter is), or a summand (:class:`Partial`, as the loss is).
  The factor rules say which an operator makes of which; there is nothing to choose.
- Attention gathers keys and values (:func:`autoplan.passes.context_operators.positions_attention`), and so do
  products that an attention is written out in. Any other operator that works along the sequence is refused by name.
- ``summands``: all parameters. Their gradients are summed over the axis, as over the data axis.

Local literals are checked by running their operators on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autoplan.capture.errors import node_line
from autoplan.capture.types import InputSpec
from autoplan.errors import StrategyError
from autoplan.passes import context_operators, context_rules
from autoplan.passes.context_rules import can_be_dealt, is_in_place, is_whole
from autoplan.passes.lint_context import check_positions
from autoplan.passes.misread import shapes_of, shapes_when_run
from autoplan.passes.rewriting import AxisWriter, LocalValues, layout, origin_of, override, place_of
from autoplan.sharding.operation import GraphFacts, Operation, module_path, rebuild
from autoplan.sharding.placements import PARTIAL, Copied, Partial, Placement, Replicate, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import Option

NAME = "context_parallel"
AXIS = "context"
_SEQUENCE = 1  # the dimension of [batch, sequence, ...]
_GATHERED = frozenset(("matmul", "bmm"))  # one operand may be gathered: an attention's products, written out
_SUFFIX = {
    context_operators.own_positions: "positions",
    context_operators.all_positions: "all_positions",
    context_operators.sum_over_axis: "over_context",
    context_operators.share_of: "share",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGraph:
    """``origin``: original node names of inserted nodes; ``placements``: how each node's value lies over the axis."""

    graph_module: GraphModule
    origin: dict[str, str]
    placements: dict[str, Placement]


def context_parallel(
    graph_module: GraphModule, inputs: Sequence[InputSpec], *, degree: int, layer_of: Mapping[str, int]
) -> ContextGraph:
    """``graph_module`` as every rank of a context axis of ``degree`` runs it; a value is converted once a layer,
    ``layer_of`` by node name. Raises StrategyError where the batch holds no sequence that can be dealt out, or an
    operator works along it; AutoplanError where the linter objects."""
    writer = _Writer(graph_module, degree, layer_of, _sequences(inputs, degree))
    written = writer.write()
    placements = check_positions(written, graph_module, degree=degree)
    return ContextGraph(graph_module=written, origin=writer.origin, placements=placements)


def _sequences(inputs: Sequence[InputSpec], degree: int) -> frozenset[str]:
    """The placeholders whose dimension 1 is a sequence: ids [batch, sequence], values [batch, sequence, width].

    Raises StrategyError where there are none, or they cannot be dealt out in two pieces a rank.
    """
    found = {
        spec.placeholder: spec.shape[_SEQUENCE]
        for spec in inputs
        if spec.batched and len(spec.shape) == (3 if spec.dtype.is_floating_point else 2)
    }
    odd = {name: length for name, length in found.items() if length % (2 * degree)}
    if found and not odd:
        return frozenset(found)
    name, length = next(iter(odd.items()), ("", 0))
    legal = [str(d) for d in range(1, length // 2 + 1) if length % (2 * d) == 0]
    raise StrategyError(
        f"context {degree} cannot deal out the {length} positions of `{name}` evenly: each rank takes two pieces"
        if odd
        else f"context {degree} splits the sequence, and the batch holds none: no ids [batch, sequence], no values "
        "[batch, sequence, width]",
        where="strategy key `context`",
        legal=", ".join(legal[:12]) or "1",
    )


@dataclass(slots=True)
class _Writer(AxisWriter):
    graph_module: GraphModule
    degree: int
    layer_of: Mapping[str, int]
    sequences: frozenset[str]
    facts: GraphFacts = field(init=False)  # what is local: 1 / degree of the sequence
    dealt: GraphFacts = field(init=False)  # what may be dealt out: in two pieces a rank
    graph: Graph = field(init=False, default_factory=Graph)
    origin: dict[str, str] = field(init=False, default_factory=dict)
    written: dict[Node, Node] = field(init=False, default_factory=dict)
    placed: dict[Node, Placement] = field(init=False, default_factory=dict)
    marks: dict[Node, frozenset[Shard]] = field(init=False, default_factory=dict)  # sequences of whole values
    layers: dict[Node, int] = field(init=False, default_factory=dict)
    converted: dict[tuple[Node, str, int], Node] = field(init=False, default_factory=dict)
    local_values: LocalValues = field(init=False)

    def __post_init__(self) -> None:
        self.facts = GraphFacts(self.graph_module, self.degree)
        self.dealt = self.facts.at(2 * self.degree)
        self.local_values = LocalValues(self.degree)

    def write(self) -> GraphModule:
        for node in self.facts.graph.nodes:
            self.layers[node] = self._layer(node)
            if node.op == "call_function":
                self._write_operator(node)
            elif node.op == "output":
                self._write_output(node)
            else:
                self._write_source(node)
        self.graph.lint()
        return GraphModule(self.graph_module, self.graph, class_name="ContextGraph")

    def _layer(self, node: Node) -> int:
        name = origin_of(node)
        if name in self.layer_of:
            return self.layer_of[name]
        return max((self.layers[parent] for parent in node.all_input_nodes if parent in self.layers), default=-1)

    def _write_source(self, node: Node) -> None:
        new = self.graph.node_copy(node, lambda child: self.written[child])
        self.written[node], self.placed[node] = new, self._whole(node)
        self.marks[node] = frozenset({Shard(_SEQUENCE)} if node.name in self.sequences else ())

    def _write_output(self, node: Node) -> None:
        values = {child: self._value(child, PARTIAL, node) for child in node.all_input_nodes}
        self.graph.output(torch.fx.node.map_arg(node.args[0], values.__getitem__)).meta = dict(node.meta)

    def _write_operator(self, node: Node) -> None:
        operation = self.dealt.operation(node)
        option = self._option(node, operation)
        operands = tuple(
            self._value(operand.node, state, node)
            for operand, state in zip(operation.operands, option.inputs, strict=True)
        )
        if option.form == "positions_attention":
            self.written[node] = self._attention(node, operation, operands)
        else:
            self.written[node] = self._plain(node, option, operands)
        self.written[node].meta = self._meta(node, option.output)
        self.placed[node] = option.output
        self._check_literals(node, option)
        if not self.dealt.parametric[node]:
            self.marks[node] = self._marks(operation)

    def _whole(self, node: Node) -> Placement:
        return context_rules.whole(self.facts.differentiable[node])

    # ---------------------------------------------------------------------------------------- what an operator makes

    def _option(self, node: Node, operation: Operation) -> Option:
        states = [self.placed[operand.node] for operand in operation.operands]
        split = [(slot, state) for slot, state in enumerate(states) if isinstance(state, Shard)]
        if not split and self.dealt.parametric[node]:
            split = [(slot, mark) for slot, o in enumerate(operation.operands) for mark in self.marks.get(o.node, ())]
        if split:
            found = (o for slot, state in split for o in context_rules.options(operation, slot, state))
            option = next((o for o in found if self._reachable(operation, o, states)), None)
            if option is None:
                raise self._refusal(node)
            return option
        if any(isinstance(state, Partial) for state in states):
            return self._of_summands(node, operation, states)
        return Option(tuple(self._whole(operand.node) for operand in operation.operands), self._whole(node))

    def _reachable(self, operation: Operation, option: Option, states: Sequence[Placement]) -> bool:
        """Whether the operands can be placed so, without gathering what is not keys and values."""
        results = [(shape, option.output) for shape in operation.shapes]
        if any(isinstance(state, Shard) and not can_be_dealt(shape, state, self.degree) for shape, state in results):
            return False
        if is_in_place(operation) and states[0] != option.inputs[0]:
            return False
        return option.form in ("plain", "positions_attention") and all(
            self._leads(operation, slot, have, want, option)
            for slot, (have, want) in enumerate(zip(states, option.inputs, strict=True))
        )

    def _leads(self, operation: Operation, slot: int, have: Placement, want: Placement, option: Option) -> bool:
        if have == want:
            return True
        operand = operation.operands[slot]
        if isinstance(want, Shard):
            # A parameter that is split along the sequence by a product would be tensor parallelism.
            summed = isinstance(option.output, Partial) and operand.differentiable
            return (
                is_whole(have)
                and not summed
                and all(can_be_dealt(shape, want, self.degree) for shape in operand.shapes)
            )
        if isinstance(want, Partial):
            return False
        return is_whole(have) or (isinstance(have, Shard) and operation.key in _GATHERED)

    def _of_summands(self, node: Node, operation: Operation, states: Sequence[Placement]) -> Option:
        """For what does not pass summands on they are added up first."""
        option = context_rules.options_of_summands(operation, [isinstance(state, Partial) for state in states])
        if option is not None:
            return option
        if is_in_place(operation):
            raise self._refusal(node)
        return Option(tuple(self._whole(operand.node) for operand in operation.operands), self._whole(node))

    def _marks(self, operation: Operation) -> frozenset[Shard]:
        """Where the sequence lies in a value that is computed of the batch alone."""
        if not operation.shapes:
            return frozenset()
        found = {
            option.output
            for slot, operand in enumerate(operation.operands)
            for mark in self.marks.get(operand.node, ())
            for option in context_rules.options(operation, slot, mark)
        }
        return frozenset(
            state
            for state in found
            if isinstance(state, Shard) and all(can_be_dealt(shape, state, self.degree) for shape in operation.shapes)
        )

    def _refusal(self, node: Node) -> StrategyError:
        name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        path = module_path(node)
        return StrategyError(
            f"context {self.degree} splits the sequence, and `{name}`{f' in {path}' if path else ''} works along it",
            where=node_line(node) or node.name,
            legal="context 1; graphs whose positions meet in attention alone",
        )

    # ------------------------------------------------------------------------------------------------- what is written

    def _value(self, node: Node, target: Placement, reader: Node) -> Node:
        """``node``'s value placed as ``target``, converted once a layer of readers."""
        source = self.placed[node]
        if source == target or (is_whole(source) and is_whole(target)):
            return self.written[node]
        key = (node, str(target) if not is_whole(target) else "whole", self.layers.get(reader, self.layers[node]))
        if key not in self.converted:
            self.converted[key] = self._convert(node, source, target, reader)
        return self.converted[key]

    def _convert(self, node: Node, source: Placement, target: Placement, reader: Node) -> Node:
        function: Callable[..., Any]
        match source, target:
            case ((Copied() | Replicate()), Shard()):
                function, where = context_operators.own_positions, layout(target)
            case Shard(), (Copied() | Replicate()):
                function, where = context_operators.all_positions, layout(source)
            case Partial(), (Copied() | Replicate()):
                function, where = context_operators.sum_over_axis, ()
            case ((Copied() | Replicate()), Partial()):
                function, where = context_operators.share_of, ()
            case _:
                raise self._refusal(reader)
        beside = reader if reader.op == "call_function" else node
        name = f"{node.name}_{_SUFFIX[function]}"
        new = self.graph.create_node("call_function", function, (self.written[node], AXIS, *where), {}, name=name)
        whole = self._meta(node, target)
        new.meta = {**whole, **place_of(beside), "autoplan_origin": origin_of(beside)}
        self.origin[new.name] = origin_of(beside)
        return new

    def _plain(self, node: Node, option: Option, operands: tuple[Node, ...]) -> Node:
        args, kwargs = rebuild(node, operands, self.written.__getitem__)
        rule = rule_of(node)
        if rule is not None and option.split:
            local = rule.local_arguments(self.facts.operation(node), option)
            args, kwargs = override(node, args, kwargs, self._written_sizes(local, node))
        return self.graph.create_node("call_function", node.target, args, kwargs, name=node.name)

    def _attention(self, node: Node, operation: Operation, operands: tuple[Node, ...]) -> Node:
        given = operation.arguments
        by_name = {name: operands[slots[0]] for name, slots in operation.slots.items()}
        args = (
            *(by_name[name] for name in ("query", "key", "value")),
            by_name.get("attn_mask"),
            float(given.get("dropout_p", 0.0)),
            bool(given.get("is_causal", False)),
            AXIS,
            given.get("scale"),
            bool(given.get("enable_gqa", False)),
            _heads_inside(node.meta["val"]),
        )
        return self.graph.create_node("call_function", context_operators.positions_attention, args, {}, name=node.name)

    def _check_literals(self, node: Node, option: Option) -> None:
        """Run an operator whose sizes stand in the graph on the shapes of its operands, and compare."""
        rule, new = rule_of(node), self.written[node]
        if rule is None or not option.split or not rule.local_arguments(self.facts.operation(node), option):
            return
        try:
            local = shapes_when_run(new)
        except Exception:
            raise self._refusal(node) from None
        if local not in (None, shapes_of(new)):
            raise self._refusal(node)


def _heads_inside(result: Tensor) -> bool:
    """Whether [..., heads, length, width] lies in memory as [..., length, heads, width]."""
    return result.dim() > 2 and bool(result.stride(-2) > result.stride(-3))
