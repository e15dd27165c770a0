"""Dropout: who draws the same numbers, who draws others, and that a seed decides them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.runtime import Program
from tests.support.plans import hand_plan, with_recompute
from tests.support.processes import run_ranks
from tests.support.training import program_of

WIDTH = 64


class Masks(nn.Module):
    """The gradient of ``weight`` is a decimal number in each place, one digit a sample: 1 where it was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5, self.training).sum() / 2


def digits(samples: int) -> dict[str, Tensor]:
    return {"x": torch.tensor([[10.0**power] * WIDTH for power in range(samples)], dtype=torch.float64)}


def masks(gradient: Tensor, samples: int) -> list[tuple[int, ...]]:
    numbers = gradient.round().long()
    return [tuple((numbers // 10**power % 10).tolist()) for power in range(samples)]


def test_data_ranks_and_micro_batches_draw_their_own_numbers_and_the_seed_decides_them() -> None:
    batch = digits(4)
    program = program_of(capture(Masks().train(), batch), data=2, micro_batch_size=1, micro_batches=2)

    def train(rank: int, world: int) -> list[Tensor]:
        found = []
        for seed in (1, 1, 2, 1):
            torch.manual_seed(seed + 10 * rank)  # rank 0 decides, whatever the others' seeds
            if len(found) == 3:
                program.step(batch)  # a step later
            program.zero_grad()
            program.step(batch)
            found.append(program.gradients()["weight"])
        return found

    first, again, other, second_step = run_ranks(train, 2)[1]
    drawn = masks(first, 4)
    assert all(set(mask) == {0, 1} for mask in drawn)
    assert len(set(drawn)) == 4
    assert torch.equal(first, again)
    assert not set(drawn) & set(masks(other, 4))
    assert not set(drawn) & set(masks(second_step, 4))


def test_one_gpu_draws_what_the_model_draws_alone() -> None:
    model, batch = Masks().train(), digits(4)
    torch.manual_seed(5)
    model(**batch).backward()
    assert model.weight.grad is not None
    expected, model.weight.grad = model.weight.grad, None
    program = program_of(capture(model, batch), micro_batch_size=4)
    torch.manual_seed(5)
    program.step(batch)
    assert torch.equal(program.gradients()["weight"], expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(x)), 0.5, self.training)
        return x + F.dropout(self.down(hidden), 0.5, self.training)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Stack().double().train(), {"x": torch.randn(8, 16, dtype=torch.float64)}


@pytest.mark.parametrize(
    "plan",
    [{"pipeline": 2, "micro_batch_size": 2, "micro_batches": 4}, {"tensor": 2, "micro_batch_size": 8}],
    ids=["pp2", "tp2"],
)
def test_neither_recompute_nor_the_schedule_changes_a_number(plan: dict[str, Any]) -> None:
    model, batch = stack()
    captured = capture(model, batch)
    layers = build_layers(captured)

    def program(policy: str, schedule: str) -> Program:
        made = with_recompute(hand_plan(layers, schedule=schedule, **plan), policy)
        return Program(captured, made, layers, cluster=Cluster.parse("2xcpu"), device="cpu")

    programs = [program("none", "1f1b"), program("full", "1f1b"), program("none", "gpipe")]

    def train(rank: int, world: int) -> tuple[list[dict[str, Tensor]], list[float], dict[str, Tensor]]:
        found, after = [], []
        for each in programs:
            torch.manual_seed(3)
            each.zero_grad()  # the programs train the model's own parameters
            each.step(batch)
            found.append({name: gradient.clone() for name, gradient in each.gradients().items()})
            after.append(torch.rand(()).item())
        local = {name: p.grad for name, p in programs[-1].named_parameters() if p.grad is not None}
        return found, after, local

    ranks = run_ranks(train, 2)
    for (expected, *others), after, _ in ranks:
        for gradients in others:
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-14)
        assert len(set(after)) == 1
    if "tensor" in plan:  # a bias that both ranks hold whole has one gradient, which they computed apart
        name = "blocks.1.down.bias"
        assert torch.equal(ranks[0][2][name], ranks[1][2][name])


def test_a_split_dropout_draws_for_each_part_apart_and_the_whole_ones_stay_alike() -> None:
    model, batch = stack()
    captured = capture(model, batch)
    layers = build_layers(captured)
    made = with_recompute(hand_plan(layers, tensor=2, micro_batch_size=8), "full")
    program = Program(captured, made, layers, cluster=Cluster.parse("2xcpu"), device="cpu")
    assert program.code(0).count("drawn_apart(") == 2  # between up and down, once a block

    def dropped(rank: int, world: int) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(7)
        program.step({"x": batch["x"][:1]})
        local = dict(program.named_parameters())
        first = local["blocks.0.up.bias"].grad
        assert first is not None
        return first == 0, program.gradients()

    (one, gradients), (other, same) = run_ranks(dropped, 2)
    assert one.any() and other.any()  # of one sample, what was dropped has no gradient
    assert not torch.equal(one, other)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same[name])
