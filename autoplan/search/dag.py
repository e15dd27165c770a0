"""Stages of a model whose layers are no chain: every convex cut, not only those of one order of the layers.

What is done before some point of the pipeline is a *down-set*: a set of layers that holds all its layers' inputs. A
stage is the difference of two down-sets, one inside the other, so that a split into S stages is a path of S arcs from
the empty set to the whole model; in a chain the down-sets are the prefixes. A :class:`DownSetChain` is the chain of
:mod:`autoplan.search.chain` with a cut for each down-set: tables, bounds, dynamic program and MILP work on it as they
are. Two towers of 24 and 12 layers have 325, a U-Net or an encoder-decoder little more than a chain.

A path is written in a plan as an order of the layers in which its stages are intervals.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan.layers.types import Edge, LayerGraph
from autoplan.search.chain import Chain, Floats, Integers
from autoplan.search.dag_transfers import Crossing

Members = NDArray[np.bool_]

# Down-sets that are tried beside the prefixes: tables are this number squared. Where a model has more, layers that
# follow each other directly are taken together, two, four, eight of them, until it has fewer.
MOST_DOWN_SETS = 512


@dataclass(frozen=True, kw_only=True)
class DownSets:
    """``members``: [D, L], whether layer l is in down-set d; by size, so the first is empty and the last the whole.
    Of one size the prefix of the given order comes first. ``first``: layers that may be the first; ``every``: no
    down-set is left out."""

    members: Members
    edges: tuple[Edge, ...]
    first: tuple[int, ...]
    every: bool

    @cached_property
    def inside(self) -> Members:
        """[D, D] whether one lies in the other and is smaller."""
        missing = self.members.astype(np.int64) @ (~self.members).T.astype(np.int64)
        return (missing == 0) & ~np.eye(len(self.members), dtype=bool)

    def crossing(self, samples: int) -> Crossing:
        """What a stage between two down-sets receives, sends and holds, in bytes a micro-batch."""
        whole, fixed = self._amounts
        received, sent, handed = (samples * a + b for a, b in zip(whole, fixed, strict=True))
        return Crossing(received=received, sent=sent, held=np.maximum(0.0, received - handed))

    @cached_property
    def _amounts(self) -> tuple[tuple[Floats, ...], tuple[Floats, ...]]:
        """Received, sent and handed over: bytes that grow with the micro-batch, and bytes that don't."""
        size = len(self.members)
        found = [tuple(np.zeros((size, size)) for _ in range(3)) for _ in range(2)]
        for edge in self.edges:
            received, sent, handed = found[0 if edge.batched else 1]
            before, after = self.members[:, None, :], self.members[None, :, :]
            readers = list(edge.targets)
            made_before, made_here = before[..., edge.source], after[..., edge.source] & ~before[..., edge.source]
            read_here = (after[..., readers] & ~before[..., readers]).any(axis=-1)
            read_later = (~after[..., readers]).any(axis=-1)
            read_so_far = after[..., readers].any(axis=-1)
            received += edge.bytes_per_sample * (made_before & read_here)
            sent += edge.bytes_per_sample * (made_here & read_later)
            handed += edge.bytes_per_sample * (made_here & ~read_so_far)
        return found[0], found[1]

    def order(self, path: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The layers in an order in which the stages of ``path`` (down-sets, the empty one first) are intervals, each
        stage's in the given order; and the cuts."""
        layers: list[int] = []
        cuts = [0]
        for before, after in itertools.pairwise(path):
            layers += [int(layer) for layer in np.nonzero(self.members[after] & ~self.members[before])[0]]
            cuts.append(len(layers))
        return tuple(layers), tuple(cuts)


def is_branching(graph: LayerGraph) -> bool:
    """Whether the layers could stand in another order: some layer does not read the one before it."""
    inputs = _inputs(graph)
    return any(not inputs[layer] >> (layer - 1) & 1 for layer in range(1, len(inputs)))


def down_sets(graph: LayerGraph, *, most: int = MOST_DOWN_SETS) -> DownSets | None:
    """Every down-set of the layers, or of runs of them where there are more than ``most``; None where each is a prefix,
    or where even runs give too many."""
    if not is_branching(graph):
        return None
    inputs = _inputs(graph)
    groups = [1 << layer for layer in range(len(inputs))]
    found = _enumerated(groups, inputs, most)
    while found is None:
        paired = _paired(groups, inputs)
        if len(paired) == len(groups):
            return None
        groups = paired
        found = _enumerated(groups, inputs, most)
    members = np.array([[bool(mask >> layer & 1) for layer in range(len(inputs))] for mask in found])
    return DownSets(
        members=members,
        edges=graph.edges,
        first=tuple(layer for layer, needed in enumerate(inputs) if not needed),
        every=len(groups) == len(inputs),
    )


def _enumerated(groups: Sequence[int], inputs: Sequence[int], most: int) -> list[int] | None:
    """The down-sets of groups of layers (sets as bits), by size; None where there are more than ``most``."""
    needed = [_joined(group, inputs) & ~group for group in groups]
    level, found = {0}, [0]
    while level:
        level = {
            done | group
            for done in level
            for group, before in zip(groups, needed, strict=True)
            if not done & group and before & ~done == 0
        }
        if len(found) + len(level) > most:
            return None
        found += level
    return sorted(found, key=lambda mask: (mask.bit_count(), _layers_of(mask)))


def _joined(group: int, inputs: Sequence[int]) -> int:
    """What the layers of a group come after."""
    joined = 0
    for layer in _layers_of(group):
        joined |= inputs[layer]
    return joined


def _paired(groups: Sequence[int], inputs: Sequence[int]) -> list[int]:
    """The groups, two and two of them as one where one comes right after the other: all that the second comes after is
    the first and what that comes after, and all that comes after the first is the second and what comes after that."""
    before: list[int] = []  # in the given order, which is a topological one: groups are runs of what follows directly
    for group in groups:
        own = _joined(group, inputs) & ~group
        before.append(own | _union(b | g for g, b in zip(groups, before, strict=False) if g & own))
    after = [_union(g for g, b in zip(groups, before, strict=True) if b & group) for group in groups]
    paired: list[int] = []
    taken: set[int] = set()
    for first, group in enumerate(groups):
        if first in taken:
            continue
        for second in range(first + 1, len(groups)):
            follows = before[second] == before[first] | group and after[first] == after[second] | groups[second]
            if second not in taken and follows:
                taken.add(second)
                group |= groups[second]
                break
        paired.append(group)
    return paired


def _union(masks: Iterable[int]) -> int:
    joined = 0
    for mask in masks:
        joined |= mask
    return joined


def _layers_of(mask: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(mask.bit_length()) if mask >> layer & 1)


def _inputs(graph: LayerGraph) -> list[int]:
    """For each layer the set of layers that it comes after, as bits: those that it reads, and those that it shares
    written memory with. The last layer, which makes the loss, comes after all that nobody reads."""
    inputs, read = [0] * len(graph.layers), 0
    for edge in graph.edges:
        read |= 1 << edge.source
        for target in edge.targets:
            inputs[target] |= 1 << edge.source
    for one, other in graph.keep_order:
        inputs[other] |= 1 << one
    inputs[-1] |= ~read & ((1 << len(inputs) - 1) - 1)
    return inputs


@dataclass(frozen=True, kw_only=True)
class DownSetChain(Chain):
    """A chain with a cut for every down-set: ``layers`` is the index of the last of them, spans are pairs of them.
    ``least_in_order``: the least crossing of the given order's own cuts."""

    sets: DownSets
    least_in_order: float

    def prefix(self, values: Floats) -> Floats:
        sums: Floats = self.sets.members @ self.per_layer(values)
        return sums

    @cached_property
    def sizes(self) -> Integers:
        sizes: Integers = self.sets.members.sum(axis=1)
        return sizes

    def spans_within(self, period_limit_s: float) -> tuple[Integers, Integers]:
        period = self.period
        end, first = np.nonzero((self.sets.inside & (period[None, :] - period[:, None] <= period_limit_s)).T)
        return first, end

    @cached_property
    def counts(self) -> Integers:
        one_hot = np.zeros((len(self.kinds), len(self.priced.kinds)), dtype=np.int64)
        one_hot[np.arange(len(self.kinds)), self.kinds] = 1
        counts: Integers = self.sets.members.astype(np.int64) @ one_hot
        return counts

    def holds(self, layer: int, first: Integers, end: Integers) -> Members:
        inside = self.sets.members[:, layer]
        return inside[end] & ~inside[first]

    def range_max(self, values: Floats) -> Floats:
        answer = np.zeros((self.layers + 1, self.layers + 1))
        for layer in np.argsort(values, kind="stable"):
            inside = self.sets.members[:, layer]
            answer[~inside[:, None] & inside[None, :]] = values[layer]
        return answer

    @property
    def grouped(self) -> bool:
        return True

    @cached_property
    def least_crossing(self) -> float:
        assert self.crossing is not None
        inner = self.sets.inside.copy()
        inner[0] = False
        outer = self.sets.inside.copy()
        outer[:, -1] = False
        least = np.concatenate((self.crossing.received[inner], self.crossing.sent[outer]))
        return float(least.min(initial=self.least_in_order))


def down_set_chain(chain: Chain, sets: DownSets, *, samples: int) -> DownSetChain:
    """The layers of ``chain`` with a cut for every down-set."""
    return DownSetChain(
        layers=len(sets.members) - 1,
        kinds=chain.kinds,
        priced=chain.priced,
        samples=samples,
        policies=chain.policies,
        cut_bytes=np.zeros(len(sets.members)),
        tied=chain.tied,
        crossing=sets.crossing(samples),
        sets=sets,
        least_in_order=chain.least_crossing,
    )
