"""Cut a stretch of graph without repeated modules into layers of like cost where few bytes cross."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node

from autoplan.capture.shapes import bytes_at, shape_at
from autoplan.layers.facts import Facts, tensors
from autoplan.layers.formulas import Operand, work_of
from autoplan.layers.operators import HEAVY, operator_name

MAX_CHUNKS = 64


def heavy_nodes(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that multiply matrices."""
    return [node for node in nodes if operator_name(node.target) in HEAVY]


def rough_flops(node: Node) -> float:
    """Forward FLOPs at batch 1 (of a static trace: at its batch), from metadata alone."""
    if operator_name(node.target) not in HEAVY:
        return 0.0
    output = next(tensors(node.meta.get("val")), None)
    if output is None:
        return 0.0
    return work_of(
        operator_name(node.target), [_operand(item) for item in node.args], Operand(shape_at(output, 1))
    ).flops


def _operand(item: object) -> object:
    if isinstance(item, Node):
        value = item.meta.get("val")
        return Operand(shape_at(value, 1)) if isinstance(value, Tensor) else value
    if isinstance(item, (list, tuple)):
        return [_operand(each) for each in item]
    return item


def cut_into_chunks(facts: Facts, nodes: list[Node]) -> list[list[Node]]:
    """``nodes`` (in graph order) in at most :data:`MAX_CHUNKS` consecutive chunks, each with a matrix product.

    Of all places between two products, the chunk ends where the fewest bytes cross; the latest of equals, so that
    an activation stays with the product before it.
    """
    heavy = heavy_nodes(nodes)
    count = min(MAX_CHUNKS, len(heavy))
    crossing = _crossing_bytes(facts, nodes)
    place = {node: index for index, node in enumerate(nodes)}
    flops = [rough_flops(node) for node in heavy]
    share = sum(flops) / count if count else 0.0
    cuts: list[int] = []
    gathered = 0.0
    for index, (node, following) in enumerate(itertools.pairwise(heavy)):
        gathered += flops[index]
        remaining = len(heavy) - index - 1
        must_cut = count - len(cuts) - 1 >= remaining
        # Cut once the running sum is nearer to the next boundary than it would be with the next product.
        if must_cut or gathered + flops[index + 1] / 2 >= share * (len(cuts) + 1):
            between = range(place[node] + 1, place[following] + 1)
            cuts.append(min(between, key=lambda at: (crossing[at], -at)))
        if len(cuts) == count - 1:
            break
    bounds = [0, *cuts, len(nodes)]
    return [nodes[start:end] for start, end in itertools.pairwise(bounds) if start < end]


def _crossing_bytes(facts: Facts, nodes: list[Node]) -> list[float]:
    """Bytes of the travelling values alive between ``nodes[i - 1]`` and ``nodes[i]``, at index i."""
    place = {node: index for index, node in enumerate(nodes)}
    change = [0.0] * (len(nodes) + 2)
    for index, node in enumerate(nodes):
        readers = [place.get(later, len(nodes)) for later in facts.after.get(node, ())]
        if readers:
            size = sum(bytes_at(value, 1) for value in tensors(node.meta.get("val")))
            change[index + 1] += size
            change[max(readers) + 1] -= size
    alive, result = 0.0, []
    for delta in change[: len(nodes) + 1]:
        alive += delta
        result.append(alive)
    return result
