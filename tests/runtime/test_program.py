"""Programs train to the single process's numbers: losses, clipped norms, gradients and weights, on every rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.runtime import Program
from tests.support import models
from tests.support.plans import hand_plan, with_recompute
from tests.support.processes import run_ranks
from tests.support.training import (
    Trained,
    adamw,
    assert_close,
    assert_same_numbers,
    capture_double,
    program_of,
    train_alone,
    train_program,
    written,
)

STEPS = 3

INTERLEAVED = {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved"}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble"}

# name -> (plan, the most micro-batches in flight on each rank): GPipe holds all M, 1F1B min(M, stages - stage), and so
# does zero bubble; interleaved ranks count chunks.
PLANS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one": ({"micro_batch_size": 8}, [1]),
    "dp2": ({"data": 2, "micro_batch_size": 4}, [1, 1]),
    "dp2-accumulated": ({"data": 2, "micro_batch_size": 1, "micro_batches": 4}, [1, 1]),
    "mp2": ({"pipeline": 2, "micro_batch_size": 8}, [1, 1]),
    "pp2-gpipe": ({"pipeline": 2, "micro_batch_size": 2, "micro_batches": 4, "schedule": "gpipe"}, [4, 4]),
    "pp4-1f1b": ({"pipeline": 4, "micro_batch_size": 1, "micro_batches": 8}, [4, 3, 2, 1]),
    "pp4-fewer-micro-batches-than-stages": (
        {"pipeline": 4, "micro_batch_size": 4, "micro_batches": 2},
        [2, 2, 2, 1],
    ),
    "pp2-uneven-3-3-2": ({"pipeline": 2, "micro_batch_size": 3, "micro_batches": 3}, [2, 1]),
    "dp2-pp2": ({"data": 2, "pipeline": 2, "micro_batch_size": 1, "micro_batches": 4}, [2, 2, 1, 1]),
    "dp2-zero1": ({"data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 1}, [1, 1]),
    "dp4-zero2": ({"data": 4, "micro_batch_size": 1, "micro_batches": 2, "zero_stage": 2}, [1] * 4),
    "dp4-zero3": ({"data": 4, "micro_batch_size": 1, "micro_batches": 2, "zero_stage": 3}, [1] * 4),
    "dp2-pp2-zero3": (
        {"data": 2, "pipeline": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 3},
        [2, 2, 1, 1],
    ),
    "dp2-pp2-zero2": (
        {"data": 2, "pipeline": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 2},
        [2, 2, 1, 1],
    ),
    "pp2v2-interleaved": ({**INTERLEAVED, "micro_batch_size": 2, "micro_batches": 4}, [5, 3]),
    "pp2v2-interleaved-uneven-3-3-2": ({**INTERLEAVED, "micro_batch_size": 3, "micro_batches": 3}, [5, 3]),
    "dp2-pp2v2-interleaved-zero2": (
        {**INTERLEAVED, "data": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 2},
        [5, 5, 3, 3],
    ),
    "dp2-pp2v2-interleaved-zero3": (
        {**INTERLEAVED, "data": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 3},
        [5, 5, 3, 3],
    ),
    "pp2-zero-bubble": ({**ZERO_BUBBLE, "micro_batch_size": 2, "micro_batches": 4}, [2, 1]),
    "pp4-zero-bubble-fewer-micro-batches-than-stages": (
        {**ZERO_BUBBLE, "pipeline": 4, "micro_batch_size": 4, "micro_batches": 2},
        [2, 2, 2, 1],
    ),
    "dp2-pp2-zero-bubble": ({**ZERO_BUBBLE, "data": 2, "micro_batch_size": 1, "micro_batches": 4}, [2, 2, 1, 1]),
    "dp2-pp2-zero-bubble-zero2": (
        {**ZERO_BUBBLE, "data": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 2},
        [2, 2, 1, 1],
    ),
    "dp2-pp2-zero-bubble-zero3": (
        {**ZERO_BUBBLE, "data": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 3},
        [2, 2, 1, 1],
    ),
}


@functools.cache
def gpt() -> tuple[nn.Module, Any, Capture, Trained]:
    """Tied embedding in the first and the last stage, residuals over every cut, a micro-batch that counts no token."""
    model, batch, captured = capture_double(*models.nano_gpt(layers=2))
    return model, batch, captured, train_alone(model, [batch] * STEPS)


WIDE = {  # parts of what other plans cover
    *("dp2-accumulated", "mp2", "dp2-pp2", "dp2-zero1", "dp2-pp2-zero3"),
    *("pp2v2-interleaved", "dp2-pp2v2-interleaved-zero3", "pp2-zero-bubble", "dp2-pp2-zero-bubble"),
    "dp2-pp2-zero-bubble-zero3",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.wide] if n in WIDE else []) for n in PLANS])
def test_three_steps_of_adamw_equal_the_single_process(name: str) -> None:
    _, batch, captured, expected = gpt()
    plan, in_flight = PLANS[name]
    program = program_of(captured, **plan)
    ranks = run_ranks(lambda rank, world: train_program(program, [batch] * STEPS), program.plan.gpus)
    for found in ranks:
        assert_same_numbers(found, expected)
    assert [found.peak_in_flight for found in ranks] == in_flight


@pytest.mark.parametrize(
    "plan",
    [
        {"tensor": 2, "micro_batch_size": 8},
        {"tensor": 2, "pipeline": 2, "micro_batch_size": 4, "micro_batches": 2},
        {"tensor": 2, "data": 2, "micro_batch_size": 4, "zero_stage": 1},
        {"tensor": 2, "data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 3},
    ],
    ids=["tp2", "pp2-tp2", "dp2-tp2-zero1", "dp2-tp2-zero3"],
)
def test_a_tensor_axis_changes_no_number_and_each_gradient_counts_once_in_the_norm(plan: dict[str, Any]) -> None:
    _, batch, captured, expected = gpt()
    layers = build_layers(captured)
    made = hand_plan(layers, **plan)
    program = written(Program(captured, made, layers, cluster=Cluster.parse(f"{made.gpus}xcpu"), device="cpu"))
    for found in run_ranks(lambda rank, world: train_program(program, [batch] * STEPS), made.gpus):
        assert_same_numbers(found, expected)


@pytest.mark.parametrize(
    "plan",
    [
        {"tensor": 2, "data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 2},
        {"tensor": 2, "pipeline": 2, "micro_batch_size": 4, "micro_batches": 2},
        {"data": 2, "pipeline": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 3},
        {**INTERLEAVED, "tensor": 2, "micro_batch_size": 4, "micro_batches": 2},
        {**ZERO_BUBBLE, "data": 2, "micro_batch_size": 1, "micro_batches": 4, "zero_stage": 1},
        {**ZERO_BUBBLE, "tensor": 2, "micro_batch_size": 4, "micro_batches": 2},
    ],
    ids=["dp2-tp2-zero2", "pp2-tp2", "dp2-pp2-zero3", "pp2v2-tp2", "dp2-pp2-zero-bubble-zero1", "pp2-tp2-zero-bubble"],
)
def test_layers_recomputed_beside_layers_kept_change_no_number(plan: dict[str, Any]) -> None:
    _, batch, captured, expected = gpt()
    layers = build_layers(captured)
    made = with_recompute(hand_plan(layers, **plan), "full", "selective", "none")
    program = written(Program(captured, made, layers, cluster=Cluster.parse(f"{made.gpus}xcpu"), device="cpu"))
    for found in run_ranks(lambda rank, world: train_program(program, [batch] * STEPS), made.gpus):
        assert_same_numbers(found, expected)


class SkipsAndDeadEnds(nn.Module):
    """a is read by b, c and d (its gradient is their sum); b reaches d only detached (it gets zeros through d)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.tanh(self.a(x))
        second = torch.tanh(self.b(first * self.frozen))
        third = torch.tanh(self.c(first))
        return F.mse_loss(self.d(third + first + second.detach()), y)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_values_with_several_readers_and_values_without_gradient(zero_stage: int) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}
    model, batch, captured = capture_double(SkipsAndDeadEnds(), batch)
    expected = train_alone(model, [batch] * STEPS)
    assert "unused" not in expected.gradients[0]
    names = [n.name for n in captured.graph_module.graph.nodes if n.op == "call_function"]
    cuts = tuple(names.index(name) + 1 for name in ("tanh", "tanh_1", "tanh_2"))
    data = 1 + bool(zero_stage)
    program = program_of(
        captured, cuts=cuts, pipeline=4, data=data, micro_batch_size=1, micro_batches=6 // data, zero_stage=zero_stage
    )
    for found in run_ranks(lambda rank, world: train_program(program, [batch] * STEPS), 4 * data):
        assert_same_numbers(found, expected)


