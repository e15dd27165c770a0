"""Layers: a captured graph as a chain (or DAG) of layers with costs, repeated ones folded into kinds."""

from autoplan.layers.build import build_layers
from autoplan.layers.checkpointing import checkpointing_words, without_checkpointing
from autoplan.layers.facts import Facts, gather_facts
from autoplan.layers.types import (
    Attention,
    Collective,
    Edge,
    Gemm,
    Layer,
    LayerGraph,
    LayerKind,
    Operator,
    Parameter,
)

__all__ = [
    "Attention",
    "Collective",
    "Edge",
    "Facts",
    "Gemm",
    "Layer",
    "LayerGraph",
    "LayerKind",
    "Operator",
    "Parameter",
    "build_layers",
    "checkpointing_words",
    "gather_facts",
    "without_checkpointing",
]
