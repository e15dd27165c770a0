"""Where samples of the batch meet: each value's state, from the inputs to the loss.

Only what the loss depends on is looked at (through in-place writes too). Reductions over the batch are allowed where
the loss is a linear function of them; a count of the inputs (a mask's sum, the batch size) may be used anywhere, since
the whole batch's count can be known before the model runs. All else that mixes samples is a coupling.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

import autoplan.capture.batch_losses
import autoplan.capture.batch_routing
import autoplan.capture.batch_views  # noqa: F401  (these enter their rules in the table)
from autoplan.capture.batch_flow import RULES, Flow
from autoplan.capture.batch_memory import Memory, writes
from autoplan.capture.batch_rules import getitem, pointwise, shape_guess
from autoplan.capture.batch_state import (
    Free,
    Mixed,
    Offsets,
    PerRow,
    Reduced,
    Rows,
    State,
    Straight,
    Total,
    bound,
    is_symbolic,
    operator_name,
    short_name,
    tensors,
)
from autoplan.capture.shapes import is_data_dependent
from autoplan.capture.types import InputSpec

# Values that mean nothing to the loss: checks that torch.export leaves behind.
_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size"}
# Their numbers are bounds of a range, which their rules look at.
_RANGES = {"arange", "linspace", "logspace"}
# f(a x + b y) = a f(x) + b f(y), and what only moves values.
LINEAR = set(
    [
        "add",
        "sub",
        "rsub",
        "neg",
        "mul",
        "div",
        "true_divide",
        "to",
        "_to_copy",
        "contiguous",
        "clone",
        "alias",
        "view",
        "reshape",
        "flatten",
        "squeeze",
        "unsqueeze",
        "expand",
        "permute",
        "transpose",
        "t",
        "select",
        "slice",
        "detach",
        "stack",
        "cat",
        "sum",
        "mean",
        "unbind",
        "getitem",
        "lift_fresh_copy",
        "split",
        "type_as",
        "positive",
        "_unsafe_view",
        "view_as",
        "expand_as",
    ]
)


def loss_node(graph_module: GraphModule) -> Node:
    """The node of the scalar loss that the graph returns."""
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    value = output.args[0]
    while isinstance(value, (tuple, list)):
        value = value[0]
    if not isinstance(value, Node):
        raise ValueError(f"the graph returns {value!r}, not a loss")
    return value


def trace_batch(graph_module: GraphModule, inputs: tuple[InputSpec, ...]) -> Flow:
    """The state of every value that the loss depends on; couplings and notes are on the flow."""
    batched = [spec for spec in inputs if spec.batched]
    flow = Flow(graph_module, batched[0].shape[0] if batched else 1)
    memory = Memory(graph_module)
    if not batched:
        flow.couple(loss_node(graph_module), "no input has the batch as its dimension 0")
    _find_data_only(flow, graph_module, memory)
    _state_of_inputs(flow, graph_module, {spec.placeholder for spec in batched})
    relevant = memory.ancestors([loss_node(graph_module)])
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node in relevant:
            flow.states[node] = _visit(flow, node)
            if writes(node):
                _write_back(flow, memory, node)
    _changed_buffers(flow, memory)
    return flow


def _state_of_inputs(flow: Flow, graph_module: GraphModule, batched: set[str]) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in batched:
            flow.states[node] = Rows(dim=0, order=Straight(outer=1, inner=1))


def _find_data_only(flow: Flow, graph_module: GraphModule, memory: Memory) -> None:
    """Values that follow from the inputs and buffers alone: no parameter, no chance."""
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            flow.data_only.add(node)
        elif node.op == "get_attr":
            value = _attribute(graph_module, str(node.target))
            if isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter) and node not in memory.writers:
                flow.data_only.add(node)
        elif node.op == "call_function" and not _by_chance(node):  # noqa: SIM102
            if all(need in flow.data_only for need in memory.needs(node)):
                flow.data_only.add(node)


def _attribute(graph_module: GraphModule, path: str) -> Any:
    return operator.attrgetter(path)(graph_module)


def _by_chance(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or not isinstance(
        node.target, (torch._ops.OpOverload, type(operator.getitem))
    )


def _visit(flow: Flow, node: Node) -> State:
    name = short_name(node)
    if name in _CHECKS:
        return Free()
    if not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
        return _visit_number(flow, node)
    if name == "getitem":
        return getitem(flow, node)
    operands = [*tensors(node.args), *tensors(node.kwargs.values())]
    numbers = [] if name in _RANGES else _numbers(flow, node)
    states = [flow.state(value) for value in operands]
    if any(_has_mixed(state) for state in states):
        return Mixed()
    if any(isinstance(flow.state(number), Mixed) for number in numbers):
        if not any(number in flow.sizes_of_parts for number in numbers):
            return Mixed()  # recorded where the number was taken
        return flow.couple(node, "it uses a number that the data decides, or that is no multiple of the batch size")
    if any(operand in flow.tainted for operand in node.all_input_nodes):
        flow.tainted.add(node)
    belongs_to_all = [value for value in (*operands, *numbers) if isinstance(flow.state(value), (Reduced, Total))]
    if belongs_to_all and not any(isinstance(state, (*PerRow, Offsets)) for state in states):
        return _of_whole_batch(flow, node, name, operands, numbers)
    for value in belongs_to_all:
        _use_in_rows(flow, node, value)
    try:
        return _apply(flow, node)
    finally:
        flow.forget_free()


def _has_mixed(state: State) -> bool:
    return isinstance(state, Mixed) or (isinstance(state, tuple) and any(_has_mixed(item) for item in state))


def _apply(flow: Flow, node: Node) -> State:
    target = node.target
    inner = _inner_graph(node)
    if inner is not None:
        return _visit_block(flow, node, inner)
    rule = RULES.get(operator_name(node))
    if rule is not None:
        return rule(flow, node, bound(node))
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        return pointwise(flow, node, bound(node))
    return shape_guess(flow, node)


def _numbers(flow: Flow, node: Node) -> list[Node]:
    """Operands that are numbers made from the batch size, where the operator takes them as values, not as sizes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    return [
        value
        for name, value in bound(node).items()
        if isinstance(value, Node)
        and not isinstance(value.meta.get("val"), (Tensor, tuple, list))
        and not isinstance(flow.state(value), Free)
        and name in _values_of(node.target)
    ]


