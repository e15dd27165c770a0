"""What the layer tests compare with: the graph's own rules, and a real run on CPU."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from autoplan.capture import Capture, gather_inputs
from autoplan.layers import LayerGraph, gather_facts


def assert_sound(capture: Capture, graph: LayerGraph) -> None:
    """Every node in one layer, in graph order; layers in topological order; edges exactly what crosses; loss last."""
    facts = gather_facts(capture)
    listed = [name for layer in graph.layers for name in layer.nodes]
    assert sorted(listed) == sorted(node.name for node in facts.nodes)
    layer_of = {name: index for index, layer in enumerate(graph.layers) for name in layer.nodes}
    position = {node.name: index for index, node in enumerate(facts.nodes)}
    for layer in graph.layers:
        order = [position[name] for name in layer.nodes]
        assert order == sorted(order), layer.name
        assert len(layer.nodes) == len(graph.kinds[layer.kind].operators)
        assert len(layer.parameters) == len(graph.kinds[layer.kind].parameters)
    assert len({layer.name for layer in graph.layers}) == len(graph.layers)
    crossing: dict[str, set[int]] = defaultdict(set)
    for node in facts.nodes:
        for source in node.all_input_nodes:
            if source in facts.travelling and layer_of[source.name] != layer_of[node.name]:
                crossing[source.name].add(layer_of[node.name])
    assert {edge.value: set(edge.targets) for edge in graph.edges} == crossing
    for edge in graph.edges:
        assert edge.source == layer_of[edge.value]
        assert list(edge.targets) == sorted(edge.targets) and edge.targets[0] > edge.source
    assert facts.loss is not None and layer_of[facts.loss.name] == len(graph.layers) - 1


def saved_bytes(graph: LayerGraph, batch: int) -> dict[str, float]:
    """What the layer graph says that the backward keeps for ``batch`` samples, by layer."""
    return {
        layer.name: sum(op.saved_bytes * (batch if op.batched else 1) for op in graph.kinds[layer.kind].operators)
        for layer in graph.layers
    }


def really_saved_bytes(capture: Capture, graph: LayerGraph, batch: Any) -> dict[str, float]:
    """What autograd keeps in a real forward, by the layer that made it; parameters, buffers and inputs aside."""
    inputs = gather_inputs(capture, batch)
    known = (*capture.graph_module.parameters(), *capture.graph_module.buffers(), *inputs)
    run = _Recorder(capture, {tensor.untyped_storage()._cdata for tensor in known if isinstance(tensor, Tensor)})
    run.run(*inputs, enable_io_processing=False)
    layer_of = {name: layer.name for layer in graph.layers for name in layer.nodes}
    total: dict[str, float] = {layer.name: 0.0 for layer in graph.layers}
    for storage, size in run.saved.items():
        total[layer_of[run.maker[storage]]] += size
    return total


class _Recorder(Interpreter):
    def __init__(self, capture: Capture, excluded: set[int]) -> None:
        super().__init__(capture.graph_module)
        self.excluded = excluded
        self.saved: dict[int, int] = {}
        self.maker: dict[int, str] = {}
        self.alive: list[Any] = []

    def _made(self, tensor: Tensor, name: str) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        self.maker.setdefault(storage._cdata, name)
        return storage._cdata

    def run_node(self, n: Node) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in self.excluded:
                self.saved[self._made(tensor, n.name)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = super().run_node(n)
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, Tensor) and n.op == "call_function" and n.target is not operator.getitem:
                self._made(tensor, n.name)
        return value
