"""What a pass needs to know of a graph beyond its edges: who shares memory, who writes in place, what needs weights.

Exported graphs are not functionalised: ``add_`` and ``copy_`` stand in them, and a value can change after it was
computed. Memory is followed by operator schemas: outputs and inputs that a schema says may alias are one *memory*
(conservatively: a function without a schema may return any of its inputs). A node *depends* on its inputs and on the
earlier writes to their memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from autoplan.capture.batch_memory import written
from autoplan.capture.errors import node_line
from autoplan.capture.shapes import is_data_dependent, size_at
from autoplan.errors import AutoplanError
from autoplan.passes import context_operators, expert_operators, operators, weight_gradients

aten = torch.ops.aten

# Operators that write to their running statistics though their schema does not say so: (operator, argument of the
# switch, arguments that are written).
_STATISTICS: dict[Any, tuple[int, tuple[int, ...]]] = {
    aten.batch_norm.default: (5, (3, 4)),
    aten.native_batch_norm.default: (5, (3, 4)),
    aten.cudnn_batch_norm.default: (5, (3, 4)),
    aten.instance_norm.default: (5, (3, 4)),
}
# Named in place, but the numbers stay; `dropout` returns its very input where it has nothing to drop.
_ONLY_VIEWS = {aten.detach_.default}
_MAY_RETURN_INPUT = {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default}

_DRAWING = (
    operators.drawn_apart,
    operators.drawn_in_part,
    context_operators.drawn_for_positions,
    context_operators.positions_attention_apart,
)
# Functions of ours whose result is never their input's memory.
_NEW_MEMORY = {
    operators.reduce_from_axis,
    operators.gather_for_axis,
    operators.scatter_sum_to_axis,
    operators.vocabulary_embedding,
    operators.vocabulary_cross_entropy,
    operators.gather_slices,
    context_operators.own_positions,
    context_operators.all_positions,
    context_operators.sum_over_axis,
    context_operators.share_of,
    context_operators.positions_attention,
    context_operators.positions_attention_apart,
    context_operators.drawn_for_positions,
    expert_operators.route_rows,
    expert_operators.dispatch_rows,
    expert_operators.combine_rows,
    weight_gradients.linear_in_parts,
    weight_gradients.addmm_in_parts,
    weight_gradients.mm_in_parts,
}


def copy_graph(graph_module: GraphModule) -> fx.Graph:
    """The graph alone, metadata kept, so that a pass may change it; parameters are not copied."""
    graph = fx.Graph()
    output = graph.graph_copy(graph_module.graph, {})
    graph.output(output)
    return graph


def affine_shape(tensor: Tensor, batch: object, node: Node) -> tuple[tuple[int, int], ...]:
    """Each size as (a, b) for ``a * samples + b``; raises AutoplanError where it is not of that form."""
    sizes = []
    for size in tensor.shape:
        found = _affine(size, batch)
        if found is None:
            raise AutoplanError(
                f"`{node.name}` would be sent between stages and has the size {size}, which is not a x batch + b",
                where=node_line(node),
                legal="shapes that follow from the batch size",
                attempt="force pipeline=1",
            )
        sizes.append(found)
    return tuple(sizes)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the outermost in memory to the innermost; as they stand where some are expanded."""
    strides = [size_at(stride, 4) for stride in tensor.stride()]
    dimensions = range(tensor.dim())
    if any(stride == 0 for stride in strides):
        return tuple(dimensions)
    return tuple(sorted(dimensions, key=lambda dimension: -strides[dimension]))


def _affine(size: int | SymInt, batch: object) -> tuple[int, int] | None:
    if not isinstance(size, SymInt):
        return 0, int(size)
    if is_data_dependent(size) or not size.node.expr.free_symbols <= {batch}:
        return None
    at_two, at_three = size_at(size, 2), size_at(size, 3)
    slope = at_three - at_two
    constant = at_two - 2 * slope
    alike = all(size_at(size, probe) == slope * probe + constant for probe in (1, 4, 7, 64))
    return (slope, constant) if alike else None


