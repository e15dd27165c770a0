"""A model that asks how many samples a batch has, and does the same whatever the answer.

diffusers' U-Net asks for contiguous memory from 64 samples on; torch.export then holds on each side of 64 alone. Each
path is traced at its own sizes, and where all are the same operators on the same values, one of them stands for all.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoplan.capture.shapes import MAX_BATCH

Export = Callable[[int, int], GraphModule]
MAX_TRACES = 8


def one_path(error: Exception, export: Export) -> GraphModule | None:
    """The graph of every path, ``error`` being torch's refusal of a batch of any size; None where paths differ, or the
    model asks another question than whether a batch is below a size.

    ``export(least, most)`` traces at batches of that many samples.
    """
    least, most = 1, _end_of_path(error, 1)
    found: GraphModule | None = None
    for _ in range(MAX_TRACES):
        if most < least:
            return None
        try:
            graph_module = export(least, most)
        except Exception as refused:
            most = min(most - 1, _end_of_path(refused, least))
            continue
        if found is not None and not same_program(found, graph_module):
            return None
        if most == MAX_BATCH:
            return graph_module  # the bounds of its data-dependent sizes are those of the largest batch
        found, least, most = graph_module, most + 1, MAX_BATCH
    return None


def _end_of_path(error: Exception, least: int) -> int:
    """Where the path that ``least`` samples take may end. torch suggests the sizes of the path that the example took:
    ``batch = Dim('batch', max=63)``, or ``min=64, max=127``, which lies above ``least``'s. 0 where it suggests none."""
    above = _suggested(error, "min")
    return above - 1 if above > least else _suggested(error, "max")


def _suggested(error: Exception, bound: str) -> int:
    found = re.search(rf"^\s*batch = Dim\('batch',.*\b{bound}=(\d+)", str(error), re.MULTILINE)
    return int(found.group(1)) if found else 0


def same_program(first: GraphModule, second: GraphModule) -> bool:
    """Whether both compute the same operators on the same values in the same order. What a node reads counts by where
    it was made; a constant by its value."""
    if len(first.graph.nodes) != len(second.graph.nodes):
        return False
    places: dict[Node, int] = {}
    for index, (one, other) in enumerate(zip(first.graph.nodes, second.graph.nodes, strict=True)):
        places[one] = places[other] = index
        if one.op != other.op or not _same_target(first, one, second, other):
            return False
        if not _same_arguments(_placed(one, places), _placed(other, places)):
            return False
    return True


def _same_target(first: GraphModule, one: Node, second: GraphModule, other: Node) -> bool:
    if one.op != "get_attr":
        return one.target == other.target
    values = [operator.attrgetter(str(node.target))(module) for module, node in ((first, one), (second, other))]
    if values[0] is values[1]:
        return True
    return all(isinstance(value, torch.Tensor) for value in values) and _same_tensor(*values)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """A tensor that cannot be read (on meta) is the same as none but itself."""
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or other.is_meta:
        return False
    return torch.equal(one, other)


class _Place(int):
    """A node's place in its graph, which is no number of the program's."""


def _placed(node: Node, places: dict[Node, int]) -> Any:
    return map_arg((node.args, node.kwargs), lambda read: _Place(places[read]))


def _same_arguments(one: Any, other: Any) -> bool:
    (leaves, form), (others, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return form == other_form and all(
        type(leaf) is type(match) and leaf == match for leaf, match in zip(leaves, others, strict=True)
    )
