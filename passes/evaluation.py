"""evaluation: a stage's graph as the model computes it after ``eval()``.

Requires the graph of one stage, traced in training mode, with all passes applied; or traced after ``eval()``, which it
leaves as it is. Guarantees: dropout keeps everything (on a part of a split value too), attention drops nothing,
BatchNorm and InstanceNorm use their running statistics and change none, and the counters of batches stay. What else
draws random numbers, or writes to a buffer, is refused: nothing tells how the model would do without. What the model's
own Python did under ``if self.training`` is part of the trace and stays. Parameters and buffers are the stage's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoplan.capture.errors import node_line
from autoplan.errors import StrategyError
from autoplan.passes import context_operators, operators
from autoplan.passes.graph_facts import GraphFacts, copy_graph
from autoplan.passes.split_stages import StageGraph

NAME = "evaluation"
aten = torch.ops.aten

# Where the argument is that says whether the model trains.
_TRAINS: dict[Any, int] = {
    aten.dropout.default: 2,
    aten.feature_dropout.default: 2,
    aten.alpha_dropout.default: 2,
    aten.feature_alpha_dropout.default: 2,
    aten.native_dropout.default: 2,
    aten.rrelu.default: 3,
}
# Likewise of what has running statistics, the fourth argument, and does without where there are none.
_COUNTS: dict[Any, int] = {aten.batch_norm.default: 5, aten.instance_norm.default: 5}
# Where attention's share of dropped places is.
_DROPS: dict[Any, int] = {
    aten.scaled_dot_product_attention.default: 4,
    context_operators.positions_attention: 4,
}
# Random operators of a part of a value: how many arguments stand before the operator's own.
_DRAWN: dict[Any, int] = {
    operators.drawn_apart: 2,
    operators.drawn_in_part: 3,
    context_operators.drawn_for_positions: 3,
}


def evaluation(stage: StageGraph) -> StageGraph:
    """``stage`` for evaluation. Raises StrategyError with the user's line for what has no such form."""
    module = _evaluated(stage.graph_module)
    return dataclasses.replace(stage, graph_module=module, mutated_buffers=())


def _evaluated(module: GraphModule) -> GraphModule:
    graph = copy_graph(module)
    facts = GraphFacts(graph, module)
    inner: dict[str, GraphModule] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            _switch(node)
        elif node.op == "get_attr":
            value = facts.attribute(str(node.target))
            if isinstance(value, GraphModule):
                inner[str(node.target)] = _evaluated(value)
    made = GraphModule(module, graph, class_name=type(module).__name__)
    made.meta.update(module.meta)
    for name, value in inner.items():
        path, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(path), leaf, value)
    _erase_counts(made)
    _check(made)
    made.recompile()
    return made


def _switch(node: Node) -> None:
    """Write the node as in evaluation."""
    if node.target in _DRAWN:
        drawn: Any = node.args[0]
        node.target, node.args = drawn, node.args[_DRAWN[node.target] :]
    if node.target is context_operators.positions_attention_apart:
        node.target = context_operators.positions_attention
    if node.target in _TRAINS:
        _set(node, _TRAINS[node.target], False)
    elif node.target in _DROPS:
        _set(node, _DROPS[node.target], 0.0, name="dropout_p")
    elif node.target in _COUNTS and node.args[3] is not None:
        _set(node, _COUNTS[node.target], False)


def _set(node: Node, index: int, value: Any, *, name: str = "") -> None:
    """The argument at ``index``, where it is given: what is left out has the value of evaluation."""
    if name in node.kwargs:
        node.kwargs = {**node.kwargs, name: value}
    elif len(node.args) > index:
        node.args = (*node.args[:index], value, *node.args[index + 1 :])


def _erase_counts(module: GraphModule) -> None:
    """Drop in-place operators on buffers whose results nobody reads: counts of the batches seen."""
    facts = GraphFacts(module.graph, module)
    for node in reversed(facts.order):
        if facts.writes_buffer(node) and not node.users:
            module.graph.erase_node(node)


def _check(module: GraphModule) -> None:
    facts = GraphFacts(module.graph, module)
    for node in facts.order:
        problem = "draws random numbers" if facts.is_random(node) else ""
        if facts.writes_buffer(node):
            problem = "writes to a buffer of the model"
        if problem:
            raise StrategyError(
                f"`{node.target}` {problem}, and the trace does not say what it does after eval()",
                where=node_line(node),
                legal="dropout, attention with dropout, BatchNorm and InstanceNorm with running statistics",
                attempt="compile the model after model.eval(), and evaluate that program",
            )
