"""The least recompute that saves enough: the frontier against all choices."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.chain import Chain
from autoplan.search.recompute import Choice, Frontier, frontier, pieces_of
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
    found, least_s = pieces_of(range(len(layers)), by_kind).span(0, len(layers)), brute_force(layers, deficit)
    extra_s = found.least_extra_s(deficit)
    dearest_s = max((choice.extra_s for own in layers for choice in own), default=0.0)
    assert extra_s == least_s == math.inf or least_s - 1e-9 <= extra_s <= least_s + dearest_s + 1e-9
    if extra_s < math.inf:
        picked = [
            choice
            for kind, policies in found.counts(deficit).items()
            for choice in by_kind[kind]
            if choice.policy in policies
        ]
        assert sum(choice.saved_bytes for choice in picked) >= deficit - 1e-9
        assert abs(sum(choice.extra_s for choice in picked) - extra_s) <= 1e-9


def test_spans_longer_than_the_stack_is_deep() -> None:
    """600 layers of 20 kinds: too many kinds to group, and twice as many calls as Python nests."""
    layers = [Dense(saved=float((8 + i % 20) * 2**20)) for i in range(600)]
    chain = open_space(problem(layers, cluster(1), global_batch=1)).chain(1, 1)
    window = chain.windows[-1]
    whole = chain.frontier(("span", 0, 600), window)
    assert whole.saved_bytes[-1] == sum(frontier_of.saved_bytes[-1] for frontier_of in single_layers(chain, window))


def single_layers(chain: Chain, window: float) -> list[Frontier]:
    return [chain.frontier(("span", first, first + 1), window) for first in range(chain.layers)]
