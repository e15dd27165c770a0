"""How a batch is cut: exact counts, nothing lost, legal counts named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import StrategyError
from autoplan.plan import Strategy
from autoplan.runtime.batch import micro_batch_sizes, rows_of_rank


def test_a_planned_batch_gives_the_planned_micro_batches() -> None:
    assert micro_batch_sizes(8, Strategy(micro_batch_size=2, micro_batches=4)) == (2, 2, 2, 2)


def test_other_batches_are_cut_as_evenly_as_they_divide() -> None:
    strategy = Strategy(micro_batch_size=4, micro_batches=4)
    assert micro_batch_sizes(10, strategy) == (4, 3, 3)
    assert micro_batch_sizes(3, strategy) == (3,)
    assert micro_batch_sizes(20, strategy) == (4,) * 5


@given(rows=st.integers(1, 200), size=st.integers(1, 20), micro_batches=st.integers(2, 8))
def test_no_row_is_lost_and_no_micro_batch_is_larger_than_planned(rows: int, size: int, micro_batches: int) -> None:
    sizes = micro_batch_sizes(rows, Strategy(micro_batch_size=size, micro_batches=micro_batches))
    assert sum(sizes) == rows
    assert max(sizes) <= size
    assert min(sizes) >= max(sizes) - 1 >= 0
    assert min(sizes) > 0


def test_an_unsplit_plan_never_splits_because_its_loss_may_not_be_splittable() -> None:
    assert micro_batch_sizes(50, Strategy(micro_batch_size=8)) == (50,)


def test_a_graph_of_one_size_runs_at_that_size_only() -> None:
    strategy = Strategy(micro_batch_size=2, micro_batches=4)
    assert micro_batch_sizes(6, strategy, fixed=2) == (2, 2, 2)
    with pytest.raises(StrategyError, match="micro-batches of 2") as caught:
        micro_batch_sizes(7, strategy, fixed=2)
    assert caught.value.legal == "a multiple of 2 samples"


def test_rows_go_to_data_ranks_in_order() -> None:
    strategy = Strategy(data=4, micro_batch_size=2)
    assert [list(rows_of_rank(8, strategy, rank)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("batch", "legal"), [(7, "a multiple of 4, such as 4 or 8"), (3, "a multiple of 4, such as 4")]
)
def test_a_batch_that_does_not_divide_is_refused_with_the_legal_counts(batch: int, legal: str) -> None:
    with pytest.raises(StrategyError) as caught:
        rows_of_rank(batch, Strategy(data=4), 0)
    assert caught.value.legal == legal
