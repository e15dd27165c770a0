"""ZeRO-3: parameters are slices between layers, and whole only while theirs runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.layers import LayerGraph, build_layers
from autoplan.runtime import Program
from autoplan.runtime.gathered import WINDOW, Gathered
from tests.support import models
from tests.support.plans import hand_plan, with_recompute
from tests.support.processes import run_ranks
from tests.support.training import capture_double, program_of

MICRO_BATCHES = 2


def layer_bytes(model: nn.Module, layers: LayerGraph) -> list[int]:
    """Each layer's parameters, whole, padded to the data degree of two."""
    sizes = {name: p.numel() + p.numel() % 2 for name, p in model.named_parameters(remove_duplicate=False)}
    return [8 * sum(sizes[name] for name in layer.parameters) for layer in layers.layers]


def step(program: Program, batch: Any) -> tuple[int, int, int, int]:
    program.step(batch)
    sync = program._rank_part().sync
    assert isinstance(sync, Gathered)
    held = sum(p.numel() * p.element_size() for p in program.parameters())
    left = sum(known.size_bytes for known in sync._storages.values() if not known.storage.expired())
    return sync.peak_whole_bytes, sync.gathers, held, left


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_at_most_two_layers_are_whole_and_each_is_gathered_once_a_forward_and_once_a_backward(policy: str) -> None:
    model, batch, captured = capture_double(*models.nano_gpt())
    layers = build_layers(captured)
    plan = hand_plan(layers, data=2, micro_batch_size=2, micro_batches=MICRO_BATCHES, zero_stage=3)
    program = Program(captured, with_recompute(plan, policy), layers, device="cpu")
    sizes = layer_bytes(model, layers)
    everything = 8 * sum(p.numel() for p in model.parameters())
    for peak, gathers, held, left in run_ranks(lambda rank, world: step(program, batch), 2):
        assert peak <= WINDOW * max(sizes) < everything / 2
        assert held == pytest.approx(everything / 2, rel=0.01)
        assert left == 0
        # The embedding's backward reads no weight: its layer is gathered in the forward alone, unless it runs again.
        once = 1 if policy != "full" else 0
        assert gathers == MICRO_BATCHES * (2 * len(layers.layers) - once)


class Adapter(nn.Module):
    """A frozen base beside a trained adapter, of sizes that two ranks don't divide."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5)
        self.adapter = nn.Linear(5, 5)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.base(x) + self.adapter(x))
        return x.square().mean()


def test_frozen_parameters_are_sliced_too_and_get_no_gradient() -> None:
    torch.manual_seed(0)
    model, batch, captured = capture_double(Adapter(), {"x": torch.randn(4, 5)})
    program = program_of(captured, data=2, micro_batch_size=2, zero_stage=3)

    def train(rank: int, world: int) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
        program.step(batch)
        return {name: p.numel() for name, p in program.named_parameters()}, program.gradients()

    loss = model(**batch)
    expected = dict(zip(("weight", "bias"), torch.autograd.grad(loss, model.adapter.parameters()), strict=True))
    for sizes, gradients in run_ranks(train, 2):
        assert sizes == {"base.weight": 13, "base.bias": 3, "adapter.weight": 13, "adapter.bias": 3}
        assert set(gradients) == {"adapter.weight", "adapter.bias"}
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[f"adapter.{name}"], gradient, rtol=1e-12, atol=1e-14)
