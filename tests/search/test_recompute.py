"""The least recompute that saves enough: the frontier against all choices."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.recompute import Choice, Prices, frontier, pieces_of, prices_of
from autoplan.search.savings import Needs
from autoplan.search.space import open_space
from tests.support.layer_graphs import Dense, cluster, problem

choices = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 20)).map(lambda p: (float(p[0]), float(p[1]))), min_size=0, max_size=2
).map(lambda pairs: tuple(Choice(f"policy {i}", saved, extra) for i, (saved, extra) in enumerate(pairs)))


def brute_force(layers: list[tuple[Choice, ...]], deficit: float) -> float:
    options = [((0.0, 0.0), *((c.saved_bytes, c.extra_s) for c in own)) for own in layers]
    totals = [(sum(s for s, _ in pick), sum(e for _, e in pick)) for pick in itertools.product(*options)]
    return min((extra for saved, extra in totals if saved >= deficit), default=math.inf)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(choices, st.integers(0, 3)), min_size=1, max_size=3),
    st.floats(-5, 100),
)
def test_frontier_is_the_least_over_all_choices(kinds: list[tuple[tuple[Choice, ...], int]], deficit: float) -> None:
    counts = tuple((kind, number) for kind, (_, number) in enumerate(kinds))
    found = frontier(counts, {kind: own for kind, (own, _) in enumerate(kinds)})
    layers = [own for own, number in kinds for _ in range(number)]
    assert found.least_extra_s(deficit) == brute_force(layers, deficit)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(choices, st.integers(0, 3)), min_size=1, max_size=3), st.floats(-5, 60))
def test_counts_are_the_choice_behind_the_least(kinds: list[tuple[tuple[Choice, ...], int]], deficit: float) -> None:
    counts = tuple((kind, number) for kind, (_, number) in enumerate(kinds))
    by_kind = {kind: own for kind, (own, _) in enumerate(kinds)}
    found = frontier(counts, by_kind)
    if found.least_extra_s(deficit) == math.inf:
        return
    saved = extra = 0.0
    for kind, policies in found.counts(deficit).items():
        assert sum(policies.values()) <= dict(counts)[kind]
        for choice in by_kind[kind]:
            saved += policies.get(choice.policy, 0) * choice.saved_bytes
            extra += policies.get(choice.policy, 0) * choice.extra_s
    assert saved >= deficit
    assert extra == found.least_extra_s(deficit)


@settings(max_examples=200, deadline=None)
@given(st.lists(choices, min_size=1, max_size=6), st.floats(-5, 100))
def test_the_cheapest_bytes_first_are_one_choice_above_the_least(
    layers: list[tuple[Choice, ...]], deficit: float
) -> None:
    by_kind = dict(enumerate(layers))
    pieces, least_s = pieces_of(range(len(layers)), by_kind), brute_force(layers, deficit)
    extra_s = float(pieces.least_extra_s(np.array([0]), np.array([len(layers)]), np.array([deficit]))[0])
    dearest_s = max((choice.extra_s for own in layers for choice in own), default=0.0)
    assert extra_s == least_s == math.inf or least_s - 1e-9 <= extra_s <= least_s + dearest_s + 1e-9
    if extra_s < math.inf:
        picked = [
            choice
            for layer, policy in pieces.policy_of(0, len(layers), deficit).items()
            for choice in by_kind[layer]
            if choice.policy == policy
        ]
        assert sum(choice.saved_bytes for choice in picked) >= deficit - 1e-9
        assert abs(sum(choice.extra_s for choice in picked) - extra_s) <= 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(choices, min_size=1, max_size=6), st.lists(st.floats(-5, 100), min_size=1, max_size=4))
def test_recompute_in_part_is_never_above_the_least(layers: list[tuple[Choice, ...]], deficits: list[float]) -> None:
    prices, gains, most = prices_of(dict(enumerate(layers)))
    sums = Prices(prices, np.vstack([0 * gains[:1], gains.cumsum(axis=0)]), np.concatenate(([0.0], most.cumsum())))
    ends = np.full(len(deficits), len(layers))
    for bound_s, deficit in zip(sums.least_extra_s(0 * ends, ends, np.array(deficits)), deficits, strict=True):
        least_s = brute_force(layers, deficit)
        assert bound_s <= least_s
        assert bound_s == least_s or deficit > 0


def test_of_unlike_layers_nearly_the_least_recompute_is_found() -> None:
    """Runs of 12 layers that differ by 10%: within 2% of the least, and at once for many runs."""
    random = np.random.default_rng(5)
    save, cost = random.uniform(0.9, 1.1, (2, 40))
    by_kind = {
        layer: (Choice("selective", 0.3 * save[layer], 0.02 * cost[layer]), Choice("full", save[layer], cost[layer]))
        for layer in range(40)
    }
    pieces = pieces_of(range(40), by_kind)
    first = random.integers(0, 28, 60)
    deficit = random.uniform(0, 11, 60)
    found = pieces.least_extra_s(first, first + 12, deficit)
    for start, short, extra_s in zip(first.tolist(), deficit.tolist(), found.tolist(), strict=True):
        exact = frontier(tuple((layer, 1) for layer in range(start, start + 12)), by_kind).least_extra_s(short)
        assert extra_s <= exact * 1.02 + 1e-12
        assert extra_s == pieces.least_extra_s(np.array([start]), np.array([start + 12]), np.array([short]))[0]


def test_spans_of_many_unlike_layers() -> None:
    """600 layers of 20 kinds: too many kinds to group."""
    layers = [Dense(saved=float((8 + i % 20) * 2**20), input=2.0**20) for i in range(600)]
    chain = open_space(problem(layers, cluster(1), global_batch=1)).chain(1, 1)
    most = float(chain.saved[-1] - chain.least_saved[-1])
    for short, enough in ((0.0, True), (most * 0.999, True), (most * 1.001, False)):
        room = float(chain.saved[-1]) + chain.savings.windows[-1] - short
        whole = Needs(np.array([0]), np.array([600]), np.array([1]), chain.saved[-1:], np.array([room]))
        assert math.isfinite(chain.savings.least_extra_s(whole)[0]) == enough
        if enough:
            policies = chain.savings.policies(whole)
            kept = sum(chain.costs[k].saved_bytes[p] for k, p in zip(chain.kinds, policies, strict=True))
            assert kept <= chain.saved[-1] - short
