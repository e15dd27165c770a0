"""Write a sharding into the graph: what one rank of the tensor axis runs.

Requires a graph whose nodes carry ``meta["val"]``, and a :class:`Sharding` of it by node names (nodes that other
passes put in since run whole). Guarantees:

- Literals are local (view sizes, split sizes, slices), ``meta["val"]`` has local shapes, get_attr names are unchanged.
- Collectives are explicit call_function nodes of :mod:`autoplan.passes.operators` on the axis "tensor"; every value
  is converted to a placement once a layer, so that q, k and v share one all-reduce in the backward.
- Values that leave their layer are whole, or shares of the sequence (:attr:`Sharding.shares`), so layers may go to any
  pipeline stage. ``origin`` names, for every node
  that the pass put in, the original node beside which it belongs.
- The linter (:mod:`autoplan.passes.lint`) has followed every placement through the new graph.

The graph is the same for every rank. Dropout in a split region draws each rank's own share from the rank's generator;
ranks draw equally often, so that replicated regions agree as long as the generators were seeded alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from autoplan.passes import operators
from autoplan.passes.lint import check_placements
from autoplan.passes.rewriting import AxisWriter, LocalValues, layout, override, place_of
from autoplan.sharding import Placement, Sharding, take_shard
from autoplan.sharding.conversions import Step, steps
from autoplan.sharding.operation import GraphFacts, Operation, rebuild
from autoplan.sharding.placements import PARTIAL, REPLICATE, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import Option, Rule

NAME = "shard_tensors"
AXIS = "tensor"
aten = torch.ops.aten

_SUFFIX = {
    "copy_to_axis": "copied",
    "reduce_from_axis": "summed",
    "gather_from_axis": "gathered",
    "gather_for_axis": "collected",
    "scatter_to_axis": "scattered",
    "scatter_sum_to_axis": "summed_share",
    "slice_for_axis": "sliced",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGraph:
    """``parameters``: the placement of every parameter that the graph reads, by get_attr name; ``origin``: original
    node names of inserted nodes; ``rank`` of ``degree`` on the tensor axis."""

    graph_module: GraphModule
    parameters: dict[str, Placement]
    origin: dict[str, str]
    degree: int
    rank: int

    def local(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of the parameter ``name``, given the full tensor; contiguous, in storage of its own."""
        return take_shard(full, self.parameters.get(name, REPLICATE), index=self.rank, degree=self.degree)


def shard_tensors(graph_module: GraphModule, sharding: Sharding, *, rank: int = 0) -> ShardedGraph:
    """``graph_module`` as rank ``rank`` of ``sharding.degree`` runs it; AutoplanError where the linter objects."""
    writer = _Writer(graph_module, sharding)
    rewritten = writer.write()
    check_placements(rewritten, graph_module, writer.parameters, degree=sharding.degree)
    return ShardedGraph(
        graph_module=rewritten,
        parameters=writer.parameters,
        origin=writer.origin,
        degree=sharding.degree,
        rank=rank,
    )


