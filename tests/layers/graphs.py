"""Captures and layer graphs of the shared small models, each traced once for all tests of a process."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import nn

from autoplan.capture import Capture, capture
from autoplan.layers import LayerGraph, build_layers
from tests.layers.oracles import assert_sound
from tests.support import models


class Traced(NamedTuple):
    model: nn.Module
    batch: models.Batch
    capture: Capture
    graph: LayerGraph


def traced(model: nn.Module, batch: models.Batch) -> Traced:
    """Capture and layers, checked for soundness."""
    captured = capture(model, batch)
    graph = build_layers(captured)
    assert_sound(captured, graph)
    return Traced(model, batch, captured, graph)


@functools.cache
def small(name: str) -> Traced:
    """A model of tests.support.models by its builder's name; three blocks where it has any."""
    builders = {"nano_gpt": 3, "tiny_gpt2": 3, "tiny_llama": 3, "tiny_t5": 3}
    build = getattr(models, name)
    return traced(*(build(layers=builders[name]) if name in builders else build()))
