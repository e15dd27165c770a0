"""Layers: a captured graph as a chain (or DAG) of layers with costs, repeated ones folded into kinds."""

from autoplan.layers.build import build_layers
from autoplan.layers.facts import Facts, gather_facts

__all__ = ["Facts", "build_layers", "gather_facts"]