def test_batch_statistics_live_with_their_stage_and_reach_every_rank() -> None:
    model, batch, captured = capture_double(*models.batch_norm_cnn())
    expected = train_alone(model, [batch] * STEPS)
    program = program_of(captured, pipeline=2, micro_batch_size=8)
    for found in run_ranks(lambda rank, world: train_program(program, [batch] * STEPS), 2):
        assert_same_numbers(found, expected)
    assert expected.weights["norm.num_batches_tracked"] == STEPS


def rows(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: tensor[start:stop] for name, tensor in batch.items()}


@pytest.mark.parametrize("samples", [2, 6])
def test_a_batch_smaller_than_planned_runs_whole(samples: int) -> None:
    model, batch, captured, _ = gpt()
    small = [rows(batch, 0, samples)]
    expected = train_alone(model, small)
    program = program_of(captured, data=2, pipeline=2, micro_batch_size=2, micro_batches=2)
    for found in run_ranks(lambda rank, world: train_program(program, small), 4):
        assert_same_numbers(found, expected)


def test_local_batches_are_the_ranks_own_rows() -> None:
    _, batch, captured, expected = gpt()
    program = program_of(captured, data=2, micro_batch_size=2, micro_batches=2)

    def train(rank: int, world: int) -> Trained:
        return train_program(program, [rows(batch, 4 * rank, 4 * rank + 4)] * STEPS, local=True)

    for found in run_ranks(train, 2):
        assert_same_numbers(found, expected)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_add_up_over_steps_as_in_torch(zero_stage: int) -> None:
    model, batch, captured, _ = gpt()
    program = program_of(captured, data=2, micro_batch_size=2, micro_batches=2, zero_stage=zero_stage)

    def twice(rank: int, world: int) -> dict[str, Tensor]:
        program.step(batch)
        program.step(batch)
        return program.gradients()

    alone = train_gradients(model, batch)
    for found in run_ranks(twice, 2):
        for name, gradient in alone.items():
            assert_close(name, found[name], 2 * gradient)


