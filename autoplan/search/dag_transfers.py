"""What crosses between stages, as the runtime sends it: each value once to every later stage that reads it.

For a span of layers i to j - 1 held by one stage, in bytes a micro-batch:

    received(i, j)  values made before i and read in the span, each once
    sent(i, j)      values made in the span and read after it, each once: the copy that is needed first holds up the
                    pipeline, those to stages further on travel beside the stages between
    held(i, j)      what a stage keeps of the received for its backward beyond what it hands over. A layer's own count
                    of saved activations holds what its readers keep, wherever they are: a value that enters is paid
                    for by one that leaves, except where a skip brings in more

Where every value is read by the next layer alone, all of these follow from the bytes that cross each cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.layers.types import Edge, LayerGraph

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A value that stage ``source`` sends to each of ``destinations`` (ascending), ``bytes_each`` a micro-batch."""

    value: str
    source: int
    destinations: tuple[int, ...]
    bytes_each: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """[L + 1, L + 1] bytes a micro-batch for each span (first, end); 0 where end <= first."""

    received: Floats
    sent: Floats
    held: Floats


def edge_bytes(edge: Edge, samples: int) -> float:
    """Bytes of a value for a micro-batch of ``samples``."""
    return edge.bytes_per_sample * (samples if edge.batched else 1)


def transfers(graph: LayerGraph, stage_of_layer: Sequence[int], *, samples: int) -> tuple[Transfer, ...]:
    """Every value that crosses between stages, in graph order. Raises ValueError where one would flow backwards."""
    found = []
    for edge in graph.edges:
        source = stage_of_layer[edge.source]
        readers = {stage_of_layer[target] for target in edge.targets} - {source}
        if readers and min(readers) < source:
            raise ValueError(f"{edge.value} is made in stage {source} and read in stage {min(readers)}")
        if readers:
            found.append(
                Transfer(
                    value=edge.value,
                    source=source,
                    destinations=tuple(sorted(readers)),
                    bytes_each=edge_bytes(edge, samples),
                )
            )
    return tuple(found)


def is_chain(graph: LayerGraph) -> bool:
    """Whether every layer hands values to the next alone, so that no other order of the layers is possible."""
    direct = all(edge.targets == (edge.source + 1,) for edge in graph.edges)
    return direct and {edge.source for edge in graph.edges} == set(range(len(graph.layers) - 1))


def crossing(graph: LayerGraph, *, samples: int) -> Crossing:
    """Bytes of every span. A value with source u and readers t1 < t2 < ... is received by (i, j) where the first
    reader from i on comes before j; it adds its bytes to a rectangle of spans for each reader."""
    size = len(graph.layers) + 1
    received, sent, handed = (np.zeros((size + 1, size + 1)) for _ in range(3))
    for edge in graph.edges:
        amount, made = edge_bytes(edge, samples), edge.source
        for before, reader in zip((made, *edge.targets), edge.targets, strict=False):
            _add(received, (before + 1, reader + 1), (reader + 1, size), amount)
        _add(sent, (0, made + 1), (made + 1, edge.targets[-1] + 1), amount)
        _add(handed, (0, made + 1), (made + 1, edge.targets[0] + 1), amount)
    into, out, over = (_summed(corners)[:size, :size] for corners in (received, sent, handed))
    return Crossing(received=into, sent=out, held=np.maximum(0.0, into - over))


def _summed(corners: Floats) -> Floats:
    """Whole bytes add up exactly; shares of a byte (a static trace's, divided by its batch) may leave crumbs behind."""
    sums: Floats = np.cumsum(np.cumsum(corners, axis=0), axis=1)
    return np.where(sums < 0.5, 0.0, sums)


def _add(corners: Floats, rows: tuple[int, int], columns: tuple[int, int], amount: float) -> None:
    """Add ``amount`` to the rectangle [rows) x [columns) of the matrix whose double running sum ``corners`` is."""
    for row, sign in zip(rows, (1.0, -1.0), strict=True):
        for column, same in zip(columns, (1.0, -1.0), strict=True):
            corners[row, column] += sign * same * amount