@functools.cache
def _values_of(target: torch._ops.OpOverload) -> frozenset[str]:
    """The arguments that an operator computes with, where others are sizes and choices."""
    return frozenset(
        argument.name for argument in target._schema.arguments if str(argument.type) in ("Tensor", "number")
    )


def _visit_number(flow: Flow, node: Node) -> State:
    """A size, or arithmetic on sizes. It belongs to the whole batch where the batch size is in it."""
    value = node.meta.get("val")
    sized = str(node.target).startswith("aten.sym_")
    for operand in [] if sized else node.all_input_nodes:
        state = flow.state(operand)
        if isinstance(state, (*PerRow, Reduced, Offsets)):
            return flow.couple(node, "a value computed from the samples becomes a Python number")
        if isinstance(state, Mixed):
            if operand in flow.sizes_of_parts:
                flow.sizes_of_parts.add(node)
            return Mixed()
    if is_symbolic(value) and is_data_dependent(value) and sized:
        flow.sizes_of_parts.add(node)
        return Mixed()  # fine as a size; a coupling where it is used as a value
    if not is_symbolic(value) or flow.sizes.symbol not in value.node.expr.free_symbols:  # type: ignore[union-attr]
        return Free()
    if sized:
        if flow.sizes.value(node) % flow.sizes.batch:
            flow.sizes_of_parts.add(node)
            return Mixed()  # such as B + 1: the parts' sizes don't add up to the whole's
        return Total(sources=frozenset({node}))
    sources: set[Node] = set()
    for operand in node.all_input_nodes:
        state = flow.state(operand)
        if isinstance(state, Mixed):
            return Mixed()
        sources |= state.sources if isinstance(state, Total) else set()
    return Total(sources=frozenset(sources))


def _use_in_rows(flow: Flow, node: Node, value: Node) -> None:
    """A value of the whole batch meets the samples: fine if it can be known beforehand."""
    state = flow.state(value)
    if _as_total(flow, node, value) is None:
        assert isinstance(state, Reduced)
        for term in state.terms:
            flow.couple(term, "every sample uses this sum or mean over the batch")
    flow.use_as_free(value)


def _as_total(flow: Flow, node: Node, value: Node) -> frozenset[Node] | None:
    """Note that ``node`` takes ``value`` from the totals; None if it can't."""
    state = flow.state(value)
    if isinstance(state, Total):
        sources = state.sources
    elif isinstance(state, Reduced) and state.total:
        sources = state.terms
    else:
        return None
    flow.total_uses[node, value] = sources
    flow.tainted.add(node)
    return sources


def _of_whole_batch(flow: Flow, node: Node, name: str, operands: list[Node], numbers: list[Node]) -> State:
    """An operator on values that belong to the whole batch, and on constants."""
    involved = list(dict.fromkeys(value for value in [*operands, *numbers] if not isinstance(flow.state(value), Free)))
    reduced = [value for value in involved if isinstance(flow.state(value), Reduced)]
    moving = [value for value in reduced if not flow.state(value).total]  # type: ignore[union-attr]
    linear = name in LINEAR
    if not moving and not (linear and _keeps_linear(node, name, reduced)):
        return Total(sources=frozenset().union(*(_sources(flow, value) for value in involved)))
    if not linear or (name in ("div", "true_divide") and node.args[1] in moving):
        return flow.couple(node, f"{name} of a sum or mean over the batch is not the sum of its parts")
    if name == "mul" and len(moving) > 1:
        return flow.couple(node, "the product of two sums or means over the batch is not the sum of its parts")
    keep = _kept_terms(name, node, reduced, moving)
    for value in involved:
        if value not in keep:
            _as_total(flow, node, value)
    terms = frozenset().union(*(flow.state(value).terms for value in keep))  # type: ignore[union-attr]
    total = all(flow.state(value).total for value in keep) and flow.rank(node) == 0  # type: ignore[union-attr]
    state = Reduced(terms=terms, total=total)
    outputs = node.meta["val"]
    return tuple(state for _ in outputs) if isinstance(outputs, (tuple, list)) else state


