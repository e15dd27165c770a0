"""Reshapes: following a shard by arithmetic agrees with reshaping the shards themselves."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoplan.capture.shapes import MAX_BATCH
from autoplan.sharding import Shard, take_shard
from autoplan.sharding.views import in_runs, reshape


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int], Shard, int]:
    """Two groupings of one list of factors, and a shard of the first."""
    degree = draw(st.sampled_from([2, 4]))
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=2, max_size=5))
    before, after = _group(draw, factors), _group(draw, factors)
    dim = draw(st.integers(0, len(before) - 1))
    runs = [run for run in range(1, before[dim] + 1) if before[dim] % run == 0 and run % degree == 0]
    state = in_runs(dim, before[dim], draw(st.sampled_from(runs))) if runs else Shard(dim)
    return before, after, state, degree


def _group(draw: st.DrawFn, factors: list[int]) -> list[int]:
    cuts = sorted({0, len(factors), *draw(st.lists(st.integers(0, len(factors)), max_size=4))})
    return [math.prod(factors[a:b]) for a, b in itertools.pairwise(cuts)]


@given(reshapes())
def test_a_followed_shard_holds_the_same_elements(example: tuple[list[int], list[int], Shard, int]) -> None:
    before, after, state, degree = example
    moved = reshape(before, after, state, degree)
    if moved is None:
        return
    tensor = torch.arange(math.prod(before)).reshape(before)
    for rank in range(degree):
        local = take_shard(tensor, state, index=rank, degree=degree)
        wanted = take_shard(tensor.reshape(after), moved, index=rank, degree=degree)
        assert torch.equal(local.reshape(wanted.shape), wanted)
    assert reshape(after, before, moved, degree) == state


def test_hidden_columns_become_heads_and_back() -> None:
    assert reshape([2, 16, 32], [2, 16, 4, 8], Shard(2), 2) == Shard(2)
    assert reshape([2, 16, 4, 8], [2, 16, 32], Shard(2), 4) == Shard(2)


def test_more_ranks_than_heads_have_no_view_of_their_own() -> None:
    assert reshape([2, 16, 32], [2, 16, 4, 8], Shard(2), 8) is None


def test_three_packed_parts_are_an_outer_dimension() -> None:
    assert reshape([2, 16, 96], [2, 16, 3, 32], Shard(2, parts=(32, 32, 32)), 2) == Shard(3)
    assert reshape([2, 16, 96], [2, 16, 3, 32], Shard(2), 2) is None  # half of the columns: one and a half parts


def test_heads_merged_with_the_batch_are_blocks() -> None:
    assert reshape([16, MAX_BATCH, 4, 8], [16, 4 * MAX_BATCH, 8], Shard(2), 2) == Shard(1, block=4)
    assert reshape([16, 4 * MAX_BATCH, 8], [16, MAX_BATCH, 4, 8], Shard(1, block=4), 2) == Shard(2)
