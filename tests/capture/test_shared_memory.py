"""Two parameters on one memory are no tie that ranks can keep; one Parameter under two names is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.errors import CaptureError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().mean()


def by_data(pair: Pair) -> None:
    pair.b.weight.data = pair.a.weight.data


def by_a_view(pair: Pair) -> None:
    pair.b.bias = nn.Parameter(pair.a.weight.data[1])


def by_the_transpose(pair: Pair) -> None:
    pair.b.weight = nn.Parameter(pair.a.weight.data.t())


def by_a_buffer(pair: Pair) -> None:
    pair.register_buffer("shown", pair.a.weight.data)


@pytest.mark.parametrize(
    ("share", "names"),
    [
        (by_data, ("a.weight", "b.weight")),
        (by_a_view, ("a.weight", "b.bias")),
        (by_the_transpose, ("a.weight", "b.weight")),
        (by_a_buffer, ("a.weight", "shown")),
    ],
)
def test_memory_that_two_share_is_refused(share: Callable[[Pair], None], names: tuple[str, str]) -> None:
    pair = Pair()
    share(pair)
    with pytest.raises(CaptureError, match="share memory") as refused:
        capture(pair, torch.randn(2, 4))
    assert all(name in refused.value.what for name in names)
    assert refused.value.where.startswith(__file__)


def one_parameter(pair: Pair) -> None:
    pair.b.weight = pair.a.weight


def parts_of_one_storage(pair: Pair) -> None:
    flat = torch.randn(32)
    pair.a.weight, pair.b.weight = (nn.Parameter(part.view(4, 4)) for part in flat.split(16))


def columns_of_one_matrix(pair: Pair) -> None:
    both = torch.randn(4, 8)
    pair.a.weight, pair.b.weight = (nn.Parameter(part) for part in both.split(4, dim=1))


@pytest.mark.parametrize("arrange", [one_parameter, parts_of_one_storage, columns_of_one_matrix])
def test_ties_and_neighbours_are_kept(arrange: Callable[[Pair], None]) -> None:
    pair = Pair()
    arrange(pair)
    assert capture(pair, torch.randn(2, 4)).tied == ((("a.weight", "b.weight"),) if arrange is one_parameter else ())
