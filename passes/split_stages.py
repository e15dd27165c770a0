"""Cut one graph into the graphs of the pipeline's stages.

Requires a graph whose nodes carry ``meta["val"]``, and for the layers' nodes the stage they belong to. Guarantees:

- A value is computed in one stage and sent from there *directly* to every stage that reads it, once a stage: a skip
  connection never travels through the stages between.
- What depends on no parameter (masks, position ids, rotary tables) is computed again wherever it is used, from the
  batch that every stage can see; so are views of a parameter, whose owner is whoever uses them.
- A parameter read in two stages is held by both and named in ``shared_parameters``: its gradient is their sum.
- Sizes come from a batch input, so no integer is ever sent.
- An operator that writes in place onto a received value writes onto a copy; where that would change what another
  stage reads, the pass refuses with the user's file and line. A buffer that the forward writes (BatchNorm statistics)
  stays with the one stage that writes it.
- No value flows backwards: stage(producer) <= stage(reader).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx import GraphModule, Node

from autoplan.capture.errors import node_line
from autoplan.capture.shapes import batch_symbol
from autoplan.errors import AutoplanError
from autoplan.passes.graph_facts import GraphFacts, affine_shape, copy_graph, memory_order, sizes_from_batch

NAME = "split_stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that one stage computes and ``destinations`` (ascending) read.

    ``sizes``: a dimension is ``per_sample * micro_batch + constant`` long. ``order``: its dimensions from the outermost
    in memory to the innermost; the trace dropped copies that the layout made needless, so readers must get this layout.
    ``differentiable``: a gradient comes back from every destination, and their sum is the value's gradient.
    """

    name: str
    source: int
    destinations: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def shape(self, micro_batch: int) -> tuple[int, ...]:
        """The shape for a micro-batch of that many samples."""
        return tuple(per_sample * micro_batch + constant for per_sample, constant in self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGraph:
    """One stage: ``graph_module(*batch_inputs, *receives) -> (*sends, loss)``, the loss on the last stage only.

    ``batch_inputs`` are names of the batch's placeholders (and of any other placeholder of the whole graph);
    ``parameters`` and ``buffers`` are the names that its get_attr nodes read, ``mutated_buffers`` those it writes;
    ``shared_parameters`` are read by other stages too, under this or a tied name.
    """

    index: int
    graph_module: GraphModule
    batch_inputs: tuple[str, ...]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]
    returns_loss: bool
    parameters: tuple[str, ...]
    shared_parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    mutated_buffers: tuple[str, ...]


def split_stages(graph_module: GraphModule, stage_of_node: Mapping[str, int]) -> tuple[StageGraph, ...]:
    """The stages' graphs, in order. ``stage_of_node`` maps node names to stages from 0; nodes that it does not name
    (other passes made them) go as late as their readers allow, or as early as they can if they read a parameter.

    Raises AutoplanError where a value would flow backwards, where an in-place write reaches another stage, or where
    what crosses is no tensor of a known size.
    """
    graph = copy_graph(graph_module)
    batch = batch_symbol(graph_module)
    sizes_from_batch(graph, batch)
    facts = GraphFacts(graph, graph_module)
    stages = max(stage_of_node.values(), default=0) + 1
    cut = _Cut(facts, _assign(facts, stage_of_node, stages), stages)
    cut.check()
    needed = cut.needed()
    values = {name: _value(cut, node, targets, batch) for name, (node, targets) in cut.crossing(needed).items()}
    built = [_build(cut, stage, needed[stage], values, graph_module) for stage in range(stages)]
    return _with_shared(built, graph_module)


# ----------------------------------------------------------------------------------------- which stage a node is in


