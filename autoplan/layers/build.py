"""Capture -> LayerGraph.

Group the nodes, name each layer's kind by its canonical form, measure one layer of each kind, then settle what only
the whole graph knows: values that a layer keeps but another made, parameters that several layers use, and the edges.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autoplan.capture.shapes import batch_symbol, bytes_at
from autoplan.capture.types import Capture
from autoplan.layers.checkpointing import is_checkpointed
from autoplan.layers.experts import is_expert
from autoplan.layers.facts import Facts, gather_facts, tensors
from autoplan.layers.group import Group, group_nodes
from autoplan.layers.kinds import Canon, Form, canonical_name
from autoplan.layers.operators import dtype_name
from autoplan.layers.profile import Measured, measure_kind, with_saved
from autoplan.layers.types import Edge, Layer, LayerGraph, LayerKind, Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folded:
    """Layers folded into kinds: ``kind_of[layer]``, and the first layer of each kind."""

    groups: tuple[Group, ...]
    forms: tuple[Form, ...]
    kind_of: tuple[int, ...]
    first: tuple[int, ...]


def build_layers(capture: Capture) -> LayerGraph:
    """The layer graph of a captured model: quantities of one sample, layers in topological order."""
    facts = gather_facts(capture)
    groups = group_nodes(facts)
    shared = _shared_parameters(facts, groups)
    canon = Canon(facts, batch_symbol(capture.graph_module), shared)
    asked = tuple(is_checkpointed([node for node in group.nodes if node in facts.travelling]) for group in groups)
    folded = _fold(groups, tuple(canon.form(group.nodes) for group in groups), asked)
    batched = None if capture.dynamic_batch else _batched_nodes(capture, facts)
    scale = _PerSample(batched=batched, batch=capture.batch_size)
    measured = tuple(
        measure_kind(facts, groups[i].nodes, folded.forms[i].boundary, batched=batched, batch=capture.batch_size)
        for i in folded.first
    )
    extra = _kept_by_others(folded, measured)
    digests = [canon.layer_digest(groups[i].nodes) for i in folded.first]
    kinds = tuple(
        LayerKind(
            operators=with_saved(measured[kind].operators, extra[kind]),
            parameters=tuple(_parameter(facts, groups[i], source, shared) for source in folded.forms[i].parameters),
            input_bytes=scale.input_bytes(facts, folded.forms[i]),
            checkpointed=asked[i],
        )
        for kind, i in enumerate(folded.first)
    )
    layers = tuple(
        Layer(
            name=group.name,
            kind=kind,
            nodes=tuple(node.name for node in group.nodes),
            parameters=tuple(canonical_name(facts, source) for source in form.parameters),
        )
        for group, form, kind in zip(groups, folded.forms, folded.kind_of, strict=True)
    )
    return LayerGraph(
        name=capture.name,
        layers=layers,
        kinds=kinds,
        edges=_edges(facts, folded, scale),
        tokens_per_sample=capture.tokens_per_sample,
        dtype=dtype_name(capture.dtype),
        fingerprint=canon.fingerprint(),
        keep_order=_keep_order(facts, groups),
        layer_digests=tuple(digests[kind] for kind in folded.kind_of),
    )


def _fold(groups: tuple[Group, ...], forms: tuple[Form, ...], asked: tuple[bool, ...]) -> _Folded:
    """``asked``: whether the model itself recomputes a layer."""
    kinds: dict[tuple[str, bool], int] = {}
    first: list[int] = []
    keys = [(form.digest, own) for form, own in zip(forms, asked, strict=True)]
    for index, key in enumerate(keys):
        if key not in kinds:
            kinds[key] = len(first)
            first.append(index)
    return _Folded(groups=groups, forms=forms, kind_of=tuple(kinds[key] for key in keys), first=tuple(first))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PerSample:
    """Bytes of values for one sample; ``batched`` and ``batch`` as in :func:`measure_kind`."""

    batched: frozenset[Node] | None
    batch: int

    def bytes_of(self, node: Node) -> float:
        size = sum(bytes_at(value, 1) for value in tensors(node.meta.get("val")))
        return size / self.batch if self.batched is not None and node in self.batched else float(size)

    def is_batched(self, node: Node) -> bool:
        if self.batched is not None:
            return node in self.batched
        return any(isinstance(size, torch.SymInt) for value in tensors(node.meta.get("val")) for size in value.shape)

    def input_bytes(self, facts: Facts, form: Form) -> float:
        return sum(self.bytes_of(node) for node in form.boundary if node in facts.differentiable)


def _batched_nodes(capture: Capture, facts: Facts) -> frozenset[Node]:
    """Of a static trace: what depends on the batch's tensors."""
    batched_names = {spec.placeholder for spec in capture.inputs if spec.batched}
    found = {
        node for node in capture.graph_module.graph.nodes if node.op == "placeholder" and node.name in batched_names
    }
    for node in facts.nodes:
        if any(earlier in found for earlier in facts.before[node]):
            found.add(node)
    return frozenset(found)


