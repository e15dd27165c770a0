"""Small tensors travel together: fewer collectives, the same values."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoplan
from autoplan.runtime.together import TOGETHER_BYTES, joined, parted, runs
from tests.support.processes import run_ranks

MIB = 2**20
shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(torch.Size), min_size=1, max_size=6)
things = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 24 * MIB)), max_size=12)


@given(shapes)
def test_what_is_joined_is_parted_again(shapes: list[torch.Size]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    for tensor, part in zip(tensors, parted(joined(tensors), shapes), strict=True):
        assert torch.equal(tensor, part)


@given(things)
def test_a_run_is_of_neighbours_of_a_kind_that_are_small_together(things: list[tuple[str, int]]) -> None:
    of = {str(index): thing for index, thing in enumerate(things)}
    found = list(runs(of, lambda name: of[name][0], lambda name: of[name][1]))
    assert [name for run in found for name in run] == list(of)
    for run in found:
        assert len({of[name][0] for name in run}) == 1
        assert len(run) == 1 or sum(of[name][1] for name in run) <= TOGETHER_BYTES
    for before, after in itertools.pairwise(found):  # and no two could have been one
        both = [*before, after[0]]
        assert len({of[name][0] for name in both}) == 2 or sum(of[name][1] for name in both) > TOGETHER_BYTES


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def test_a_state_of_many_small_tensors_is_one_broadcast_a_stage() -> None:
    strategy = {"data": 1, "tensor": 1, "pipeline": 2, "micro_batch_size": 2}
    torch.manual_seed(0)
    model, batch = Deep(), torch.randn(4, 4)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    program = autoplan.compile(model, gpus=2, example_inputs=batch, strategy=strategy, device="cpu")

    def gathered(rank: int, world: int) -> tuple[int, dict[str, torch.Tensor]]:
        sent, broadcast = [], torch.distributed.broadcast

        def counted(tensor: torch.Tensor, **where: int) -> None:
            sent.append(tensor)
            broadcast(tensor, **where)

        torch.distributed.broadcast = counted
        state = program.state_dict()
        return len(sent), state

    for count, state in run_ranks(gathered, 2):
        assert count == 2
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())
