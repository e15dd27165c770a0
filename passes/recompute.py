"""Recompute: let groups of a stage's nodes keep their inputs alone and run again in the backward (Chen et al. 2016).

Requires the graph of one stage, and groups of node names: all nodes of a layer (*full*), or its attention core
(*selective*, Korthikanti et al. 2022, section 5). Guarantees:

- Each group becomes one call of :func:`autoplan.passes.operators.recomputed` on a graph of its own, or several where it
  cannot stand in one piece. What others compute between the group's nodes is moved before or after it where neither
  random numbers nor memory that somebody writes are concerned; elsewhere the group is cut in two.
- Numbers stay. Whatever writes in place onto memory that the group did not make runs once and is not repeated: a
  BatchNorm keeps its input and stays out of the group, so its statistics are updated once. What reads memory that is
  written after the group began, or a buffer that the forward writes, stays out as well: the values would be others.
- Random numbers of a group are drawn again alike; groups that draw none don't save the generators' state.
- Parameters and constants are read by the stage and handed to the group, under their own names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from torch import fx
from torch.fx import GraphModule, Node

from autoplan.passes import operators
from autoplan.passes import regions as region_graphs
from autoplan.passes.graph_facts import GraphFacts
from autoplan.passes.split_stages import StageGraph

NAME = "recompute"


def recompute(stage: StageGraph, groups: Sequence[Collection[str]]) -> StageGraph:
    """``stage`` with every group of node names recomputed; names that the stage does not have are passed over."""
    module = stage.graph_module
    facts = GraphFacts(module.graph, module)
    order: list[Node] = list(facts.order)
    regions: list[list[Node]] = []
    for group in groups:
        order, found = _gathered(facts, order, frozenset(group), {node for region in regions for node in region})
        regions.extend(found)
    if not regions:
        return stage
    return dataclasses.replace(stage, graph_module=_written(module, facts, order, regions))


# --------------------------------------------------------------------------------------------- which nodes go together


def _gathered(
    facts: GraphFacts, order: list[Node], names: frozenset[str], taken: set[Node]
) -> tuple[list[Node], list[list[Node]]]:
    """The order in which each region of the group is one run, and those regions."""
    members = {n for n in order if n.name in names and n.op == "call_function" and n not in taken}
    while True:
        arranged, regions = _arranged(facts, order, members, taken)
        unsafe = set()
        for region in regions:
            inside, before = set(region), set(arranged[: arranged.index(region[0])])
            unsafe |= {node for node in region if not _repeatable(facts, node, inside, before)}
        if not unsafe:
            return arranged, regions
        members -= unsafe


def _arranged(
    facts: GraphFacts, order: list[Node], members: set[Node], taken: set[Node]
) -> tuple[list[Node], list[list[Node]]]:
    """Runs of members: strangers between them go ahead, or behind where they read what the run computes."""
    arranged: list[Node] = []
    regions: list[list[Node]] = []
    run: dict[Node, None] = {}
    behind: dict[Node, None] = {}

    def close() -> None:
        if run:
            regions.append(list(run))
            arranged.extend([*run, *behind])
            run.clear()
            behind.clear()

    left = len(members)
    for node in order:
        if node in members:
            left -= 1
            if behind and any(source in behind for source in facts.dependencies(node)):
                close()
            run[node] = None
        elif not run:
            arranged.append(node)
        elif not left or node in taken or facts.is_random(node) or facts.touches_written(node):
            close()
            arranged.append(node)
        elif any(source in run or source in behind for source in facts.dependencies(node)):
            behind[node] = None
        else:
            arranged.append(node)
    close()
    return arranged, regions


def _repeatable(facts: GraphFacts, node: Node, inside: set[Node], before: set[Node]) -> bool:
    """Whether ``node`` computes the same when its region runs again, and changes nothing that others see."""
    for memory in (node, *node.all_input_nodes):
        writes = [write for write, _ in facts.writes_to(memory)]
        if not writes or all(other in inside for other in facts.same_memory(memory)):
            continue
        if facts.is_written_attribute(memory) or not all(write in before for write in writes):
            return False
    return True


# ------------------------------------------------------------------------------------------------- the rewritten graph


def _written(module: GraphModule, facts: GraphFacts, order: list[Node], regions: list[list[Node]]) -> GraphModule:
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    first = {region[0]: (index, region) for index, region in enumerate(regions)}
    inside = {node for region in regions for node in region}
    for node in order:
        if node in first:
            index, region = first[node]
            name = f"recomputed_{index}"
            setattr(module, name, _submodule(module, facts, region))
            _call(graph, new, name, region)
        elif node not in inside:
            new[node] = graph.node_copy(node, lambda n: new[n])
    graph.output(fx.node.map_arg(module.graph.output_node().args[0], lambda n: new[n]))
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _submodule(module: GraphModule, facts: GraphFacts, region: list[Node]) -> GraphModule:
    graph, outputs = region_graphs.body(region)
    graph.output(outputs[0] if len(outputs) == 1 else outputs)
    graph.lint()
    made = GraphModule(module, graph, class_name="Recomputed")
    made.meta["random"] = any(facts.is_random(node) for node in region)
    return made


def _call(graph: fx.Graph, new: dict[Node, Node], name: str, region: list[Node]) -> None:
    outputs = region_graphs.outputs(region)
    submodule = graph.get_attr(name)
    call = graph.call_function(operators.recomputed, (submodule, *(new[node] for node in region_graphs.inputs(region))))
    call.meta["val"] = tuple(node.meta.get("val") for node in outputs)
    if len(outputs) == 1:
        new[outputs[0]] = call
        call.meta = dict(outputs[0].meta)
        return
    region_graphs.unpack(graph, call, outputs, new)