def _shared_parameters(facts: Facts, groups: Sequence[Group]) -> dict[str, str]:
    """Canonical names of parameters that are tied, or that several layers use."""
    users: dict[str, set[int]] = defaultdict(set)
    for index, group in enumerate(groups):
        for node in group.nodes:
            for source, _ in facts.parameters_of(node):
                users[canonical_name(facts, source)].add(index)
    tied = set(facts.canonical.values())
    return {name: name for name, layers in users.items() if name in tied or len(layers) > 1}


def _parameter(facts: Facts, group: Group, source: Node, shared: Mapping[str, str]) -> Parameter:
    parameter, name = facts.parameters[source], str(source.target)
    prefix = f"{group.name.partition('@')[0]}."
    return Parameter(
        role=name.removeprefix(prefix),
        elements=parameter.numel(),
        element_bytes=parameter.element_size(),
        trainable=parameter.requires_grad,
        shared=shared.get(canonical_name(facts, source), ""),
        expert=is_expert(source),
    )


def _kept_by_others(folded: _Folded, measured: Sequence[Measured]) -> list[dict[int, float]]:
    """For each kind, bytes by operator index that other layers keep for their backward.

    A kind counts what any of its layers must keep. Readers come after makers, so one walk from the last layer suffices.
    """
    place = {
        node: (layer, index) for layer, group in enumerate(folded.groups) for index, node in enumerate(group.nodes)
    }
    kept: list[set[int]] = [set() for _ in folded.groups]
    wanted: list[set[int]] = [set(measured[kind].saved_inputs) for kind in folded.kind_of]
    for layer in reversed(range(len(folded.groups))):
        for position in wanted[layer]:
            maker = place.get(folded.forms[layer].boundary[position])
            if maker is not None:
                _keep(maker, folded, measured, kept, wanted)
    extra: list[dict[int, float]] = [defaultdict(float) for _ in measured]
    for kind, info in enumerate(measured):
        nodes = {node for layer, at in enumerate(folded.kind_of) if at == kind for node in kept[layer]}
        owners: dict[int, float] = {}
        for node in sorted(nodes):
            owner = info.owner[node]
            if owner is not None and owner >= 0:
                owners[owner] = max(owners.get(owner, 0.0), info.pending_bytes[node])
        extra[kind].update(owners)
    return extra


def _keep(
    maker: tuple[int, int],
    folded: _Folded,
    measured: Sequence[Measured],
    kept: list[set[int]],
    wanted: list[set[int]],
) -> None:
    """Mark the value; where it is a view of what its own layer was given, mark that instead (an earlier layer's)."""
    layer, index = maker
    owner = measured[folded.kind_of[layer]].owner[index]
    if owner is not None and owner < 0:
        wanted[layer].add(-1 - owner)
    else:
        kept[layer].add(index)


def _keep_order(facts: Facts, groups: Sequence[Group]) -> tuple[tuple[int, int], ...]:
    """Pairs of layers that touch one memory, at least one of them writing. What is recomputed where it is used (the
    prologue) is written in every copy alike, so only what travels counts."""
    layer_of = {node: index for index, group in enumerate(groups) for node in group.nodes}
    touches: dict[Node, list[tuple[int, bool]]] = defaultdict(list)
    for node in facts.nodes:
        if node in facts.travelling:
            for memory in {facts.root.get(value, value) for value in (*node.all_input_nodes, node)}:
                touches[memory].append((layer_of[node], memory in facts.writes.get(node, ())))
    pairs = {
        (one, other)
        for touched in touches.values()
        if any(writes for _, writes in touched)
        for (one, first), (other, second) in itertools.combinations(touched, 2)
        if one != other and (first or second)
    }
    if any(one > other for one, other in pairs):  # already turned around: then nothing else may be
        return tuple(itertools.pairwise(range(len(groups))))
    return tuple(sorted(pairs))


def _edges(facts: Facts, folded: _Folded, scale: _PerSample) -> tuple[Edge, ...]:
    """Every value that leaves its layer, in the order of layers and nodes; the prologue's are recomputed, so never."""
    layer_of = {node: index for index, group in enumerate(folded.groups) for node in group.nodes}
    edges = []
    for index, (group, form) in enumerate(zip(folded.groups, folded.forms, strict=True)):
        outputs = set(form.outputs)
        for node in group.nodes:
            targets = {layer_of[reader] for reader in node.users if reader in layer_of} - {index}
            if node in outputs and targets:
                edges.append(
                    Edge(
                        value=node.name,
                        source=index,
                        targets=tuple(sorted(targets)),
                        bytes_per_sample=scale.bytes_of(node),
                        differentiable=node in facts.differentiable,
                        batched=scale.is_batched(node),
                    )
                )
    return tuple(edges)
