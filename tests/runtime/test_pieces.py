"""Rectangles of whole tensors: they cover what a rank stores, and no element twice."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.runtime.pieces import pieces, rectangles
from autoplan.sharding.placements import REPLICATE, Placement, Shard, take_shard

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def test_a_range_that_starts_and_ends_within_rows_is_their_ends_and_the_rows_between() -> None:
    assert list(rectangles((4, 3), 2, 10)) == [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    assert list(rectangles((4, 3), 4, 5)) == [((1, 1), (1, 1))]
    assert list(rectangles((4, 3), 3, 9)) == [((1, 0), (2, 3))]
    assert list(rectangles((), 0, 1)) == [((), ())]
    assert list(rectangles((0, 3), 0, 0)) == []


@settings(deadline=None)
@given(shapes, st.data())
def test_rectangles_are_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = torch.arange(count).view(shape)
    found = list(rectangles(shape, start, stop))
    taken = [whole[tuple(slice(o, o + s) for o, s in zip(*r, strict=True))].reshape(-1) for r in found]
    assert torch.cat([*taken, torch.empty(0, dtype=torch.int64)]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement, int]:
    """A whole shape, how it lies over the tensor axis, and that axis's degree."""
    degree = draw(st.sampled_from((1, 2, 4)))
    shape = list(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    kind = draw(st.sampled_from(("whole", "one", "parts", "blocks")))
    if kind == "whole":
        return tuple(shape), REPLICATE, degree
    if kind == "one":
        shape[dim] *= degree
        return tuple(shape), Shard(dim), degree
    runs = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    if kind == "parts":
        parts = tuple(run * degree for run in runs)
        shape[dim] = sum(parts)
        return tuple(shape), Shard(dim, parts), degree
    shape[dim] = len(runs) * runs[0] * degree
    return tuple(shape), Shard(dim, block=runs[0] * degree), degree


@settings(deadline=None)
@given(sharded(), st.integers(1, 5))
def test_pieces_of_all_ranks_are_the_whole_tensor_once(
    layout: tuple[tuple[int, ...], Placement, int], data: int
) -> None:
    shape, placement, degree = layout
    whole = torch.arange(math.prod(shape)).view(shape)
    counted, read = torch.zeros_like(whole), torch.full_like(whole, -1)
    copies = 1 if isinstance(placement, Shard) else degree
    for index in range(degree):
        local = take_shard(whole, placement, index=index, degree=degree)
        length = -(-local.numel() // data)
        padded = torch.nn.functional.pad(local.reshape(-1), (0, length * data - local.numel()), value=-2)
        for rank in range(data):
            extent = range(min(local.numel(), rank * length), min(local.numel(), (rank + 1) * length))
            stored = padded.view(data, -1)[rank].clone()
            for piece in pieces(stored, shape=shape, placement=placement, index=index, degree=degree, extent=extent):
                counted[piece.index] += 1
                read[piece.index] = piece.view
                piece.view.copy_(whole[piece.index])  # a view: this fills what is stored
            assert torch.equal(stored, padded.view(data, -1)[rank])
    assert counted.eq(copies).all()
    assert torch.equal(read, whole)


@settings(deadline=None)
@given(sharded())
def test_what_is_not_sliced_keeps_its_shape(layout: tuple[tuple[int, ...], Placement, int]) -> None:
    shape, placement, degree = layout
    whole = torch.arange(math.prod(shape)).view(shape)
    read = torch.full_like(whole, -1)
    for index in range(degree):
        stored = take_shard(whole, placement, index=index, degree=degree)
        for piece in pieces(stored, shape=shape, placement=placement, index=index, degree=degree):
            read[piece.index] = piece.view
    assert torch.equal(read, whole)
