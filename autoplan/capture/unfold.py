"""Folded blocks written out: each ``block`` node becomes a copy of its example's nodes.

    enter([x], 0); a = linear(x, h.0.w); leave([a], 0)          a = linear(x, h.0.w)
    enter([a], 1); b = linear(a, h.1.w); leave([b], 1)          b = linear(a, h.1.w)
    c = block([b], 2)[0]                                        c = linear(b, h.2.w)

Before that the examples of a kind are compared node by node: operators, arguments, shapes, strides, dtypes and the
modules around them, with inner nodes by their place, inputs by their slot, and parameters by their path in the block.
What a block reads otherwise must be the same value in every example; what it makes is read outside only as its output.
Sizes (numbers that follow from the batch's) are compared as expressions: the trace computes each once, in the first
block that needs it, and all later ones read it there.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from autoplan.capture.alike import Unalike
from autoplan.capture.checkpointing import line_of
from autoplan.capture.folding import BLOCK, BLOCK_OF_ONE, ENTER, LEAVE, Folding, layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    """A traced block: ``path`` as the graph has it, its two marks, and the nodes between them."""

    path: str
    enter: Node
    nodes: tuple[Node, ...]
    leave: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        """As the graph is now: what stands before the block may have been written out since."""
        return _listed(self.enter)

    @property
    def outputs(self) -> tuple[Node, ...]:
        return _listed(self.leave)


def unfold(graph_module: GraphModule, folding: Folding, prefix: str) -> None:
    """Write the folded blocks out, in place, and take the marks away. ``prefix``: of the model's names in the graph.

    Raises Unalike where the examples of a kind differ, or reach past their marks.
    """
    folding.check()
    try:
        _unfold(graph_module.graph, folding, prefix)
    except Unalike as error:
        folding.refuse(str(error))
        raise


def _unfold(graph: Graph, folding: Folding, prefix: str) -> None:
    examples = {number: _example(graph, folding, number, prefix) for number in _numbers(graph, ENTER)}
    chosen = _compared(examples, folding)
    attributes = {str(node.target): node for node in graph.nodes if node.op == "get_attr"}
    for node in [node for node in graph.nodes if node.target in (BLOCK, BLOCK_OF_ONE)]:
        call = folding.calls[node.args[1]]
        _write_out(node, chosen[id(call.example)], f"{prefix}.{call.path}", attributes)
    for node in [node for node in graph.nodes if node.target in (ENTER, LEAVE)]:
        graph.erase_node(node)


def _numbers(graph: Graph, mark: Any) -> list[int]:
    return [node.args[1] for node in graph.nodes if node.target is mark]


def _example(graph: Graph, folding: Folding, number: int, prefix: str) -> _Example:
    call = folding.calls[number]
    first = next(node for node in graph.nodes if node.target is ENTER and node.args[1] == number)
    nodes = []
    node = first.next
    while node.target is not LEAVE:
        if node.op == "output":
            raise Unalike(f"{call.path} has no end")
        nodes.append(node)
        node = node.next
    if node.args[1] != number:
        raise Unalike(f"{call.path} ends in another block")
    return _Example(path=f"{prefix}.{call.path}", enter=first, nodes=tuple(nodes), leave=node)


def _listed(mark: Node) -> tuple[Node, ...]:
    tensors: Any = mark.args[0]
    return tuple(tensors)


def _compared(examples: dict[int, _Example], folding: Folding) -> dict[int, _Example]:
    """For each call that stands as an example of folded ones, the traced block to copy."""
    alike: dict[int, list[int]] = defaultdict(list)
    standing = {id(call.example) for call in folding.calls if call.folded}
    of_key = {call.key: id(call) for call in reversed(folding.calls) if id(call) in standing}
    for number in examples:
        key = folding.calls[number].key
        if key in of_key:
            alike[of_key[key]].append(number)
    for example in examples.values():
        _share_stacks(example)
    for numbers in alike.values():
        forms = [_form(examples[number]) for number in numbers]
        returned = [folding.calls[number].returned for number in numbers]
        if any(form != forms[0] for form in forms) or any(each != returned[0] for each in returned):
            raise Unalike(f"{examples[numbers[-1]].path} is not traced as {examples[numbers[0]].path} is")
        if any(_is_size(node) for node in examples[numbers[-1]].nodes):
            raise Unalike(f"{examples[numbers[-1]].path} computes a size that no block before it needed")
    return {example: examples[numbers[-1]] for example, numbers in alike.items()}


def _share_stacks(example: _Example) -> None:
    """Equal module stacks as one object, so that they are moved once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for node in example.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = known.setdefault(tuple(stack.items()), stack)


