"""Upper bounds of data-dependent sizes, read back from their value at the largest batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoplan.capture.shapes import MAX_BATCH, _at_batch

batches = st.integers(1, 100_000)


@given(coefficient=st.integers(1, 2**30).filter(lambda size: size % MAX_BATCH), batch=batches)
def test_a_multiple_of_the_batch(coefficient: int, batch: int) -> None:
    assert _at_batch(coefficient * MAX_BATCH, batch) == coefficient * batch
    assert _at_batch(coefficient * MAX_BATCH**2, batch) == coefficient * batch**2


@given(coefficients=st.lists(st.integers(1, MAX_BATCH - 1), min_size=1, max_size=4), batch=batches)
def test_a_polynomial_in_the_batch(coefficients: list[int], batch: int) -> None:
    def value(at: int) -> int:
        return sum(coefficient * at**power for power, coefficient in enumerate(coefficients))

    assert _at_batch(value(MAX_BATCH), batch) == value(batch)
