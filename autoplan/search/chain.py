"""The model as a chain of priced layers, for one tensor degree and micro-batch size.

Everything that depends on neither the data degree, nor ZeRO, nor the pipeline: prefix sums and range maxima over
layers, tied parameters, what crosses each cut, and which policies save what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan.layers.types import LayerGraph, LayerKind
from autoplan.search.dag_transfers import Crossing, crossing, is_chain
from autoplan.search.pricing import Kept, KindCosts, Kinds, Seconds
from autoplan.search.savings import Savings

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Stages of up to this many kinds are grouped by how many layers of each they hold.
MOST_GROUPED_KINDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A tied parameter: the layers that hold it, ascending, and its elements on one tensor rank."""

    layers: tuple[int, ...]
    elements: int
    trainable: bool


@dataclass(frozen=True, kw_only=True)
class Chain:
    """``kinds[l]`` is the kind of layer l, ``priced`` all of them, for micro-batches of ``samples``; ``policies`` the
    recompute that may be chosen: the first is what a layer does where memory allows. ``cut_bytes``: what crosses each
    cut. ``crossing``: what each span receives and sends where some value goes further than to the next layer, else
    None."""

    layers: int
    kinds: Integers
    priced: Kinds
    samples: int
    policies: tuple[str, ...]
    cut_bytes: Floats
    tied: tuple[Tied, ...]
    crossing: Crossing | None = None

    @cached_property
    def kept(self) -> Kept:
        """Bytes, a kind each: known before anything is timed."""
        return self.priced.kept(self.samples)

    @cached_property
    def seconds(self) -> Seconds:
        """Seconds, a kind each."""
        return self.priced.seconds(self.samples)

    @cached_property
    def costs(self) -> tuple[KindCosts, ...]:
        """Both, one entry a kind."""
        seconds, kept = self.seconds, self.kept
        policies = tuple(seconds.extra_s)
        extra, saved, window = (
            np.stack([by_policy[p] for p in policies], axis=1).tolist()
            for by_policy in (seconds.extra_s, kept.saved_bytes, kept.window_bytes)
        )
        columns = (seconds.forward_s, seconds.backward_s, seconds.tensor_forward_s, seconds.tensor_backward_s)
        more = (kept.passing_bytes, kept.elements, kept.trainable)
        return tuple(
            KindCosts(
                forward_s=forward_s,
                backward_s=backward_s,
                tensor_forward_s=tensor_forward_s,
                tensor_backward_s=tensor_backward_s,
                extra_s=dict(zip(policies, extra[kind], strict=True)),
                saved_bytes=dict(zip(policies, saved[kind], strict=True)),
                window_bytes=dict(zip(policies, window[kind], strict=True)),
                passing_bytes=passing,
                elements=int(elements),
                trainable=int(trainable),
            )
            for kind, (forward_s, backward_s, tensor_forward_s, tensor_backward_s, passing, elements, trainable) in (
                enumerate(zip(*(values.tolist() for values in (*columns, *more)), strict=True))
            )
        )

    def per_layer(self, values: Floats) -> Floats:
        """A value a kind, spread over the layers."""
        return values[self.kinds]

    def prefix(self, values: Floats) -> Floats:
        """[L + 1] sums of a value a kind over the layers before each cut."""
        each = self.per_layer(values)
        return np.concatenate((np.zeros((1, *each.shape[1:])), np.cumsum(each, axis=0)))

    @cached_property
    def _periods_s(self) -> Floats:
        """Forward + backward seconds of a layer of each kind under the first policy."""
        return self.seconds.period_s + self.seconds.extra_s[self.policies[0]]

    @cached_property
    def period(self) -> Floats:
        """Prefix sums of forward + backward seconds under the first policy."""
        return self.prefix(self._periods_s)

    @cached_property
    def extra_sums(self) -> dict[str, Floats]:
        """Prefix sums of what each policy recomputes, in seconds."""
        return {policy: self.prefix(extra_s) for policy, extra_s in self.seconds.extra_s.items()}

    @cached_property
    def saved_sums(self) -> dict[str, Floats]:
        """Prefix sums of the bytes that each policy keeps."""
        return {policy: self.prefix(saved) for policy, saved in self.kept.saved_bytes.items()}

    @cached_property
    def forward(self) -> Floats:
        """Prefix sums of forward seconds, collectives of the tensor axis included."""
        return self.prefix(self.seconds.forward_s + self.seconds.tensor_forward_s)

    @cached_property
    def backward(self) -> Floats:
        """Prefix sums of backward seconds of operators, which the data axis may hide behind."""
        return self.prefix(self.seconds.backward_s)

    @cached_property
    def lesser_share(self) -> float:
        """No run of layers has a forward and a backward that both take more than this share of its period."""
        seconds = self.seconds
        ahead, timed = seconds.forward_s + seconds.tensor_forward_s, seconds.period_s > 0
        if not timed.any():
            return 0.5
        shares = np.concatenate([ahead[timed] / (seconds.period_s + seconds.extra_s[p])[timed] for p in self.policies])
        return min(0.5, float(shares.max()), 1 - float(shares.min()))

    @cached_property
    def saved(self) -> Floats:
        """Prefix sums of bytes a micro-batch under the first policy."""
        return self.prefix(self.kept.saved_bytes[self.policies[0]])

    @cached_property
    def _least_saved(self) -> Floats:
        """[K] bytes a micro-batch of a layer that saves the most memory it can."""
        least: Floats = np.minimum.reduce([self.kept.saved_bytes[p] for p in self.policies])
        return least

    @cached_property
    def least_saved(self) -> Floats:
        """Prefix sums of bytes a micro-batch where every layer saves the most memory it can."""
        return self.prefix(self._least_saved)

    @cached_property
    def whole(self) -> dict[str, tuple[float, float]]:
        """For each policy what all layers recompute under it, in seconds, and save, in bytes a micro-batch."""
        counted = np.bincount(self.kinds, minlength=len(self.priced.kinds)).astype(float)
        return {
            p: (float(counted @ self.seconds.extra_s[p]), float(counted @ self.kept.saved_bytes[p]))
            for p in self.policies
        }

    @cached_property
    def elements(self) -> Floats:
        return self.prefix(self.kept.elements)

    @cached_property
    def trainable(self) -> Floats:
        return self.prefix(self.kept.trainable)

    @cached_property
    def passing(self) -> Floats:
        """[L + 1, L + 1] widest operator of layers i to j - 1."""
        return self.range_max(self.per_layer(self.kept.passing_bytes))

    @cached_property
    def largest(self) -> Floats:
        """[L + 1, L + 1] elements of the largest layer of i to j - 1."""
        return self.range_max(self.per_layer(self.kept.elements))

    @cached_property
    def first_window(self) -> Floats:
        """[L + 1, L + 1] window of the first policy (0 unless recompute is forced)."""
        return self.range_max(self.per_layer(self.kept.window_bytes[self.policies[0]]))

    @cached_property
    def least_window(self) -> Floats:
        """[L + 1, L + 1] window where every layer saves the most memory it can."""
        return self.range_max(self.per_layer(np.maximum(0.0, self.kept.whole_bytes - self._least_saved)))

    def held(self, first: Integers, end: Integers) -> Floats:
        """Bytes a micro-batch that spans keep of what they receive, beyond what their layers count."""
        return np.zeros(len(first)) if self.crossing is None else self.crossing.held[first, end]

    @cached_property
    def least_crossing(self) -> float:
        """No stage but the first receives less a micro-batch, and none but the last sends less."""
        if self.crossing is None:
            return float(self.cut_bytes[1:-1].min(initial=math.inf))
        # Receiving grows with the span's end, sending as its start moves ahead: one layer has the least.
        least = np.concatenate((self.crossing.received.diagonal(1)[1:], self.crossing.sent.diagonal(1)[:-1]))
        return float(least.min(initial=math.inf))

    @cached_property
    def least_kept(self) -> Floats:
        """[K] bytes a micro-batch that one layer of each kind in use needs at least while its backward runs."""
        return (self._least_saved + self.kept.passing_bytes)[np.unique(self.kinds)]

    @cached_property
    def elements_of_kinds(self) -> tuple[Floats, Floats]:
        """[K] parameter elements of one layer of each kind in use, and those that train."""
        used = np.unique(self.kinds)
        return self.kept.elements[used], self.kept.trainable[used]

    def thriftiest(self, costs: KindCosts) -> str:
        """The policy that keeps least; of equals the one that costs least."""
        return min(self.policies, key=lambda p: (costs.saved_bytes[p], costs.extra_s[p]))

    def own_parameters(self, first: Integers, end: Integers) -> tuple[Floats, Floats]:
        """[R] elements of the parameters of layers i to j - 1, and of those that train, a tied one counted once.
        ``first`` and ``end`` are [R], or [v, R] where v spans are on one GPU."""
        first, end = np.atleast_2d(first, end)
        elements, trainable = ((sums[end] - sums[first]).sum(axis=0) for sums in (self.elements, self.trainable))
        for group in self.tied:
            again = group.elements * np.maximum(0, self.holders(group, first, end).sum(axis=0) - 1)
            elements -= again
            if group.trainable:
                trainable -= again
        return elements, trainable

    def shares_tied(self, first: Integers, end: Integers) -> list[tuple[Tied, NDArray[np.bool_]]]:
        """For each trained tied group, which spans hold some of it while another stage holds the rest."""
        answer = []
        for group in self.tied:
            if group.trainable:
                held = self.holders(group, first, end)
                answer.append((group, (held > 0) & (held < len(group.layers))))
        return answer

    def holders(self, group: Tied, first: Integers, end: Integers) -> Integers:
        """How many layers of each span hold a tied parameter."""
        held: Integers = np.sum([self.holds(layer, first, end) for layer in group.layers], axis=0)
        return held

    def holds(self, layer: int, first: Integers, end: Integers) -> NDArray[np.bool_]:
        """Which spans hold ``layer``."""
        return (first <= layer) & (layer < end)

    def range_max(self, values: Floats) -> Floats:
        """[L + 1, L + 1] largest of a value a layer in each span; 0 where there is none."""
        return _range_max(values)

    @cached_property
    def sizes(self) -> Integers:
        """[L + 1] layers before each cut."""
        return np.arange(self.layers + 1)

    @cached_property
    def longest_s(self) -> float:
        """Forward + backward seconds of the longest layer under the first policy."""
        return float(self.per_layer(self._periods_s).max())

    @cached_property
    def savings(self) -> Savings:
        """What recompute saves and costs."""
        return Savings(self)

    @property
    def grouped(self) -> bool:
        """Whether spans that hold as many layers of each kind are taken as one: there are few kinds."""
        return len(self.priced.kinds) <= MOST_GROUPED_KINDS

    @cached_property
    def counts(self) -> Integers:
        """[L + 1, K] layers of each kind before each cut."""
        one_hot = np.zeros((self.layers + 1, len(self.priced.kinds)), dtype=np.int64)
        one_hot[np.arange(self.layers) + 1, self.kinds] = 1
        return np.cumsum(one_hot, axis=0)

    def spans_within(self, period_limit_s: float) -> tuple[Integers, Integers]:
        """(first, end) of the spans whose period under the first policy is at most that, by end and then first."""
        reach = np.arange(self.layers + 1)
        from_first = np.searchsorted(self.period, self.period - period_limit_s)
        lengths = np.maximum(reach - from_first, 0)
        end = np.repeat(reach, lengths)
        within = np.arange(len(end)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(from_first, lengths) + within, end

    def alike(self, first: Integers, end: Integers) -> tuple[Integers, Integers]:
        """Spans that hold the same layers of each kind and the same tied parameters cost the same: positions of one of
        each, and for every span which of those it is like."""
        everyone = np.arange(len(first))
        if not self.grouped:
            return everyone, everyone
        columns = [self.counts[end] - self.counts[first]]
        if self.crossing is not None:
            columns.append(np.unique(self.crossing.held[first, end], return_inverse=True)[1].reshape(-1, 1))
        for group in self.tied:
            columns.append(self.holders(group, first, end)[:, None])
        return _distinct_rows(np.concatenate(columns, axis=1))

    def held_kinds(self, first: int, end: int) -> tuple[int, ...]:
        """How many layers of each kind a span holds."""
        return tuple((self.counts[end] - self.counts[first]).tolist())

    @cached_property
    def distinct_cuts(self) -> tuple[list[float], Integers]:
        """Different sizes of what crosses a cut, and for each cut which it is."""
        distinct, back = np.unique(self.cut_bytes, return_inverse=True)
        return [float(b) for b in distinct], back.reshape(-1)


@dataclass(frozen=True)
class Flow:
    """What layers hand each other, whatever the micro-batch."""

    graph: LayerGraph

    @cached_property
    def kinds(self) -> Integers:
        """[L] each layer's kind."""
        return np.array([layer.kind for layer in self.graph.layers], dtype=np.int64)

    @cached_property
    def is_chain(self) -> bool:
        """Whether every layer hands values to the next alone."""
        return is_chain(self.graph)

    @cached_property
    def _changes(self) -> tuple[Floats, Floats]:
        """[L + 1] by how many bytes what crosses grows from each cut to the next: whatever the batch, and a sample."""
        fixed, each = np.zeros(len(self.graph.layers) + 1), np.zeros(len(self.graph.layers) + 1)
        for edge in self.graph.edges:
            change = each if edge.batched else fixed
            change[edge.source + 1] += edge.bytes_per_sample
            change[edge.targets[-1] + 1] -= edge.bytes_per_sample
        return fixed, each

    def cut_bytes(self, samples: int) -> Floats:
        """[L + 1] bytes of a micro-batch of ``samples`` across each cut, 0 at both ends."""
        fixed, each = self._changes
        # Sums of bytes are exact in float64, so that what is added and taken away leaves nothing behind.
        inner = np.cumsum(fixed + each * samples)[1 : len(self.graph.layers)]
        return np.concatenate(([0.0], inner, [0.0]))


def build_chain(flow: Flow, priced: Kinds, *, policies: tuple[str, ...], samples: int) -> Chain:
    """The chain of a graph, whose kinds are ``priced`` at ``samples`` a micro-batch."""
    graph = flow.graph
    return Chain(
        layers=len(graph.layers),
        kinds=flow.kinds,
        priced=priced,
        samples=samples,
        policies=policies,
        cut_bytes=flow.cut_bytes(samples),
        tied=_tied(graph, priced.kinds),
        crossing=None if flow.is_chain else crossing(graph, samples=samples),
    )


def _tied(graph: LayerGraph, kinds: tuple[LayerKind, ...]) -> tuple[Tied, ...]:
    holders: dict[str, list[int]] = {}
    facts: dict[str, tuple[int, bool]] = {}
    for index, layer in enumerate(graph.layers):
        for parameter in kinds[layer.kind].parameters:
            if parameter.shared and (not holders.get(parameter.shared) or holders[parameter.shared][-1] != index):
                holders.setdefault(parameter.shared, []).append(index)
                facts[parameter.shared] = (parameter.elements, parameter.trainable)
    return tuple(
        Tied(layers=tuple(at), elements=facts[name][0], trainable=facts[name][1])
        for name, at in sorted(holders.items())
        if len(at) > 1
    )


def _distinct_rows(columns: Integers) -> tuple[Integers, Integers]:
    """Positions of one of each distinct row of counts, and for every row which of those it is like."""
    radix = [1]
    for most in columns.max(axis=0, initial=0):
        radix.append(radix[-1] * (int(most) + 1))
    keys = columns @ np.array(radix[:-1], dtype=np.int64) if radix[-1] < 2**62 else columns
    _, positions, member = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    return positions, member.reshape(-1)


def _range_max(values: Floats) -> Floats:
    size = len(values)
    answer = np.zeros((size + 1, size + 1))
    if not np.any(values):
        return answer
    for first in range(size):
        answer[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return answer