def _assign(facts: GraphFacts, stage_of_node: Mapping[str, int], stages: int) -> dict[Node, int]:
    """The stage of every node that is computed once; what is cloned where it is used has none."""
    early: dict[Node, int] = {}
    for node in facts.order:
        if not facts.computed_once(node):
            continue
        mapped = stage_of_node.get(node.name)
        if mapped is None:
            mapped = max((early[d] for d in facts.dependencies(node) if d in early), default=-1)
        early[node] = mapped
    stage: dict[Node, int] = {}
    for node in reversed(facts.order):
        if node not in early:
            continue
        pinned = node.name in stage_of_node or facts.reads_parameter(node) or facts.writes(node)
        readers = [stage[user] for user in facts.readers(node) if user in stage]
        if node is facts.loss:
            readers.append(stages - 1)
        stage[node] = early[node] if pinned and early[node] >= 0 else min(readers, default=early[node])
    _settle_leftovers(facts, stage, stage_of_node)
    for node in facts.order:
        if node in stage and facts.is_getitem(node):
            stage[node] = stage[node.all_input_nodes[0]]
    return stage


def _settle_leftovers(facts: GraphFacts, stage: dict[Node, int], stage_of_node: Mapping[str, int]) -> None:
    """A node with neither inputs nor readers in any stage (a counter) goes with the next one that has a stage."""
    following = 0
    for node in reversed(facts.order):
        if node in stage and stage[node] < 0:
            stage[node] = following
        following = stage_of_node.get(node.name, following)


# ------------------------------------------------------------------------------------------------------------- the cut


class _Cut:
    """The stages of the nodes, and what follows from them."""

    def __init__(self, facts: GraphFacts, stage: dict[Node, int], stages: int) -> None:
        self.facts, self.stage, self.stages = facts, stage, stages

    def check(self) -> None:
        """No backward flow, and every in-place write is seen by exactly those who would have seen it."""
        for node, stage in self.stage.items():
            for source in self.facts.value_inputs(node):
                if self.stage.get(source, 0) > stage:
                    raise AutoplanError(
                        f"`{source.name}` is computed in stage {self.stage[source]} and read by `{node.name}` in the "
                        f"earlier stage {stage}",
                        where=node_line(node),
                        legal="stages that follow the order in which values are computed",
                        attempt="plan again for this model",
                    )
                self._check_writes(node, source)

    def _check_writes(self, node: Node, source: Node) -> None:
        """``node`` reads this stage's copy of a memory. Every write before it must have reached that copy: made onto
        it here, or onto what it was received from before it was sent; and no write after ``node`` may have."""
        here, position = self.stage[node], self.facts.position
        root = self.local_root(source, here)
        home = self.stage.get(root, here)
        for write, operand in self.facts.writes_to(source):
            if write is node or write not in self.stage:
                continue
            at = self.stage[write]
            onto_copy = at == here and self.local_root(operand, here) is root
            at_home = home < here and at == home and self.local_root(operand, at) is self.local_root(root, at)
            sent_before = home < here and at < home and position[write] < position[root]
            if position[write] < position[node]:
                if not (onto_copy or at_home or sent_before):
                    self._refuse_write(write, node)
            elif at_home:
                self._refuse_write(write, node)

    def _refuse_write(self, write: Node, node: Node) -> None:
        raise AutoplanError(
            f"`{write.name}` writes in place, in stage {self.stage[write]}, onto memory that `{node.name}` reads in "
            f"stage {self.stage[node]}",
            where=node_line(write),
            legal="writes in place within one stage",
            attempt="make the operation out of place (x = x + y, not x += y), or force pipeline=1",
        )

    def local_root(self, node: Node, stage: int) -> Node:
        """Follow views back to where this stage's copy of the memory begins: a received value or a new one."""
        while self.stage.get(node, stage) == stage and (source := self.facts.view_of(node)) is not None:
            node = source
        return node

    def needed(self) -> list[set[Node]]:
        """For each stage the nodes that it computes or receives; from the last stage, for sends follow from needs."""
        needed: list[set[Node]] = [set() for _ in range(self.stages)]
        for stage in reversed(range(self.stages)):
            roots = [n for later in needed[stage + 1 :] for n in later if self.stage.get(n) == stage]
            roots += [n for n, at in self.stage.items() if at == stage and self.facts.writes_buffer(n)]
            if stage == self.stages - 1:
                roots.append(self.facts.loss)
            self._collect(roots, stage, needed[stage])
        return needed

    def _collect(self, roots: list[Node], stage: int, found: set[Node]) -> None:
        while roots:
            node = roots.pop()
            if node in found:
                continue
            found.add(node)
            if self.is_received(node, stage):
                continue
            roots.extend(self.facts.value_inputs(node))
            roots.extend(write for write in self.facts.earlier_writes(node) if self.stage.get(write, stage) == stage)

    def is_received(self, node: Node, stage: int) -> bool:
        return self.stage.get(node, stage) < stage

    def crossing(self, needed: list[set[Node]]) -> dict[str, tuple[Node, tuple[int, ...]]]:
        """Values that cross, by name, in graph order, with the stages that receive them."""
        found = {}
        for node in self.facts.order:
            targets = tuple(s for s in range(self.stages) if node in needed[s] and self.is_received(node, s))
            if targets:
                found[node.name] = (node, targets)
        return found


