"""gather_inputs: a later batch in the order of the placeholders, or what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.capture import capture, gather_inputs
from autoplan.errors import CaptureError
from tests.capture.test_graph import FixedBatch
from tests.support.models import nano_gpt


def test_order_of_keys_does_not_matter() -> None:
    model, batch = nano_gpt(layers=1)
    result = capture(model, batch)
    turned = dict(reversed(list(batch.items())))
    assert [t is b for t, b in zip(gather_inputs(result, turned), batch.values(), strict=True)] == [True, True]


def test_one_tensor_and_tuples() -> None:
    x = torch.randn(6, 4)
    result = capture(nn.Linear(4, 4), x, loss_fn=torch.mean)
    assert [spec.path for spec in result.inputs] == [()]
    assert gather_inputs(result, x)[0] is x
    pair = capture(nn.Linear(4, 4), (x, x), loss_fn=nn.MSELoss())
    assert [spec.path for spec in pair.inputs] == [(0,), (1,)]
    assert gather_inputs(pair, [x, x])[1] is x


IDS = torch.zeros(8, 16, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "what", "legal"),
    [
        ({"input_ids": IDS}, "has no batch['labels']", "this batch holds batch['input_ids']"),
        ((IDS, IDS), "has no batch['input_ids']", "this batch holds batch[0], batch[1]"),
        ({"input_ids": IDS, "labels": [1, 2]}, "has no batch['labels']", "batch['labels'][0]"),
        ({"input_ids": IDS, "labels": None}, "batch['labels'] is a NoneType, not a tensor", "[batch, 16]"),
        ({"input_ids": IDS, "labels": IDS[:, :8]}, "has shape [8, 8]", "only the batch dimension may differ"),
        ({"input_ids": IDS, "labels": IDS[0]}, "has shape [16]", "only the batch dimension may differ"),
        ({"input_ids": IDS, "labels": IDS.int()}, "is torch.int32", "torch.int64"),
        ({"input_ids": IDS, "labels": IDS[:4]}, "disagree", "one size of dimension 0"),
    ],
)
def test_a_batch_that_does_not_fit_is_told_where(batch: Any, what: str, legal: str) -> None:
    result = capture(*nano_gpt(layers=1))
    with pytest.raises(CaptureError) as error:
        gather_inputs(result, batch)
    assert what in error.value.what
    assert legal in error.value.legal
    assert error.value.where.startswith("batch")
    assert error.value.attempt


def test_a_static_program_takes_its_own_batch_size_only() -> None:
    result = capture(FixedBatch(), torch.randn(6, 4))
    assert len(gather_inputs(result, torch.randn(6, 4))) == 1
    with pytest.raises(CaptureError, match="at 6 samples only, the batch has 3"):
        gather_inputs(result, torch.randn(3, 4))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        return (super().forward(x) * scale).mean()


def test_settings_are_part_of_the_program() -> None:
    x = torch.randn(6, 4)
    result = capture(Scaled(4, 4), (x, 2.0))
    assert gather_inputs(result, (x, 2.0))[0] is x
    with pytest.raises(CaptureError, match=r"captured with 2\.0 here, not 3\.0"):
        gather_inputs(result, (x, 3.0))
