"""The pass that gives every rank a share of the experts: rows go to theirs and come back, and gradients with them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.errors import StrategyError
from autoplan.passes import expert_operators
from autoplan.passes.expert_parallel import ExpertGraph, expert_parallel
from tests.support import models
from tests.support.threads import ThreadWorld
from tests.zoo.families import FAMILIES

EXPERTS = 4


def spread(name: str, degree: int) -> ExpertGraph:
    model, batch, _ = next(entry for entry in FAMILIES if entry.name == name).build()
    return expert_parallel(capture(model, batch).graph_module, degree=degree)


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


# What each of two ranks sends to four experts; some get nothing, and in the last case a rank neither.
ROUTES = [
    [[3, 1, 2, 2], [1, 1, 1, 5]],
    [[8, 0, 0, 0], [0, 0, 0, 8]],
    [[0, 0, 4, 4], [0, 0, 0, 8]],
]


@pytest.mark.parametrize("counts", ROUTES)
def test_rows_reach_their_experts_and_come_back_with_their_gradients(counts: list[list[int]]) -> None:
    """Expert e scales its rows by e + 1; row i of rank r is 10 r + i."""

    def on_rank(rank: int) -> tuple[Tensor, Tensor, list[float]]:
        rows = (10.0 * rank + torch.arange(8.0))[:, None].requires_grad_()
        offsets, route = expert_operators.route_rows(offsets_of(counts[rank]), "expert")
        here = expert_operators.dispatch_rows(rows, route, "expert")
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
        scales = torch.repeat_interleave(torch.arange(2.0) + 2 * rank + 1, sizes)[:, None]
        back = expert_operators.combine_rows(here * scales, route, "expert")
        back.sum().backward()
        assert rows.grad is not None
        return back.detach()[:, 0], rows.grad[:, 0], here.detach()[:, 0].tolist()

    found = ThreadWorld(2).run(on_rank)
    for rank, (back, gradient, here) in enumerate(found):
        experts = torch.repeat_interleave(torch.arange(4.0) + 1, torch.tensor(counts[rank]))
        assert back.tolist() == ((10.0 * rank + torch.arange(8.0)) * experts).tolist()
        assert gradient.tolist() == experts.tolist()
        mine = range(2 * rank, 2 * rank + 2)
        starts = [[sum(c[:e]) for e in range(4)] for c in counts]
        assert here == [10.0 * r + starts[r][e] + i for e in mine for r in range(2) for i in range(counts[r][e])]


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"])
def test_a_layer_sends_rows_there_and_back_once(family: str) -> None:
    found = spread(family, 2)
    names = [getattr(n.target, "__name__", "") for n in found.graph_module.graph.nodes if n.op == "call_function"]
    layers = names.count("route_rows")
    assert layers and names.count("dispatch_rows") == names.count("combine_rows") == layers
    assert len(found.parameters) == 2 * layers
    assert all("experts" in name and "shared" not in name for name in found.parameters)


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(StrategyError, match="expert 3 does not divide the 4 experts") as caught:
        spread("Mixtral", 3)
    assert caught.value.legal == "1, 2, 4"
    model, batch = models.mlp()
    with pytest.raises(StrategyError, match="no product grouped by expert"):
        expert_parallel(capture(model, batch).graph_module, degree=2)


def test_an_operator_between_the_products_that_mixes_rows_is_refused_by_name() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, 8, 8)) for _ in range(2))

        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            order = keys.argsort()
            ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
            rows = torch.ops.transformers.grouped_mm_fallback(x[order], self.up, ends)
            rows = torch.ops.transformers.grouped_mm_fallback(rows - rows.mean(0), self.down, ends)
            return rows.sum()

    batch = {"x": torch.randn(6, 8), "keys": torch.tensor([0, 1, 1, 2, 3, 3])}
    with pytest.raises(StrategyError, match="`mean` does not work row by row"):
        expert_parallel(capture(Mixing(), batch).graph_module, degree=2)