def train_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(model(**batch), parameters), strict=True))


def test_ranks_beyond_the_plan_hold_nothing_and_know_the_loss() -> None:
    _, batch, captured, expected = gpt()
    program = program_of(captured, gpus=3, data=2, micro_batch_size=4)

    def train(rank: int, world: int) -> tuple[int, list[float], dict[str, Tensor]]:
        held = sum(parameter.numel() for parameter in program.parameters())
        optimizer = adamw(program.parameters())  # the same loop on every rank, used or not
        losses = []
        for _ in range(STEPS):
            program.zero_grad()
            losses.append(program.step(batch))
            program.clip_grad_norm_(0.5)
            optimizer.step()
        assert (held == 0) == (not list(program.named_parameters()))
        return held, losses, program.state_dict()

    *_, (held, losses, weights) = run_ranks(train, 3)
    assert held == 0
    assert losses == pytest.approx(expected.losses, rel=1e-10)
    for name, weight in expected.weights.items():
        assert_close(name, weights[name], weight)


def test_one_gpu_needs_no_process_group_and_trains_the_users_own_parameters() -> None:
    model, batch, captured = capture_double(*models.mlp())
    expected = train_alone(model, [batch] * STEPS)
    program = program_of(captured, gpus=8, micro_batch_size=8)
    assert_same_numbers(train_program(program, [batch] * STEPS), expected)
    assert [id(p) for p in program.parameters()] == [id(p) for p in model.parameters()]


def test_zero_keeps_the_names_and_halves_what_the_optimizer_sees() -> None:
    model, _, captured, _ = gpt()
    program = program_of(captured, data=2, micro_batch_size=4, zero_stage=1)
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def sizes(rank: int, world: int) -> dict[str, int]:
        return {name: parameter.numel() for name, parameter in program.named_parameters()}

    for found in run_ranks(sizes, 2):
        assert list(found) == list(whole)
        assert found == {name: -(-size // 2) for name, size in whole.items()}
