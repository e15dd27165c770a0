"""Find repeated modules: children of a ModuleList or a Sequential, so module paths that end in a number."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping

from torch.fx import Node

from autoplan.layers.facts import Facts, module_stack

_NUMBERED = re.compile(r"(?:.*\.)?\d+(?:@\d+)?")
_SEQUENTIAL = "torch.nn.modules.container.Sequential"
_COVERED = 0.7  # share of a module's nodes that must lie in its numbered children before these may be the blocks


def find_blocks(facts: Facts) -> dict[Node, str]:
    """The path of each node's block; nodes outside any are absent."""
    numbered = {node: _numbered(node) for node in facts.nodes}
    opened: set[str] = set()
    while True:
        chosen = {node: entry for node, entries in numbered.items() if (entry := _choose(entries, opened)) is not None}
        more = _to_open(facts, numbered, chosen)
        if not more:
            return _join_small_parts(facts, chosen)
        opened |= more


def is_leaf_class(node: Node, path: str) -> bool:
    """Whether the module at ``path`` around ``node`` is one of torch.nn's own, and holds no other."""
    return any(entry == path and _is_leaf(kind) for entry, kind in module_stack(node))


def _is_leaf(kind: str) -> bool:
    return kind.startswith("torch.nn.modules.") and not any(part in kind for part in (".container.", ".transformer."))


def _numbered(node: Node) -> tuple[tuple[str, str], ...]:
    return tuple(entry for entry in module_stack(node) if _NUMBERED.fullmatch(entry[0]))


def _choose(entries: tuple[tuple[str, str], ...], opened: set[str]) -> tuple[str, str] | None:
    """The outermost numbered module that is not opened; of opened ones alone, the innermost."""
    return next((entry for entry in entries if entry[0] not in opened), entries[-1] if entries else None)


def _to_open(
    facts: Facts,
    numbered: Mapping[Node, tuple[tuple[str, str], ...]],
    chosen: Mapping[Node, tuple[str, str]],
) -> set[str]:
    """Blocks whose numbered children make the better layers.

    A plain Sequential always; another module where chains of alike children cover it (a stage of a hierarchical
    network, the level of a U-Net), in all modules beside it. Experts are no chain; a T5 block's parts are not alike.
    """
    families: dict[tuple[str, str], dict[str, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for node, (path, kind) in chosen.items():
        if node in facts.travelling:
            families[_siblings(path), kind][path].append(node)
    found: set[str] = set()
    for (_, kind), instances in families.items():
        inner = {path: _children(path, nodes, numbered) for path, nodes in instances.items()}
        if kind == _SEQUENTIAL:
            found |= {path for path, children in inner.items() if len(set(children.values())) > 1}
        elif all(_is_stage(facts, instances[path], children) for path, children in inner.items()):
            found |= set(instances)
    return found


def _siblings(path: str) -> str:
    return path.rpartition(".")[0]


def _children(
    path: str, nodes: list[Node], numbered: Mapping[Node, tuple[tuple[str, str], ...]]
) -> dict[Node, tuple[str, str]]:
    """The next numbered module inside ``path`` around each node that has one."""
    children = {}
    for node in nodes:
        paths = [entry[0] for entry in numbered[node]]
        at = paths.index(path)
        if at + 1 < len(paths):
            children[node] = numbered[node][at + 1]
    return children


def _is_stage(facts: Facts, nodes: list[Node], children: Mapping[Node, tuple[str, str]]) -> bool:
    """Whether most of ``nodes`` is a chain of alike children, and the module's input does not go around it."""
    classes: dict[str, set[str]] = defaultdict(set)
    for path, kind in children.values():
        classes[_siblings(path)].add(kind)
    chain = {node: path for node, (path, _) in children.items() if len(classes[_siblings(path)]) == 1}
    order = list(dict.fromkeys(chain[node] for node in nodes if node in chain))
    if len(chain) < _COVERED * len(nodes):
        return False
    follows = _follows(facts, nodes, chain)
    return all(pair in follows for pair in itertools.pairwise(order)) and not _is_bypassed(facts, nodes, chain)


def _follows(facts: Facts, nodes: list[Node], chain: Mapping[Node, str]) -> set[tuple[str, str]]:
    """Pairs of children of which the second reads the first, directly or through nodes that are in no child."""
    reached_from: dict[Node, set[str]] = {}
    pairs: set[tuple[str, str]] = set()
    for node in nodes:
        origins: set[str] = set()
        for earlier in facts.before[node]:
            origins |= {chain[earlier]} if earlier in chain else reached_from.get(earlier, set())
        if node in chain:
            pairs |= {(origin, chain[node]) for origin in origins}
        else:
            reached_from[node] = origins
    return pairs


def _is_bypassed(facts: Facts, nodes: list[Node], chain: Mapping[Node, str]) -> bool:
    """Whether a node behind a child reads what the first child's side reads too: a shortcut around a block."""
    first = next((chain[node] for node in nodes if node in chain), "")
    behind: set[Node] = set()
    ahead: set[Node] = set()
    for node in nodes:
        read = {earlier for earlier in facts.before[node] if earlier in facts.travelling or earlier.op == "placeholder"}
        if node in chain or read & behind:
            behind.add(node)
            if chain.get(node, first) == first and node in chain:
                ahead |= read - behind
            elif node not in chain and read & ahead:
                return True
        else:
            ahead |= {node, *read}
    return False


def _join_small_parts(facts: Facts, chosen: Mapping[Node, tuple[str, str]]) -> dict[Node, str]:
    """Modules without a weight matrix join the torch.nn module before them; else what reads them."""
    with_matrix = {chosen[node][0] for node in chosen if facts.has_matrix(node)}
    joined: dict[str, str | None] = {}
    leader: dict[str, str] = {}
    for path, kind in dict.fromkeys(chosen[node] for node in facts.nodes if node in chosen):
        family = _siblings(path)
        if path not in with_matrix:
            joined[path] = leader.get(family)
            continue
        joined[path] = path
        leader.pop(family, None)
        if _is_leaf(kind):
            leader[family] = path
    return {node: target for node, (path, _) in chosen.items() if (target := joined[path]) is not None}
