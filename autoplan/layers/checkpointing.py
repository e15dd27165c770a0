"""Which layers the model itself recomputes in its backward (activation checkpointing), and how that is said.

Plans recompute whole layers, so a layer most of whose operators are in checkpointed regions is recomputed in full, and
one with fewer keeps them; the numbers are the same either way, and which way it is is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.fx import Node

from autoplan.capture.checkpointing import META
from autoplan.capture.types import Capture
from autoplan.layers.types import LayerGraph


def is_checkpointed(nodes: Sequence[Node]) -> bool:
    """Whether the model recomputes most of these operators of a layer."""
    return 2 * sum(META in node.meta for node in nodes) > len(nodes)


def without_checkpointing(layers: LayerGraph) -> LayerGraph:
    """The same layers, recomputed as the plan says and not as the model does."""
    kinds = tuple(dataclasses.replace(kind, checkpointed=False) for kind in layers.kinds)
    return dataclasses.replace(layers, kinds=kinds)


def checkpointing_words(capture: Capture, layers: LayerGraph) -> tuple[str, ...]:
    """What the model recomputes and how the plan follows it, in sentences; () where it recomputes nothing."""
    lines = {node.name: node.meta[META] for node in capture.graph_module.graph.nodes if META in node.meta}
    held = [layer for layer in layers.layers if any(node in lines for node in layer.nodes)]
    whole = [layer for layer in held if layers.kinds[layer.kind].checkpointed]
    said = []
    if whole:
        line = next(lines[node] for node in whole[0].nodes if node in lines)
        said.append(
            f"recompute full of {_count(len(whole))}, asked for by the model (activation checkpointing at {line}): "
            "a strategy's `recompute` overrides it"
        )
    part = [layer for layer in held if not layers.kinds[layer.kind].checkpointed]
    if part:
        line = next(lines[node] for node in part[0].nodes if node in lines)
        said.append(
            f"activation checkpointing at {line} covers less than half of {part[0].name}"
            + (f" and of {len(part) - 1} more" if len(part) > 1 else "")
            + ": plans recompute whole layers, so there it is left to the plan"
        )
    return tuple(said)


def _count(layers: int) -> str:
    return "1 layer" if layers == 1 else f"{layers} layers"
