"""Attention heads must divide by the tensor degree; where they don't, say which attention and what would be legal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch.fx import Node

from autoplan.capture.errors import node_line
from autoplan.errors import StrategyError
from autoplan.sharding.operation import GraphFacts, module_path, operator_key

_PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum")


def attention_heads(facts: GraphFacts, node: Node) -> int | None:
    """Query heads of an attention: of scaled_dot_product_attention, or of softmax over a product of two activations."""
    key = operator_key(node.target) if node.op == "call_function" else ""
    if not facts.parametric[node] or not facts.shapes[node]:
        return None
    if key == "scaled_dot_product_attention":
        shape = facts.operation(node).operands[0].shape
        return shape[-3] if len(shape) >= 4 else None
    if key != "softmax" or len(facts.shapes[node][0]) != 4:
        return None
    scores = _product_behind(facts, node)
    return facts.shapes[node][0][1] if scores is not None else None


def check_heads(facts: GraphFacts, nodes: Iterable[Node]) -> None:
    """Raises StrategyError for the first attention in ``nodes`` whose heads the degree does not divide."""
    found = [(node, heads) for node in nodes if (heads := attention_heads(facts, node)) is not None]
    for node, heads in found:
        if heads % facts.degree:
            common = math.gcd(*(heads for _, heads in found))
            legal = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
            raise StrategyError(
                f"tensor degree {facts.degree} does not divide the {heads} attention heads of "
                f"{module_path(node) or node.name}",
                where=node_line(node),
                legal=f"tensor degrees that divide the heads: {legal}",
                attempt=f"tensor={max(d for d in range(1, common + 1) if common % d == 0 and d <= facts.degree)}",
            )


def _product_behind(facts: GraphFacts, node: Node) -> Node | None:
    """The product of two activations whose (scaled, masked) result ``node`` normalises."""
    for _ in range(12):
        operands = [operand.node for operand in facts.operation(node).operands if facts.parametric[operand.node]]
        if not operands or operands[0].op != "call_function":
            return None
        node = operands[0]
        if operator_key(node.target) in _PRODUCTS:
            inputs = [operand.node for operand in facts.operation(node).operands]
            return node if all(facts.parameter(value) is None for value in inputs) else None
    return None
