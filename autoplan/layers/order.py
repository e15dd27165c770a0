"""The layers of a model in another of the orders in which they can be computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autoplan.layers.types import Edge, LayerGraph


def reordered(graph: LayerGraph, order: Sequence[int]) -> LayerGraph:
    """The same model with its layers in another order: ``order[k]`` is the layer that comes k-th. Raises ValueError
    where a value would be read before it is made, or a memory written before others are done with it."""
    if sorted(order) != list(range(len(graph.layers))):
        raise ValueError(f"{tuple(order)} is no order of {len(graph.layers)} layers")
    place = {layer: index for index, layer in enumerate(order)}
    kept = tuple(sorted((place[one], place[other]) for one, other in graph.keep_order))
    for one, other in kept:
        if one > other:
            raise ValueError(f"layers {one} and {other} share memory that one writes in place, and would change order")
    return dataclasses.replace(
        graph,
        layers=tuple(graph.layers[layer] for layer in order),
        edges=reordered_edges(graph.edges, order),
        keep_order=kept,
        layer_digests=tuple(graph.layer_digests[layer] for layer in order) if graph.layer_digests else (),
    )


def reordered_edges(edges: Sequence[Edge], order: Sequence[int]) -> tuple[Edge, ...]:
    """Values between layers that stand in another order, by the place of the layer that makes them."""
    place = {layer: index for index, layer in enumerate(order)}
    moved = [
        dataclasses.replace(edge, source=place[edge.source], targets=tuple(sorted(place[t] for t in edge.targets)))
        for edge in edges
    ]
    for edge in moved:
        if edge.targets[0] <= edge.source:
            raise ValueError(f"{edge.value} is read by layer {edge.targets[0]} before layer {edge.source} makes it")
    return tuple(sorted(moved, key=lambda edge: edge.source))


def in_order_of(graph: LayerGraph, names: Sequence[str]) -> LayerGraph:
    """The model with its layers in the order of ``names``; as it is where these are not its layers."""
    place = {layer.name: index for index, layer in enumerate(graph.layers)}
    if list(place) == list(names) or set(place) != set(names) or len(names) != len(graph.layers):
        return graph
    return reordered(graph, [place[name] for name in names])
