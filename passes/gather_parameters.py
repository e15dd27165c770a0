"""ZeRO-3: a stage reads slices of its parameters, and makes them whole a layer at a time (Rajbhandari et al. 2020).

Requires the graph of one stage, and the node names of each layer. Guarantees: every reader of a parameter reads it from
a :func:`autoplan.passes.operators.gather_slices` node that stands before the layer's first reader and gathers all that
the layer reads of one dtype in one collective. get_attr nodes keep their names; what they read at run time is this
rank's flat slice. A parameter read by two layers is gathered for each, so that it lives for no longer than one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node

from autoplan.passes import operators
from autoplan.passes.graph_facts import copy_graph
from autoplan.passes.split_stages import StageGraph

NAME = "gather_parameters"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatheredStage:
    """The rewritten stage; ``origin`` names, for every node put in, the reader beside which it belongs."""

    stage: StageGraph
    origin: dict[str, str]


def gather_parameters(stage: StageGraph, layers: Sequence[frozenset[str]]) -> GatheredStage:
    """``stage`` with its parameters gathered for each layer; readers outside all layers have a gather of their own."""
    module = stage.graph_module
    layer_of = {name: index for index, names in enumerate(layers) for name in names}
    graph = copy_graph(module)
    origin: dict[str, str] = {}
    for readers in _readers(graph, module, layer_of):
        _gather(graph, module, readers, origin)
    graph.lint()
    made = GraphModule(module, graph, class_name=type(module).__name__)
    return GatheredStage(stage=dataclasses.replace(stage, graph_module=made), origin=origin)


Readers = list[tuple[Node, Node]]  # (parameter's get_attr node, node that reads it), in graph order


def _readers(graph: fx.Graph, module: nn.Module, layer_of: dict[str, int]) -> list[Readers]:
    """What is gathered together: of one layer and one dtype."""
    together: dict[tuple[object, torch.dtype], Readers] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            parameter = _parameter(source, module)
            if parameter is not None and node.op != "output":
                layer = layer_of.get(node.name, node.name)
                together.setdefault((layer, parameter.dtype), []).append((source, node))
    return list(together.values())


def _gather(graph: fx.Graph, module: nn.Module, readers: Readers, origin: dict[str, str]) -> None:
    by_name: dict[str, list[tuple[Node, Node]]] = {}
    for source, reader in readers:
        by_name.setdefault(str(source.target), []).append((source, reader))
    first = readers[0][1]
    wholes = [pairs[0][0].meta.get("val", _attribute(module, name)) for name, pairs in by_name.items()]
    with graph.inserting_before(first):
        slices = [graph.get_attr(name) for name in by_name]
        for node, name in zip(slices, by_name, strict=True):
            node.meta = dict(by_name[name][0][0].meta)
        shapes = tuple(tuple(whole.shape) for whole in wholes)  # of the metadata: local to the tensor axis
        gathered = graph.call_function(operators.gather_slices, (shapes, *slices))
        gathered.meta["val"] = tuple(wholes)
        origin[gathered.name] = first.name
        for index, pairs in enumerate(by_name.values()):
            whole = graph.call_function(operator.getitem, (gathered, index))
            whole.meta = {**pairs[0][0].meta, "val": wholes[index]}
            origin[whole.name] = first.name
            for source, reader in pairs:
                reader.replace_input_with(source, whole)
    for source in {source for source, _ in readers}:
        if not source.users:
            graph.erase_node(source)


def _parameter(node: Node, module: nn.Module) -> nn.Parameter | None:
    if node.op != "get_attr":
        return None
    value = _attribute(module, str(node.target))
    return value if isinstance(value, nn.Parameter) else None


def _attribute(module: nn.Module, name: str) -> Any:
    return operator.attrgetter(name)(module)
