"""Mutation test: every planted compiler fault is caught, and the layer that it was planted in is the one named."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.verification.numeric import Subject, compare, subject_of
from autoplan.verification.precision import float64_throughout
from autoplan.verification.shrink import Small
from tests.support import models
from tests.support.plans import hand_plan
from tests.verification import faulty


class TwoStreams(nn.Module):
    """Two tensors of one shape cross every cut, and a parameter that the loss does not need gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.right = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x, 2 * x
        for left, right in zip(self.left, self.right, strict=True):
            a, b = torch.tanh(left(a)) + b, torch.relu(right(b)) - a
        return F.mse_loss(a * b, y) + 0 * self.idle.detach().sum()


def two_streams(*, samples: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return TwoStreams(), {"x": torch.randn(samples, 8), "y": torch.randn(samples, 8)}


BUILDERS: dict[str, Any] = {
    "nanogpt": functools.partial(models.nano_gpt, layers=2),
    "cnn": models.batch_norm_cnn,
    "streams": two_streams,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2, "micro_batch_size": 4, "micro_batches": 2},
    "sequence": {"tensor": 2, "micro_batch_size": 4, "micro_batches": 2, "sequence_parallel": True},
    "data": {"data": 2, "micro_batch_size": 2, "micro_batches": 2},
    "pipeline": {"pipeline": 2, "micro_batch_size": 2, "micro_batches": 4},
    "model": {"pipeline": 2, "micro_batch_size": 8},
}


@functools.cache
def subject(model_name: str, strategy_name: str) -> Subject:
    model, batch = BUILDERS[model_name]()
    model = model.double()
    batch = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    with float64_throughout():
        layers = build_layers(capture(model, batch))
        plan = hand_plan(layers, **STRATEGIES[strategy_name])
        small = Small(model=model, example_inputs=batch, loss_fn=None, reductions=())
        return subject_of(small, plan, plan.strategy, None, Cluster.parse("8xcpu"))


FAULTS: list[tuple[str, str, str, str]] = [
    # fault, model, strategy, the layer that must be named ("" where the fault is in no layer)
    ("dropped_all_reduce", "nanogpt", "tensor", "h.1"),
    ("averaged_data_gradient", "nanogpt", "data", "lm_head"),
    ("swapped_stage_values", "streams", "pipeline", "left.2"),
    ("stale_buffer", "cnn", "model", "conv_1"),
    ("dropped_gradient_all_reduce", "nanogpt", "tensor", "h.1"),
    ("doubled_all_reduce", "nanogpt", "tensor", "h.1"),
    ("wrong_head_order", "nanogpt", "tensor", "h.1"),
    ("swapped_shards", "nanogpt", "tensor", "h.1"),
    ("missing_loss_scale", "nanogpt", "pipeline", "lm_head"),
    ("wrong_micro_batch_weight", "nanogpt", "tensor", "lm_head"),
    ("totals_of_one_rank", "nanogpt", "data", "lm_head"),
    ("unsynchronised_parameter", "nanogpt", "data", "h.1"),
    ("same_rows_on_every_rank", "nanogpt", "data", "wte"),
    ("forgotten_micro_batches", "nanogpt", "pipeline", "h.1"),
    ("doubled_stage_gradient", "nanogpt", "pipeline", "h.0"),
    ("missing_tied_sum", "nanogpt", "pipeline", "wte"),
    ("untied_copy", "nanogpt", "data", "wte"),
    ("norm_counted_twice", "nanogpt", "tensor", ""),
    ("gathered_gradient_not_summed", "nanogpt", "sequence", "h.1"),
    ("forgotten_norm_gradients", "nanogpt", "sequence", "h.1"),
    ("gradient_of_zeros", "streams", "pipeline", "right.3"),
]
CASES = [
    pytest.param(*fault, id=fault[0], marks=() if index < 4 else pytest.mark.wide) for index, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize(("fault", "model", "strategy", "layer"), CASES)
def test_a_planted_fault_is_caught_in_its_layer(
    fault: str, model: str, strategy: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = subject(model, strategy)
    getattr(faulty, fault)(monkeypatch)
    found, _ = compare(chosen)
    assert found.status == "differs"
    assert found.first is not None
    assert found.first.layer == layer, found.first.describe()
    assert not layer or ".py:" in found.first.where


@pytest.mark.parametrize(
    ("model", "strategy"), [("nanogpt", "tensor"), ("nanogpt", "sequence"), ("streams", "pipeline"), ("cnn", "model")]
)
def test_without_a_fault_all_is_equal(model: str, strategy: str) -> None:
    found, checks = compare(subject(model, strategy))
    assert found.status == "equal", found.first
    assert all(check.ok for check in checks if check.name != "memory"), checks
    assert max(row.worst for row in found.layers) < 1.0
