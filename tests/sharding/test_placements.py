"""Shards taken from a tensor make the tensor again; parts and blocks are cut one by one."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from autoplan.passes.operators import _join, _slice
from autoplan.sharding import Partial, Replicate, Shard, assemble, take_shard


@st.composite
def placed(draw: st.DrawFn) -> tuple[torch.Tensor, Shard, int]:
    degree = draw(st.sampled_from([2, 3, 4]))
    dim = draw(st.integers(0, 2))
    runs = draw(st.lists(st.integers(1, 3).map(lambda n: n * degree), min_size=1, max_size=3))
    shape = [2, 3, 2]
    if draw(st.booleans()):
        shape[dim], layout = runs[0] * 3, Shard(dim, block=runs[0])
    else:
        shape[dim], layout = sum(runs), Shard(dim, parts=tuple(runs)) if len(runs) > 1 else Shard(dim)
    return torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float64).reshape(shape), layout, degree


@given(placed())
def test_assembling_the_shards_gives_the_tensor(example: tuple[torch.Tensor, Shard, int]) -> None:
    tensor, layout, degree = example
    assert layout.divides(tensor.shape[layout.dim], degree)
    shards = [take_shard(tensor, layout, index=rank, degree=degree) for rank in range(degree)]
    assert all(shard.is_contiguous() for shard in shards)
    assert torch.equal(assemble(shards, layout), tensor)


@given(placed())
def test_the_collectives_cut_as_parameters_are_cut(example: tuple[torch.Tensor, Shard, int]) -> None:
    tensor, layout, degree = example
    own = [_slice(tensor, rank, degree, layout.dim, layout.parts, layout.block) for rank in range(degree)]
    for rank, piece in enumerate(own):
        assert torch.equal(piece, take_shard(tensor, layout, index=rank, degree=degree))
    assert torch.equal(_join(own, layout.dim, layout.parts, layout.block), tensor)


def test_a_packed_projection_gives_each_rank_its_share_of_every_part() -> None:
    packed = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33])  # q, k and v of four columns
    assert take_shard(packed, Shard(0, parts=(4, 4, 4)), index=1, degree=2).tolist() == [12, 13, 22, 23, 32, 33]


def test_whole_tensors_are_copied_not_shared() -> None:
    tensor = torch.ones(3)
    for placement in (Replicate(), Partial()):
        copy = take_shard(tensor, placement, index=0, degree=2)
        assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()


def test_runs_that_do_not_divide_are_refused() -> None:
    assert not Shard(0).divides(50257, 2)  # GPT-2's vocabulary
    assert not Shard(0, parts=(8, 3)).divides(11, 2)
    assert Shard(0, block=8).divides(24, 4) and not Shard(0, block=8).divides(24, 3)
