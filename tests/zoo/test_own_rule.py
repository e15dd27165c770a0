"""An operator of the user's own: whole on every rank until one line says what splits, and then split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoplan
from autoplan.sharding import register_rule, registry
from tests.zoo.entry import HIDDEN, SAMPLES, Built, Entry, seeded
from tests.zoo.matrix import Cell, run_entry

WIDE = 4 * HIDDEN


@torch.library.custom_op("zoo_test::gate", mutates_args=())
def gate(x: Tensor, w: Tensor) -> Tensor:
    return x * w.sigmoid()


@gate.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    share = w.sigmoid()
    return gradient * share, (gradient * x).flatten(0, -2).sum(0) * share * (1 - share)


gate.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.gate = nn.Parameter(torch.randn(WIDE))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(gate(self.up(x), self.gate)), y)


def build() -> Built:
    torch.manual_seed(0)
    x, y = torch.randn(2, SAMPLES, HIDDEN, generator=seeded())
    return Gated(), {"x": x, "y": y}, None


def test_the_plan_lists_what_no_rule_splits_with_its_bytes_and_verify_runs_it() -> None:
    model, batch, _ = build()
    plan = autoplan.plan(model, gpus="2xcpu", example_inputs=batch, strategy={"tensor": 2})
    said = next(text for text in plan.assumptions if text.startswith("no rule says how these split"))
    assert f"zoo_test.gate ({4 * WIDE / 1024:.1f} KiB a sample, {__file__}:" in said  # float32, one vector a sample
    assert autoplan.verify(model, plan, batch).equal


def cell() -> Cell:
    return run_entry(Entry(name="gated", kind="test", build=build), ("tensor 2",))["tensor 2"]


def test_one_line_splits_an_operator_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))  # the line is for this test alone
    without = cell()
    register_rule("zoo_test.gate: x[*b, c], w[c] -> y[*b, c]")
    with_rule = cell()
    assert without.status == with_rule.status == "equal"
    assert without.split is not None and with_rule.split is not None
    assert without.split < with_rule.split  # the gate itself is divided
