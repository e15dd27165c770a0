"""Evaluation: forwards alone, as the single process computes after ``eval()``, under every axis and at any size."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoplan
from autoplan.capture import capture
from autoplan.layers import build_layers
from autoplan.runtime import Program
from autoplan.runtime.batch import uneven_rows
from autoplan.schedules import Action, first_forward_problem, forward_actions
from autoplan.verification.precision import float64_throughout
from tests.support import models
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks
from tests.support.training import adamw, in_double, program_forced
from tests.zoo.families import FAMILIES

ONE = {"data": 1, "tensor": 1, "pipeline": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "dp2-pp2-zero1": {**ONE, "data": 2, "pipeline": 2, "zero_stage": 1, "micro_batch_size": 2},
    "dp2-tp2-zero3-recompute": {
        **ONE,
        "data": 2,
        "tensor": 2,
        "zero_stage": 3,
        "micro_batch_size": 2,
        "recompute": "full",
    },
    "pp2-tp2-zero-bubble": {**ONE, "pipeline": 2, "tensor": 2, "micro_batch_size": 2, "schedule": "zero_bubble"},
    "tp2-sequence": {**ONE, "tensor": 2, "sequence_parallel": True, "micro_batch_size": 4},
    "dp2-interleaved": {
        "data": 2,
        "tensor": 1,
        "pipeline": 2,
        "virtual_stages": 2,
        "schedule": "interleaved",
        "micro_batch_size": 1,
    },
    "cp2-dp2": {**ONE, "data": 2, "context": 2, "micro_batch_size": 2},
    "pp4": {**ONE, "pipeline": 4, "micro_batch_size": 4},
}
USUAL = {("gpt2", "dp2-pp2-zero1")}
SIZES = (8, 5, 2)  # as planned; one that no axis divides; fewer micro-batches than stages


@pytest.fixture(autouse=True)
def nothing_rounds_to_float32() -> Iterator[None]:
    with float64_throughout():
        yield


def dropping(name: str, *, layers: int = 2) -> tuple[nn.Module, Any]:
    """In training mode with dropout wherever the model has some."""
    if name == "mixtral":
        model, batch, *_ = next(entry for entry in FAMILIES if entry.name == "Mixtral").build()
    else:
        build = {"gpt2": models.tiny_gpt2, "llama": models.tiny_llama, "nano": models.nano_gpt}[name]
        model, batch = build(layers=layers)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return in_double(model.train(), batch)


def alone(model: nn.Module, state: dict[str, Tensor], batch: Any) -> float:
    model = copy.deepcopy(model).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        output = model(**batch)
    return (output if isinstance(output, Tensor) else output.loss).item()


def first(batch: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    return {name: tensor[:samples] for name, tensor in batch.items()}


def members() -> list[Any]:
    every = [("gpt2", name) for name in STRATEGIES] + [("llama", "dp2-tp2-zero3-recompute"), ("llama", "cp2-dp2")]
    return [
        pytest.param(*member, id="-".join(member), marks=[] if member in USUAL else [pytest.mark.wide])
        for member in every
    ]


@pytest.mark.parametrize(("name", "strategy"), members())
def test_the_loss_is_the_single_process_s_after_eval_whatever_the_size(name: str, strategy: str) -> None:
    degrees = STRATEGIES[strategy]
    model, batch = dropping(name, layers=max(2, degrees["pipeline"] * degrees.get("virtual_stages", 1)))
    gpus = degrees["data"] * degrees["tensor"] * degrees["pipeline"] * degrees.get("context", 1)
    program = program_forced(model, batch, degrees, gpus=gpus)

    def work(rank: int, world: int) -> tuple[list[float], dict[str, Tensor]]:
        stepper = adamw(program.parameters())
        program.evaluate(batch)
        program.step(batch)
        stepper.step()  # and the evaluation sees what it did
        return [program.evaluate(first(batch, samples)) for samples in SIZES], program.state_dict()

    for losses, state in run_ranks(work, gpus):
        assert losses == pytest.approx([alone(model, state, first(batch, samples)) for samples in SIZES], rel=1e-10)


@pytest.mark.wide
def test_experts_are_evaluated_on_unequal_rows() -> None:
    model, batch = dropping("mixtral")
    program = program_forced(model, batch, {**ONE, "data": 2, "expert": 2}, gpus=2)
    samples = len(next(iter(batch.values()))) - 1
    found = run_ranks(lambda rank, world: program.evaluate(first(batch, samples)), 2)
    assert found == pytest.approx([alone(model, dict(model.state_dict()), first(batch, samples))] * 2, rel=1e-10)


def test_an_evaluation_between_steps_changes_nothing() -> None:
    model, batch = dropping("gpt2")
    program = program_forced(model, batch, {**ONE, "pipeline": 2, "micro_batch_size": 4}, gpus=2)

    def work(rank: int, world: int, evaluates: bool) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
        torch.manual_seed(0)
        losses = []
        for _ in range(2):
            losses.append(program.step(batch))
            if evaluates:
                program.evaluate(batch)
        return losses, program.gradients(), program.state_dict(), program.steps

    without, with_them = run_ranks(work, 2, False)[0], run_ranks(work, 2, True)[0]
    assert with_them[0] == without[0] and with_them[3] == 2
    for found, expected in zip(with_them[1:3], without[1:3], strict=True):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_batch_statistics_are_used_and_kept() -> None:
    model, batch = in_double(*models.batch_norm_cnn())
    captured = capture(model, batch)
    layers = build_layers(captured)
    program = Program(captured, hand_plan(layers, pipeline=2, micro_batch_size=8), layers, device="cpu")

    def work(rank: int, world: int) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
        program.step(batch)
        before = program.state_dict()
        return program.evaluate(batch), program.evaluate(first(batch, 3)), before, program.state_dict()

    for whole, part, before, after in run_ranks(work, 2):
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert whole == pytest.approx(alone(model, before, batch), rel=1e-10)
        assert part == pytest.approx(alone(model, before, first(batch, 3)), rel=1e-10)


def test_a_batch_with_too_few_samples_is_refused_with_the_legal_count() -> None:
    model, batch = models.nano_gpt(layers=1)
    program = program_forced(model, batch, {**ONE, "data": 2}, gpus=2)

    def work(rank: int, world: int) -> str:
        with pytest.raises(autoplan.StrategyError) as refused:
            program.evaluate(first(batch, 1))
        return refused.value.legal

    assert run_ranks(work, 2) == ["2 samples or more"] * 2


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x) + torch.randn_like(x), x)


def test_noise_of_the_model_s_own_is_refused_with_its_line() -> None:
    model, batch = in_double(Noisy(), {"x": torch.randn(4, 4)})
    program = autoplan.compile(model, gpus=1, example_inputs=batch, device="cpu")
    with pytest.raises(autoplan.StrategyError, match="draws random numbers") as refused:
        program.evaluate(batch)
    assert "test_evaluate.py" in refused.value.where


@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_lists_of_forwards_end_and_run_every_micro_batch_once(ranks: int, virtual_stages: int) -> None:
    for micro_batches in range(1, 3 * ranks + 2):
        stages = ranks * virtual_stages
        lists = forward_actions(stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)
        assert first_forward_problem(lists) is None
        assert sum(map(len, lists)) == stages * micro_batches


def test_what_is_wrong_with_a_list_of_forwards_is_said() -> None:
    assert first_forward_problem([[Action(0, "F", 0)], [Action(1, "F", 0)] * 2]) == "1F0 is there 2 times"
    assert (
        first_forward_problem([[Action(0, "F", 0), Action(0, "F", 1)], [Action(1, "F", 1)]]) == "1F0 is there 0 times"
    )
    late = [[Action(2, "F", 0), Action(0, "F", 0)], [Action(1, "F", 0)]]
    assert first_forward_problem(late) == "2F0, 1F0 wait on each other"


@pytest.mark.parametrize("data", [1, 2, 3])
def test_rows_are_shared_out_whole_and_in_equally_many_micro_batches(data: int) -> None:
    strategy = autoplan.Strategy(data=data, micro_batch_size=2, micro_batches=2)
    for batch in range(data, 20):
        shares = [uneven_rows(batch, strategy, rank) for rank in range(data)]
        assert [row for rows, _ in shares for row in rows] == list(range(batch))
        assert len({count for _, count in shares}) == 1
        assert all(1 <= shares[0][1] <= len(rows) for rows, _ in shares)
