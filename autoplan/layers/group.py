"""Which layer each node belongs to.

A *block* is the outermost repeated module: a child of a ModuleList or Sequential, so a path that ends in a number.
Containers are opened where their children make the better layers (a Sequential of Sequentials, the stages of a
ResNet or Swin); small parts of a Sequential (activation, norm, pooling) join the module before them. What is between
blocks joins the block that reads it, unless it holds a weight matrix of its own: then it is a layer just before that
block (the embeddings), or after the last (the head). A layer of many products without repetition is cut where few
bytes cross (:mod:`autoplan.layers.cut`).

Layers are contracted until the graph between them has no cycle, so their order is a topological one. The prologue
(see :mod:`autoplan.layers.facts`) never orders layers: each of its nodes is put in the first layer that uses it.
"""

from __future__ import annotations

import heapq
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autoplan.layers.blocks import find_blocks, is_leaf_class
from autoplan.layers.cut import cut_into_chunks, heavy_nodes, rough_flops
from autoplan.layers.facts import Facts, module_path, module_stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A layer before its costs are known: a name and nodes in graph order."""

    name: str
    nodes: tuple[Node, ...]


def group_nodes(facts: Facts) -> tuple[Group, ...]:
    """The layers in topological order; every call_function node is in exactly one."""
    blocks = find_blocks(facts)
    members = _contract(facts, blocks)
    ordered = _topological_order(facts, members)
    layers = _layers(facts, ordered, blocks)
    if not layers:
        layers = [("model", [])]
    return _with_prologue(facts, layers, blocks)


# ---------------------------------------------------------------------------------------------- contraction


def _contract(facts: Facts, blocks: Mapping[Node, str]) -> list[tuple[str, list[Node]]]:
    """Vertices (block path or "", nodes): blocks whole, other nodes single, getitem and effects with their maker."""
    mates = _module_mates(facts)
    vertex_of: dict[Node, str | Node] = {}
    for node in facts.nodes:
        if node not in facts.travelling:
            continue
        source = node.args[0] if node.target is operator.getitem else None  # a tuple never crosses, its items do
        own = vertex_of.get(source) if isinstance(source, Node) else None
        vertex_of[node] = own or blocks.get(node) or node
    members: dict[str | Node, list[Node]] = {}
    for node, key in vertex_of.items():
        if key is node and node not in facts.after and node is not facts.loss:
            key = vertex_of[mates.get(module_stack(node)[-1:], node)]
        members.setdefault(key, []).append(node)
    return [(key if isinstance(key, str) else "", nodes) for key, nodes in members.items()]


def _module_mates(facts: Facts) -> dict[tuple[tuple[str, str], ...], Node]:
    """For each module, its first node that another one reads: an effect without readers is kept beside it."""
    mates: dict[tuple[tuple[str, str], ...], Node] = {}
    for node in facts.nodes:
        if node in facts.travelling and node in facts.after:
            mates.setdefault(module_stack(node)[-1:], node)
    return mates


def _topological_order(facts: Facts, members: Sequence[tuple[str, list[Node]]]) -> list[tuple[str, list[Node]]]:
    """Contract cycles; order by dependency, then by first appearance; the loss comes last."""
    vertex_of = {node: index for index, (_, nodes) in enumerate(members) for node in nodes}
    after: dict[int, set[int]] = {index: set() for index in range(len(members))}
    for node, target in vertex_of.items():
        for earlier in facts.before[node]:
            source = vertex_of.get(earlier, target)
            if source != target:
                after[source].add(target)
    last = vertex_of.get(facts.loss) if facts.loss is not None else None
    if last is not None:
        for sink, later in after.items():
            if sink != last and not later:
                later.add(last)
    ordered = _kahn(after, [facts.position[nodes[0]] for _, nodes in members])
    if len(ordered) == len(members):
        return [members[index] for index in ordered]
    return _topological_order(facts, [_merge([members[i] for i in cycle], facts) for cycle in _cycles(after)])


def _cycles(after: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Vertices that reach each other, together; every vertex is in one of the lists."""
    import networkx as nx  # rarely needed, and a tenth of a second to load

    graph = nx.DiGraph([(source, target) for source, targets in after.items() for target in targets])
    graph.add_nodes_from(after)
    return [sorted(component) for component in nx.strongly_connected_components(graph)]


def _merge(parts: Sequence[tuple[str, list[Node]]], facts: Facts) -> tuple[str, list[Node]]:
    nodes = sorted((node for _, part in parts for node in part), key=facts.position.__getitem__)
    named = [(facts.position[part[0]], path) for path, part in parts if path]
    return (min(named)[1] if named else "", nodes)


def _kahn(after: Mapping[int, Collection[int]], first: Sequence[int]) -> list[int]:
    """Vertices in an order of ``after``, the smallest ``first`` where there is a choice; those in cycles left out."""
    waiting = dict.fromkeys(after, 0)
    for targets in after.values():
        for target in targets:
            waiting[target] += 1
    ready = [(first[index], index) for index, degree in waiting.items() if degree == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for later in after[index]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, (first[later], later))
    return order


# ---------------------------------------------------------------------------------------------- layers