def _keeps_linear(node: Node, name: str, reduced: list[Node]) -> bool:
    """Whether an operator on counts alone is still a sum over the batch: scaled by constants, or added."""
    if name == "mul":
        return len(reduced) == 1 and node.args[0] is not node.args[1]
    if name in ("div", "true_divide"):
        return len(reduced) == 1 and node.args[0] in reduced and node.args[1] not in reduced
    return bool(reduced)


def _kept_terms(name: str, node: Node, reduced: list[Node], moving: list[Node]) -> list[Node]:
    """The operands that stay parts of the loss; the others are known beforehand."""
    if name == "mul":
        return moving or reduced[:1]
    if name in ("div", "true_divide"):
        return [value for value in reduced if value is node.args[0]]
    return reduced


def _sources(flow: Flow, value: Node) -> frozenset[Node]:
    state = flow.state(value)
    if isinstance(state, Total):
        return state.sources
    return state.terms if isinstance(state, Reduced) else frozenset()


def _inner_graph(node: Node) -> GraphModule | None:
    """The block that a no_grad or autocast region was traced into."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for argument in node.args:
            if isinstance(argument, Node) and argument.op == "get_attr":
                owner = argument.graph.owning_module
                value = _attribute(owner, str(argument.target)) if owner is not None else None
                if isinstance(value, GraphModule):
                    return value
    return None


def _visit_block(flow: Flow, node: Node, inner: GraphModule) -> State:
    operands = [
        value
        for value in node.args
        if not (isinstance(value, Node) and value.op == "get_attr" and value.meta.get("val") is None)
    ]
    places = [place for place in inner.graph.nodes if place.op == "placeholder"]
    for place, operand in zip(places, operands[len(operands) - len(places) :], strict=True):
        flow.states[place] = flow.state(operand)
    for step in inner.graph.nodes:
        if step.op == "call_function":
            flow.states[step] = _visit(flow, step)
            if isinstance(flow.states[step], (Reduced, Total)):
                flow.states[step] = flow.couple(step, f"it sums over the batch inside a {short_name(node)} block")
    output = next(step for step in inner.graph.nodes if step.op == "output")
    results = output.args[0]
    if isinstance(results, (tuple, list)):
        return tuple(flow.state(result) for result in results)
    return flow.state(results)


def _write_back(flow: Flow, memory: Memory, node: Node) -> None:
    """An in-place operator changes every value that shares its storage."""
    written = flow.states[node]
    root = memory.root[node]
    for member in memory.members[root]:
        if member is node or memory.position[member] > memory.position[node]:
            continue
        before = flow.states.get(member, Free())
        if isinstance(written, (Reduced, Total)):
            if any(memory.position[user] > memory.position[node] for user in member.users):
                flow.couple(node, "a sum over the batch is changed in place and read under its old name")
        elif isinstance(written, Mixed):
            flow.states[member] = Mixed()
        elif isinstance(before, Free) and not isinstance(written, Free):
            flow.states[member] = _spread(flow, node, member, written)


def _spread(flow: Flow, node: Node, member: Node, written: State) -> State:
    """The state of a constant that samples were written into through a view of it."""
    if not isinstance(member.meta.get("val"), Tensor):
        return flow.state(member)
    shape, result = flow.shape(member), flow.shape(node)
    if shape == result:
        return written
    size = flow.sizes.batch
    if isinstance(written, Rows) and written.order == Straight(outer=1, inner=1):
        if len(shape) == len(result) and shape[written.dim] == size:
            return written
        places = [dim for dim, length in enumerate(shape) if length == size]
        if len(places) == 1:
            return Rows(dim=places[0], order=written.order)
    return flow.couple(node, "it writes samples into a value whose batch dimension could not be followed")


def _changed_buffers(flow: Flow, memory: Memory) -> None:
    already = {coupling.where for coupling in flow.couplings.values()}
    for root, writers in memory.writers.items():
        if root.op != "get_attr":
            continue
        for writer in writers:
            found = len(flow.couplings)
            flow.couple(writer, f"the buffer {root.target} is changed once a forward, so once a part")
            latest = list(flow.couplings)[found:]
            for key in latest:
                if key[1] in already:  # such as the counter beside batch normalisation's statistics
                    del flow.couplings[key]