def sizes_from_batch(graph: fx.Graph, batch: object) -> None:
    """Read sizes off a batch input instead of an activation, so that an integer never ties two stages together."""
    source = _batch_dimension(graph, batch)
    if source is None:
        return
    for node in list(graph.nodes):
        if node.target is not aten.sym_size.int or node.args[0].op == "placeholder":
            continue
        value = node.meta.get("val")
        found = _affine(value, batch) if isinstance(value, SymInt) else None
        if found is None:
            continue
        slope, constant = found
        with graph.inserting_before(node):
            size = graph.call_function(aten.sym_size.int, source)
            size.meta = dict(node.meta)
            for function, number in ((operator.mul, slope), (operator.add, constant)):
                if number != (1 if function is operator.mul else 0):
                    size = graph.call_function(function, (size, number))
                    size.meta = dict(node.meta)
        node.replace_all_uses_with(size)
        graph.erase_node(node)


def _batch_dimension(graph: fx.Graph, batch: object) -> tuple[Node, int] | None:
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, SymInt) and size.node.expr == batch:
                    # The input must be defined before any use: placeholders come first in a graph.
                    return node, dimension
    return None


class GraphFacts:
    """Facts of one graph; ``root`` owns its attributes. Nothing is changed."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root = root
        self.order: list[Node] = [node for node in graph.nodes if node.op != "output"]
        self.position = {node: index for index, node in enumerate(self.order)}
        result = graph.output_node().args[0]
        self.loss: Node = result[0] if isinstance(result, (tuple, list)) else result  # type: ignore[assignment]

    # ------------------------------------------------------------------------------------------------------- structure

    def attribute(self, name: str) -> Any:
        return operator.attrgetter(name)(self.root)

    def value_inputs(self, node: Node) -> list[Node]:
        return node.all_input_nodes

    def readers(self, node: Node) -> Iterator[Node]:
        return iter(user for user in node.users if user.op != "output")

    def is_getitem(self, node: Node) -> bool:
        return node.target is operator.getitem and not isinstance(node.all_input_nodes[0].meta.get("val"), Tensor)

    # ---------------------------------------------------------------------------------------------------------- memory

    def view_of(self, node: Node) -> Node | None:
        """The input whose memory ``node`` may be."""
        sources = self._aliased[node]
        return sources[0] if sources else None

    @cached_property
    def _aliased(self) -> dict[Node, list[Node]]:
        return {node: _aliased_inputs(node) for node in self.order}

    @cached_property
    def _memory(self) -> dict[Node, Node]:
        """Each node's memory, named by one of its nodes."""
        parent: dict[Node, Node] = {node: node for node in self.order}

        def find(node: Node) -> Node:
            while parent[node] is not node:
                parent[node] = parent[parent[node]]
                node = parent[node]
            return node

        by_name: dict[Any, Node] = {}
        for node in self.order:
            for source in self._aliased[node]:
                parent[find(node)] = find(source)
            if node.op == "get_attr":
                parent[find(node)] = find(by_name.setdefault(id(self.attribute(str(node.target))), node))
        return {node: find(node) for node in self.order}

    def written_operands(self, node: Node) -> list[Node]:
        """Inputs that ``node`` writes in place."""
        return self._written[node]

    @cached_property
    def _written(self) -> dict[Node, list[Node]]:
        return {node: _written_inputs(node) for node in self.order}

    @cached_property
    def _writes(self) -> dict[Node, list[tuple[Node, Node]]]:
        found: dict[Node, list[tuple[Node, Node]]] = {}
        for node in self.order:
            for operand in self._written[node]:
                found.setdefault(self._memory[operand], []).append((node, operand))
        return found

    def writes(self, node: Node) -> bool:
        return bool(self._written[node])

    def writes_to(self, node: Node) -> list[tuple[Node, Node]]:
        """All (writing node, operand it writes) of the memory behind ``node``."""
        return self._writes.get(self._memory[node], [])

    def earlier_writes(self, node: Node) -> list[Node]:
        """Writes that ``node`` sees: to its inputs' memory, before it."""
        at = self.position[node]
        return [w for source in node.all_input_nodes for w, _ in self.writes_to(source) if self.position[w] < at]

    def dependencies(self, node: Node) -> list[Node]:
        return [*node.all_input_nodes, *self.earlier_writes(node)]

    @cached_property
    def _written_attributes(self) -> dict[Node, str]:
        """Memory that is an attribute of the model and is written by the forward, with the attribute's name."""
        return {
            self._memory[node]: str(node.target)
            for node in self.order
            if node.op == "get_attr" and self._memory[node] in self._writes
        }

    @cached_property
    def written_buffers(self) -> frozenset[str]:
        """Names of attributes that the forward writes."""
        return frozenset(
            str(n.target) for n in self.order if n.op == "get_attr" and self._memory[n] in self._written_attributes
        )

    def writes_buffer(self, node: Node) -> bool:
        return any(self._memory[operand] in self._written_attributes for operand in self._written[node])

    def same_memory(self, node: Node) -> list[Node]:
        """All nodes whose values may share ``node``'s memory, itself included."""
        return self._members[self._memory[node]]

    @cached_property
    def _members(self) -> dict[Node, list[Node]]:
        found: dict[Node, list[Node]] = {}
        for node in self.order:
            found.setdefault(self._memory[node], []).append(node)
        return found

    def touches_written(self, node: Node) -> bool:
        """Whether ``node`` reads, writes or is memory that some node writes in place."""
        return any(self.writes_to(memory) for memory in (node, *node.all_input_nodes))

    def is_written_attribute(self, node: Node) -> bool:
        """Whether ``node``'s memory is an attribute of the model that the forward writes."""
        return self._memory[node] in self._written_attributes

    def is_random(self, node: Node) -> bool:
        """Whether ``node`` draws random numbers."""
        return _is_random(node, self)

    # ------------------------------------------------------------------------------------------------- parameters

    def _is_parameter(self, node: Node) -> bool:
        return node.op == "get_attr" and isinstance(self.attribute(str(node.target)), nn.Parameter)

    @cached_property
    def _tainted(self) -> frozenset[Node]:
        """Nodes that depend on a parameter, on random numbers or on a buffer that the forward writes. A write that
        does so taints all of its memory, also what was read off it before."""
        tainted: set[Node] = set()
        memory: set[Node] = set(self._written_attributes)
        size = -1
        while size != len(tainted):
            size = len(tainted)
            for node in self.order:
                if node in tainted or not (
                    self._is_parameter(node)
                    or _is_random(node, self)
                    or any(d in tainted for d in self.dependencies(node))
                    or any(self._memory[source] in memory for source in node.all_input_nodes)
                    or (node.op == "call_function" and self._memory[node] in memory)
                ):
                    continue
                tainted.add(node)
                memory.update(self._memory[operand] for operand in self._written[node])
        return frozenset(tainted)

    def is_parameter_view(self, node: Node) -> bool:
        """A parameter that nothing writes, or a view of one and of nothing else (a transposed weight)."""
        return node in self._parameter_views

    @cached_property
    def _parameter_views(self) -> frozenset[Node]:
        found: set[Node] = set()
        for node in self.order:
            if self._memory[node] in self._writes or _is_random(node, self):
                continue
            tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), (Tensor, type(None)))]
            views = bool(tensors) and self.view_of(node) in found and all(n in found for n in tensors)
            if self._is_parameter(node) or views:
                found.add(node)
        return frozenset(found)

    def computed_once(self, node: Node) -> bool:
        """Whether ``node`` has one stage: not what is computed (or read) again wherever it is used."""
        return node.op not in ("placeholder", "get_attr") and node in self._tainted and not self.is_parameter_view(node)

    def reads_parameter(self, node: Node) -> bool:
        return any(self.is_parameter_view(source) for source in node.all_input_nodes)

    @cached_property
    def _differentiable(self) -> dict[Node, bool]:
        found: dict[Node, bool] = {}
        for node in self.order:
            if node.op == "get_attr":
                value = self.attribute(str(node.target))
                found[node] = isinstance(value, nn.Parameter) and value.requires_grad
            elif _stops_gradients(node):
                found[node] = False
            else:
                # A write may bring a gradient to memory that had none: look through it as well.
                found[node] = _is_floating(node.meta.get("val")) and any(
                    found.get(source, False) for source in self.dependencies(node)
                )
        return found

    @cached_property
    def _reached(self) -> frozenset[Node]:
        """Nodes that the loss's backward comes to. What it does not come to has no gradient, which is not a gradient
        of zeros: AdamW decays a weight whose gradient is zero and leaves one without gradient alone."""
        reached = {self.loss}
        for node in reversed(self.order):
            if self._differentiable[node] and (node in reached or any(r in reached for r in self._later_writes(node))):
                reached.add(node)
                reached.update(self.dependencies(node))
        return frozenset(reached)

    def _later_writes(self, node: Node) -> list[Node]:
        return [w for w, _ in self.writes_to(node) if self.position[w] > self.position[node]]

    def differentiable(self, node: Node) -> bool:
        """Whether the loss has a gradient with respect to ``node`` that some parameter needs."""
        trained = self._differentiable[node] or any(self._differentiable[w] for w in self._later_writes(node))
        return trained and node in self._reached