def _layers(
    facts: Facts, ordered: Sequence[tuple[str, list[Node]]], blocks: Mapping[Node, str]
) -> list[tuple[str, list[Node]]]:
    """Blocks in order, with what lies between them before the block that reads it first."""
    real = [(path, nodes) for path, nodes in ordered if path]
    gaps = _gaps(facts, ordered, real)
    mean_flops = sum(rough_flops(node) for _, nodes in real for node in nodes) / max(1, len(real))
    opened = {ancestor for path, _ in real for ancestor in _ancestors(path)[:-1]}
    layers: list[tuple[str, list[Node]]] = []
    for index, (path, nodes) in enumerate([*real, ("", [])]):
        gap = gaps[index]
        is_last = index == len(real)
        if is_last and gap and real and not _stands_alone(facts, gap) and is_leaf_class(real[-1][1][0], real[-1][0]):
            layers[-1][1].extend(gap)
        elif gap and (is_last or _stands_alone(facts, gap)):
            role = "head" if is_last else "between" if index else "embedding"
            chunks = _cut_if_uncut(facts, gap, mean_flops)
            layers.extend((_dominant_module(facts, chunk, opened) or role, chunk) for chunk in chunks)
        else:
            nodes = [*gap, *nodes]
        if nodes:
            layers.append(((_dominant_module(facts, nodes, opened) or path) if path in opened else path, nodes))
    return layers


def _gaps(
    facts: Facts, ordered: Sequence[tuple[str, list[Node]]], real: Sequence[tuple[str, list[Node]]]
) -> dict[int, list[Node]]:
    """Nodes outside blocks, by the index of the first block that needs them (the number of blocks: none does)."""
    place = {node: index for index, (_, nodes) in enumerate(real) for node in nodes}
    gaps: dict[int, list[Node]] = defaultdict(list)
    for path, nodes in reversed(ordered):
        if path:
            continue
        own = set(nodes)
        readers = (later for node in nodes for later in facts.after.get(node, ()) if later not in own)
        at = min((place[later] for later in readers if later in place), default=len(real))
        place.update(dict.fromkeys(nodes, at))
        gaps[at].extend(nodes)
    for nodes in gaps.values():
        nodes.sort(key=facts.position.__getitem__)
    return gaps


def _stands_alone(facts: Facts, gap: Sequence[Node]) -> bool:
    return any(facts.has_matrix(node) for node in gap)


def _cut_if_uncut(facts: Facts, gap: list[Node], mean_flops: float) -> list[list[Node]]:
    """``gap`` as one layer, or as several where it is big and holds many products that no block divides."""
    heavy = heavy_nodes(gap)
    without_blocks = mean_flops == 0.0 and len(heavy) > 1
    is_big = len(heavy) >= 4 and sum(rough_flops(node) for node in gap) > 2 * mean_flops
    return cut_into_chunks(facts, gap) if without_blocks or is_big else [gap]


def _dominant_module(facts: Facts, nodes: Iterable[Node], opened: Collection[str]) -> str:
    """The innermost module that owns more than half of the parameter elements read here, or "".

    ``opened``: modules around blocks, too large to name one layer.
    """
    elements: dict[str, int] = defaultdict(int)
    total = 0
    for source, (node, parameter) in {s: (n, p) for n in nodes for s, p in facts.parameters_of(n)}.items():
        path = module_path(node) or str(source.target).rpartition(".")[0]
        total += parameter.numel()
        for ancestor in _ancestors(path):
            elements[ancestor] += parameter.numel()
    fit = [path for path, count in elements.items() if 2 * count > total and path not in opened]
    return max(fit, key=lambda path: path.count("."), default="")


def _ancestors(path: str) -> list[str]:
    """``a.b.c`` -> a, a.b, a.b.c"""
    return [path[: at.start()] for at in re.finditer(r"\.|$", path) if at.start()]


# ---------------------------------------------------------------------------------------------- prologue


def _with_prologue(
    facts: Facts, layers: Sequence[tuple[str, list[Node]]], blocks: Mapping[Node, str]
) -> tuple[Group, ...]:
    """Put each prologue node in the first layer that needs it; outside the block where it is not the block's own."""
    layer_of = {node: index for index, (_, nodes) in enumerate(layers) for node in nodes}
    by_path: dict[str, int] = {}
    for node, path in blocks.items():
        if node in layer_of:
            by_path.setdefault(path, layer_of[node])
    free_before = [bool(nodes) and nodes[0] not in blocks for _, nodes in layers]
    for node in reversed(facts.nodes):
        if node in layer_of:
            continue
        readers = {layer_of[later] for later in facts.after.get(node, ())}
        own = by_path.get(blocks.get(node, ""))
        if own is not None and readers <= {own}:
            layer_of[node] = own
            continue
        first = min(readers, default=0)
        # A table that many blocks share is kept out of the first: else it would differ from its equals.
        is_beside_block = first > 0 and free_before[first - 1] and not free_before[first]
        layer_of[node] = first - 1 if is_beside_block else first
    nodes_of: dict[int, list[Node]] = defaultdict(list)
    for node in facts.nodes:
        nodes_of[layer_of[node]].append(node)
    names = _unique([name for name, _ in layers])
    return tuple(Group(name=name, nodes=tuple(nodes_of[index])) for index, name in enumerate(names))


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = defaultdict(int)
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result
