"""The integer program, elimination and merging find the minimum that trying everything finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.sharding import elimination, ilp, minimum
from autoplan.sharding.model import PairwiseModel, merge_followers

COSTS = st.integers(0, 20).map(float)


@st.composite
def problems(draw: st.DrawFn) -> PairwiseModel:
    """Up to six variables of up to four choices, any graph; choice 0 is never forbidden."""
    model = PairwiseModel()
    for _ in range(draw(st.integers(1, 6))):
        model.variable(draw(st.lists(COSTS, min_size=1, max_size=4)))
    for first, second in itertools.combinations(range(len(model.costs)), 2):
        if draw(st.booleans()):
            rows, columns = len(model.costs[first]), len(model.costs[second])
            cells = draw(st.lists(st.one_of(COSTS, st.just(np.inf)), min_size=rows * columns, max_size=rows * columns))
            table = np.array(cells).reshape(rows, columns)
            table[0, 0] = draw(COSTS)
            model.pair(first, second, table)
    return model


def brute_force(model: PairwiseModel) -> float:
    return min(model.objective(choices) for choices in itertools.product(*(range(len(c)) for c in model.costs)))


@given(problems())
def test_elimination_is_exact(model: PairwiseModel) -> None:
    assert model.objective(elimination.minimise(model)) == brute_force(model)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sets(st.integers(0, 5)))
def test_the_integer_program_is_exact_whatever_is_merged(model: PairwiseModel, followers: set[int]) -> None:
    choices = ilp.minimise(model, followers)
    assert model.objective(choices) == pytest.approx(brute_force(model), abs=1e-6)


@given(problems(), st.sets(st.integers(0, 5)), st.sampled_from([4, 20, minimum.LARGEST_TABLE]))
@settings(max_examples=60, deadline=None)
def test_the_minimum_is_exact_whichever_way_it_is_found(
    model: PairwiseModel, followers: set[int], largest: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimum, "LARGEST_TABLE", largest)
        choices = minimum.minimise(model, followers)
    assert model.objective(choices) == pytest.approx(brute_force(model), abs=1e-6)


def test_no_order_where_every_order_makes_a_large_table() -> None:
    model = PairwiseModel()
    variables = [model.variable([0.0] * 4) for _ in range(5)]
    for first, second in itertools.combinations(variables, 2):  # each with each: the first table has all five
        model.pair(first, second, np.ones((4, 4)))
    assert elimination.order(model, largest=4**5 - 1) is None
    assert sorted(elimination.order(model, largest=4**5) or ()) == variables


@given(problems())
def test_merging_chains_keeps_the_minimum(model: PairwiseModel) -> None:
    merged = merge_followers(model, set(range(len(model.costs))))
    smaller = elimination.minimise(merged.model) if merged.kept else []
    assert model.objective(merged.expand(smaller)) == brute_force(model)


def test_a_chain_is_merged_away() -> None:
    model = PairwiseModel()
    variables = [model.variable([1.0, 2.0]) for _ in range(50)]
    for first, second in itertools.pairwise(variables):
        model.pair(first, second, np.array([[0.0, 5.0], [5.0, 0.0]]))
    merged = merge_followers(model, set(variables))
    assert merged.kept == ()
    assert model.objective(merged.expand([])) == 50.0