@dataclass(slots=True)
class _Writer(AxisWriter):
    graph_module: GraphModule
    sharding: Sharding
    facts: GraphFacts = field(init=False)
    graph: Graph = field(init=False, default_factory=Graph)
    parameters: dict[str, Placement] = field(init=False, default_factory=dict)
    origin: dict[str, str] = field(init=False, default_factory=dict)
    written: dict[Node, Node] = field(init=False, default_factory=dict)
    placed: dict[Node, Placement] = field(init=False, default_factory=dict)
    layers: dict[Node, int] = field(init=False, default_factory=dict)
    converted: dict[tuple[Node, Step, int], Node] = field(init=False, default_factory=dict)
    local_values: LocalValues = field(init=False)

    def __post_init__(self) -> None:
        self.facts = GraphFacts(self.graph_module, self.sharding.degree)
        self.local_values = LocalValues(self.sharding.degree)

    def write(self) -> GraphModule:
        for node in self.facts.graph.nodes:
            self.layers[node] = self._layer(node)
        for node in self.facts.graph.nodes:
            if node.op == "call_function":
                self._write_operator(node)
            elif node.op == "output":
                self._write_output(node)
            else:
                self._write_source(node)
        self.graph.lint()
        return GraphModule(self.graph_module, self.graph, class_name="ShardedGraph")

    def _layer(self, node: Node) -> int:
        """The layer of a node; what an earlier pass put in belongs to the layer of what it reads."""
        if node.name in self.sharding.layer_of:
            return self.sharding.layer_of[node.name]
        return max((self.layers[parent] for parent in node.all_input_nodes if parent in self.layers), default=-1)

    def _write_source(self, node: Node) -> None:
        new = self.graph.node_copy(node, lambda child: self.written[child])
        self.written[node], self.placed[node] = new, REPLICATE
        if self.facts.parameter(node) is not None:
            placement = self.sharding.parameters.get(str(node.target), REPLICATE)
            self.parameters[str(node.target)] = self.placed[node] = placement
            new.meta = self._meta(node, placement)

    def _write_output(self, node: Node) -> None:
        values = tuple(self._value(child, REPLICATE, node) for child in node.all_input_nodes)
        by_child = dict(zip(node.all_input_nodes, values, strict=True))
        self.graph.output(torch.fx.node.map_arg(node.args[0], lambda child: by_child[child])).meta = dict(node.meta)

    def _write_operator(self, node: Node) -> None:
        operation = self.facts.operation(node)
        rule, option = rule_of(node), self._option(node, operation)
        operands = tuple(
            self._value(operand.node, state, node)
            for operand, state in zip(operation.operands, option.inputs, strict=True)
        )
        write = _FORMS.get(option.form, _Writer._plain)
        self.written[node] = write(self, node, operation, option, operands, rule)
        self.placed[node] = option.output
        if any(self.layers[reader] != self.layers[node] for reader in node.users):
            self._value(node, self._handed(node), node)

    def _option(self, node: Node, operation: Operation) -> Option:
        """The node's option; of nodes made by other passes, whole, or cross entropy as its logits are split."""
        chosen = self.sharding.options.get(node.name)
        if chosen is not None and len(chosen.inputs) == len(operation.operands):
            return chosen
        rule = rule_of(node)
        first = self.placed.get(operation.operands[0].node) if operation.operands else None
        if rule is not None and operation.key == "cross_entropy_loss" and isinstance(first, Shard):
            for option in rule.options(operation, 0, first):
                return option
        return Option((REPLICATE,) * len(operation.operands), REPLICATE)

    def _handed(self, node: Node) -> Placement:
        """How layers hand each other the value."""
        return self.sharding.shares.get(node.name, REPLICATE)

    # ------------------------------------------------------------------------------------------ conversions

    def _value(self, node: Node, target: Placement, reader: Node) -> Node:
        """``node``'s value placed as ``target`` in ``reader``'s layer."""
        source, value, layer = self.placed[node], self.written[node], self.layers[reader]
        differentiable = self.facts.differentiable[node]
        if node.op == "call_function" and self.layers[node] != layer and reader is not node:
            source = self._handed(node)
            value = self._value(node, source, node)
        for step in steps(source, target, differentiable=differentiable) or ():
            key = (node, step, layer)
            if key not in self.converted:
                self.converted[key] = self._convert(node, value, step, reader)
            value = self.converted[key]
        return value

    def _convert(self, node: Node, value: Node, step: Step, reader: Node) -> Node:
        where = layout(step.source if isinstance(step.source, Shard) else step.target)
        function = getattr(operators, step.function)
        beside = reader if reader.op == "call_function" else node
        return self._insert(
            function,
            (value, AXIS, *where),
            like=node,
            name=_SUFFIX[step.function],
            beside=beside,
            placement=step.target,
        )

    def _insert(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        like: Node,
        name: str,
        beside: Node,
        placement: Placement,
    ) -> Node:
        """A node of the pass's own: ``like`` lends its whole shape, ``beside`` its place in modules and source."""
        new = self.graph.create_node("call_function", function, args, {}, name=f"{like.name}_{name}")
        new.meta = {**self._meta(like, placement), **place_of(beside), "autoplan_origin": beside.name}
        self.origin[new.name] = beside.name
        return new

    # ------------------------------------------------------------------------------------------------ forms

    def _plain(
        self, node: Node, operation: Operation, option: Option, operands: tuple[Node, ...], rule: Rule | None
    ) -> Node:
        args, kwargs = rebuild(node, operands, self.written.__getitem__)
        if rule is not None and option.split:
            local = rule.local_arguments(operation, option)
            args, kwargs = override(node, args, kwargs, self._written_sizes(local, node))
        return self._named(node, node.target, args, kwargs, option.output)

    def _add_late(
        self, node: Node, operation: Operation, option: Option, operands: tuple[Node, ...], rule: Rule | None
    ) -> Node:
        """The product without its bias, the sum over ranks or a share of it, then the bias once."""
        bias_slot = operation.slots["self" if operation.key == "addmm" else "bias"][0]
        factors = [operand for slot, operand in enumerate(operands) if slot != bias_slot]
        target: Any
        args: tuple[Any, ...]
        if operation.key == "addmm":
            target, args = aten.mm.default, tuple(factors)
        else:
            full, _ = rebuild(node, operands, self.written.__getitem__)
            target, args = node.target, (*full[:2], None, *full[3:])
        core = self._insert(target, args, like=node, name="summand", beside=node, placement=PARTIAL)
        core.meta["autoplan_core"] = node.name
        (step,) = steps(PARTIAL, option.output, differentiable=operation.differentiable) or ()
        total = self._insert(
            getattr(operators, step.function),
            (core, AXIS, *layout(option.output)),
            like=node,
            name=_SUFFIX[step.function],
            beside=node,
            placement=option.output,
        )
        bias = operands[bias_slot]
        if operation.key.startswith("conv"):
            shape = [-1] + [1] * (len(operation.shape) - 2)
            bias_node = operation.operands[bias_slot].node
            bias = self._insert(
                aten.view.default, (bias, shape), like=bias_node, name="column", beside=node, placement=REPLICATE
            )
            bias.meta["val"] = bias_node.meta["val"].new_empty([operation.shape[1], *shape[1:]])
        added = self._named(node, aten.add.Tensor, (total, bias), {}, option.output)
        added.meta["autoplan_late"] = True
        return added

    def _expand_heads(
        self, node: Node, operation: Operation, option: Option, operands: tuple[Node, ...], rule: Rule | None
    ) -> Node:
        heads = operation.operands[0].shape[-3]
        placement = Shard(1)
        whole = {*operation.slots["key"], *operation.slots["value"]}
        replaced = tuple(
            self._expanded(operand, heads, placement, node, operation.operands[slot].node) if slot in whole else operand
            for slot, operand in enumerate(operands)
        )
        args, kwargs = rebuild(node, replaced, self.written.__getitem__)
        return self._named(node, node.target, args, {**kwargs, "enable_gqa": False}, option.output)

    def _expanded(self, value: Node, heads: int, placement: Shard, node: Node, like: Node) -> Node:
        new = self._insert(
            operators.expand_heads_to_axis,
            (value, AXIS, heads),
            like=like,
            name="heads",
            beside=node,
            placement=REPLICATE,
        )
        whole = like.meta["val"]
        new.meta["val"] = whole.new_empty([whole.shape[0], heads // self.facts.degree, *whole.shape[2:]])
        return new

    def _vocabulary_embedding(
        self, node: Node, operation: Operation, option: Option, operands: tuple[Node, ...], rule: Rule | None
    ) -> Node:
        padding = int(operation.arguments.get("padding_idx", -1))
        args = (*operands, AXIS, padding) if padding >= 0 else (*operands, AXIS)
        return self._named(node, operators.vocabulary_embedding, args, {}, option.output)

    def _vocabulary_cross_entropy(
        self, node: Node, operation: Operation, option: Option, operands: tuple[Node, ...], rule: Rule | None
    ) -> Node:
        reduction = int(operation.arguments.get("reduction", 1))
        ignored = operation.arguments.get("ignore_index", -100)
        args = (*operands, AXIS, reduction, ignored)
        return self._named(node, operators.vocabulary_cross_entropy, args, {}, option.output)

    def _named(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], state: Placement) -> Node:
        """The node that takes the original's name."""
        new = self.graph.create_node("call_function", target, args, kwargs, name=node.name)
        new.meta = self._meta(node, state)
        return new


_FORMS: dict[str, Callable[..., Node]] = {
    "plain": _Writer._plain,
    "add_after_reduce": _Writer._add_late,
    "add_after_scatter": _Writer._add_late,
    "expand_heads": _Writer._expand_heads,
    "vocabulary_embedding": _Writer._vocabulary_embedding,
    "vocabulary_cross_entropy": _Writer._vocabulary_cross_entropy,
}