def _value(cut: _Cut, node: Node, targets: tuple[int, ...], batch: object) -> Value:
    tensor = node.meta.get("val")
    if not isinstance(tensor, Tensor):
        raise AutoplanError(
            f"`{node.name}` ({node.target}) would cross from stage {cut.stage[node]} to stage {targets[0]}, and it is "
            "no tensor of a size known before the program runs",
            where=node_line(node),
            legal="tensors between stages",
            attempt="keep the Python number within one layer, or force pipeline=1",
        )
    return Value(
        name=node.name,
        source=cut.stage[node],
        destinations=targets,
        sizes=affine_shape(tensor, batch, node),
        order=memory_order(tensor),
        dtype=tensor.dtype,
        differentiable=cut.facts.differentiable(node),
    )


# ------------------------------------------------------------------------------------------------ building a stage


def _build(cut: _Cut, stage: int, needed: set[Node], values: Mapping[str, Value], whole: GraphModule) -> StageGraph:
    facts = cut.facts
    graph = fx.Graph()
    new: dict[Node, Node] = {}
    batch_inputs = [n for n in facts.order if n in needed and n.op == "placeholder"]
    received = [n for n in facts.order if n in needed and cut.is_received(n, stage)]
    computed = [n for n in needed if not cut.is_received(n, stage)]
    written = {cut.local_root(operand, stage) for n in computed for operand in facts.written_operands(n)}
    for node in (*batch_inputs, *received):
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in (*received, *batch_inputs):
        if node in written:
            placeholder = new[node]
            new[node] = graph.call_function(torch.ops.aten.clone.default, (placeholder,))
            new[node].meta = dict(node.meta)
    for node in facts.order:
        if node in needed and node not in new:
            new[node] = graph.node_copy(node, lambda n: new[n])
    sends = tuple(value for value in values.values() if value.source == stage)
    by_name = {node.name: node for node in needed}
    outputs = [new[by_name[value.name]] for value in sends]
    last = stage == cut.stages - 1
    graph.output((*outputs, new[facts.loss]) if last else tuple(outputs))
    graph.lint()
    module = GraphModule(whole, graph, class_name=f"Stage{stage}")
    read = [str(n.target) for n in graph.nodes if n.op == "get_attr"]
    kinds = {name: facts.attribute(name) for name in dict.fromkeys(read)}
    buffers = tuple(
        n for n, value in kinds.items() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    )
    return StageGraph(
        index=stage,
        graph_module=module,
        batch_inputs=tuple(node.name for node in batch_inputs),
        receives=tuple(values[node.name] for node in received),
        sends=sends,
        returns_loss=last,
        parameters=tuple(n for n, value in kinds.items() if isinstance(value, nn.Parameter)),
        shared_parameters=(),
        buffers=buffers,
        mutated_buffers=tuple(name for name in buffers if name in facts.written_buffers),
    )


def _with_shared(stages: list[StageGraph], whole: GraphModule) -> tuple[StageGraph, ...]:
    """Name the parameters that several stages read; tied names are one parameter, because they are one object."""
    objects = dict(whole.named_parameters(remove_duplicate=False))
    users: dict[int, set[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            users.setdefault(id(objects[name]), set()).add(stage.index)
    return tuple(
        dataclasses.replace(
            stage, shared_parameters=tuple(n for n in stage.parameters if len(users[id(objects[n])]) > 1)
        )
        for stage in stages
    )