def _form(example: _Example) -> list[Any]:
    """All that the block's part of the graph is, names of the block aside."""
    working = [node for node in example.nodes if not _is_size(node)]
    inner = {node: place for place, node in enumerate(working)}
    slots = {node: slot for slot, node in reversed([*enumerate(example.inputs)])}
    outputs = set(example.outputs)

    def refer(node: Node) -> Any:
        if node in inner:
            return ("inner", inner[node])
        if node in slots:
            return ("input", slots[node])
        if node.op == "get_attr" and str(node.target).startswith(f"{example.path}."):
            return ("own", str(node.target).removeprefix(example.path))
        if _is_size(node):
            return ("size", node.meta["val"].node.expr)
        if node.op == "get_attr":
            return ("outer", node.name)
        raise Unalike(f"{example.path} reads {node.name}, which it is not given")

    lines: list[Any] = []
    if any(node.op != "call_function" or "unbacked_bindings" in node.meta for node in example.nodes):
        raise Unalike(f"{example.path} holds what is not to be copied: submodules, or sizes that depend on data")
    for node in working:
        if node not in outputs and any(user not in inner for user in node.users):
            raise Unalike(f"{node.name} is read outside of {example.path}, which does not return it")
        arguments = _text(node.args, refer), _text(node.kwargs, refer)
        stack = _moved_stack(node.meta.get("nn_module_stack") or {}, example.path, "")
        said = node.meta.get("stack_trace"), line_of(node)
        lines.append((node.target, arguments, _value(node.meta.get("val")), stack, *said))
    lines.append([refer(node) for node in example.outputs])
    if any(where != "inner" for where, _ in lines[-1]):
        raise Unalike(f"{example.path} returns what it did not make")
    return lines


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (SymInt, SymFloat, SymBool))


def _text(value: Any, refer: Callable[[Node], Any]) -> Any:
    """Arguments as something to compare: containers as tuples, sizes as expressions."""
    if isinstance(value, Node):
        return refer(value)
    if isinstance(value, (tuple, list)):
        return tuple(_text(item, refer) for item in value)
    if isinstance(value, dict):
        return tuple((key, _text(item, refer)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", _text((value.start, value.stop, value.step), refer))
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return value.node.expr
    return (type(value), value)


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return layout(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_value, value))
    return _text(value, lambda node: node)


def _moved_stack(stack: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The modules around a node, with those of block ``old`` moved to block ``new``."""

    def moved(path: str) -> str:
        bare, at, repeat = path.partition("@")
        return new + bare[len(old) :] + at + repeat if bare == old or bare.startswith(f"{old}.") else path

    result = {}
    for key, (path, kind) in stack.items():
        place = moved(path)
        result[key.replace(path, place) if place != path else key] = (place, kind)
    return result


def _write_out(node: Node, example: _Example, path: str, attributes: dict[str, Node]) -> None:
    """Replace a ``block`` node by a copy of ``example`` for the block at ``path``."""
    copies: dict[Node, Node] = {}
    for given, taken in zip(example.inputs, _listed(node), strict=True):
        copies.setdefault(given, taken)

    def copied(source: Node) -> Node:
        if source in copies:
            return copies[source]
        if source.op == "get_attr" and str(source.target).startswith(f"{example.path}."):
            return _attribute(source, path + str(source.target).removeprefix(example.path), attributes)
        if source.op != "get_attr" and not _is_size(source):
            raise Unalike(f"{example.path} reads {source.name}, which it is not given")
        return source

    graph = node.graph
    stacks: dict[int, dict[str, Any]] = {}  # of the example's: nodes of one module share one
    with graph.inserting_before(node):
        for source in example.nodes:
            arguments, keywords = map_arg((source.args, source.kwargs), copied)
            copy = graph.create_node("call_function", source.target, arguments, keywords, name=source.name)
            stack = source.meta.get("nn_module_stack") or {}
            if id(stack) not in stacks:
                stacks[id(stack)] = _moved_stack(stack, example.path, path)
            copy.meta.update(source.meta)
            copy.meta["nn_module_stack"] = stacks[id(stack)]
            copies[source] = copy
    if node.target is BLOCK_OF_ONE:
        node.replace_all_uses_with(copies[example.outputs[0]])
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise Unalike(f"{user.name} reads a folded block as a whole")
        place: Any = user.args[1]
        user.replace_all_uses_with(copies[example.outputs[place]])
        graph.erase_node(user)
    graph.erase_node(node)


def _attribute(like: Node, target: str, attributes: dict[str, Node]) -> Node:
    """The get_attr node of ``target``; made after ``like``'s pattern where the trace left the block out."""
    if target not in attributes:
        graph = like.graph
        with graph.inserting_after(like):
            made = graph.create_node("get_attr", target)
        made.meta = dict(like.meta)
        attributes[target] = made
    return attributes[target]
