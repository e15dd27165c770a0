"""Bags of embeddings: one sample's rows each where they are equally long, and refused where they may not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture.coupling import trace_batch
from tests.support.splitting import Batch, assert_splits, captured


class Bags(nn.Module):
    def __init__(self, body: Any = None, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 4, **options).double()
        self.body = body

    def forward(self, history: Tensor) -> Tensor:
        found = self.body(self.bag, history) if self.body else self.bag(history)
        return found.pow(2).sum(-1).mean()


def batch() -> Batch:
    return {"history": torch.randint(20, (6, 5), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_equal_bags_may_be_split(mode: str) -> None:
    torch.manual_seed(0)
    assert_splits(Bags(mode=mode), batch(), [1, 3, 2])


def test_several_bags_of_a_sample_may_be_split() -> None:
    torch.manual_seed(0)
    fives = {"history": torch.randint(20, (6, 2, 5), generator=torch.Generator().manual_seed(0))}
    assert_splits(Bags(lambda bag, x: bag(x.reshape(-1, 5)).reshape(-1, 2, 4)), fives, [4, 2])


def test_padding_and_weights_of_each_row_may_be_split() -> None:
    torch.manual_seed(0)
    assert_splits(Bags(mode="mean", padding_idx=3), batch(), [2, 4])
    weighted = Bags(lambda bag, x: bag(x, per_sample_weights=x.double() / 7), mode="sum")
    assert_splits(weighted, batch(), [2, 4])


def across_samples(bag: nn.EmbeddingBag, x: Tensor) -> Tensor:
    return bag(x.reshape(-1), torch.arange(0, x.numel(), 10))  # two samples a bag


def ragged(bag: nn.EmbeddingBag, x: Tensor) -> Tensor:
    return bag(x.reshape(-1), torch.tensor([0, 7, 9]))


def the_other_way(bag: nn.EmbeddingBag, x: Tensor) -> Tensor:
    return bag(x.t().reshape(-1), torch.arange(0, x.numel(), 5))


def starts_as_values(bag: nn.EmbeddingBag, x: Tensor) -> Tensor:
    return bag(x) * torch.arange(0, x.numel(), 5)[:, None]


@pytest.mark.parametrize("body", [across_samples, ragged, the_other_way, starts_as_values])
def test_bags_across_samples_are_couplings(body: Any) -> None:
    capture = captured(Bags(body), batch(), dynamic=body is not ragged and body is not across_samples)
    assert trace_batch(capture.graph_module, capture.inputs).couplings


def test_gradients_scaled_by_frequency_are_a_coupling() -> None:
    capture = captured(Bags(scale_grad_by_freq=True), batch())
    found = trace_batch(capture.graph_module, capture.inputs).couplings
    assert [coupling.reason for coupling in found.values()] == [
        "gradients are scaled by how often an index comes in the batch"
    ]