def _stops_gradients(node: Node) -> bool:
    if node.target in (aten.detach.default, aten.detach_.default):
        return True
    return str(node.target) == "wrap_with_set_grad_enabled" and node.args[0] is False


def _is_floating(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    if isinstance(value, (tuple, list)):
        return any(_is_floating(item) for item in value)
    return value is None


def _is_random(node: Node, facts: GraphFacts) -> bool:
    target = node.target
    if isinstance(target, OpOverload):
        if target in _MAY_RETURN_INPUT and (not node.args[2] or not node.args[1]):
            return False
        if target is aten.scaled_dot_product_attention.default and not _argument(node, 4, "dropout_p"):
            return False
        return torch.Tag.nondeterministic_seeded in target.tags
    if node.op != "call_function":
        return False
    if node.target in _DRAWING:
        return True
    if node.target is context_operators.positions_attention:
        return bool(node.args[4])  # dropout_p
    graphs = [facts.attribute(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    return any(
        _is_random(inner, GraphFacts(module.graph, module))
        for module in graphs
        if isinstance(module, GraphModule)
        for inner in module.graph.nodes
    )


def _argument(node: Node, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    """(schema argument, what the node passes for it)."""
    assert isinstance(node.target, OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [n for item in value for n in _nodes(item)] if isinstance(value, (list, tuple)) else []


def _aliased_inputs(node: Node) -> list[Node]:
    if node.op != "call_function":
        return []
    if not isinstance(node.target, OpOverload):
        if not isinstance(node.meta.get("val"), (Tensor, tuple, list, type(None))):
            return []
        if node.target in _NEW_MEMORY:
            return []
        of_ours = getattr(node.target, "__module__", "") == operators.__name__
        return _nodes(node.args[0]) if of_ours else [n for n in node.all_input_nodes if n.op != "get_attr"]
    if node.target in _MAY_RETURN_INPUT:
        return _nodes(node.args[0])
    returned: set[str] = set()
    for result in node.target._schema.returns:
        if result.alias_info is not None:
            returned |= set(result.alias_info.before_set) | set(result.alias_info.after_set)
    return [
        source
        for argument, value in _arguments(node)
        if argument.alias_info is not None
        and (set(argument.alias_info.before_set) | set(argument.alias_info.after_set)) & returned
        for source in _nodes(value)
    ]


def _written_inputs(node: Node) -> list[Node]:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target in _ONLY_VIEWS:
        return []
    if node.target in _STATISTICS:
        switch, places = _STATISTICS[node.target]
        return [n for index in places for n in _nodes(node.args[index])] if node.args[switch] else []
    return list(written(node))
