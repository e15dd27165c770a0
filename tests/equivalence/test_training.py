"""Promise 1: a compiled program trains to the single process's loss, gradients and weights.

Real gloo processes, float64, three AdamW steps, losses that ignore an uneven share of the labels. Every gradient of
every step and every weight after the last step is compared, never the loss alone, within
1e-10 x (norm of the tensor + learning rate x square root of its size).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.request import Traced
from autoplan.runtime import Program
from tests.support import models
from tests.support.processes import run_ranks
from tests.support.training import in_double, program_forced, program_planned, traced

LEARNING_RATE = 1e-2
STEPS = 3

MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": models.tiny_gpt2,
    "llama": models.tiny_llama,
    "nanogpt": models.nano_gpt,
    "t5": models.tiny_t5,
    "cnn": models.small_cnn,
}

STRATEGIES: dict[str, dict[str, Any]] = {
    "dp2": {"data": 2, "tensor": 1, "pipeline": 1},
    "mp2": {"data": 1, "tensor": 1, "pipeline": 2, "micro_batch_size": 8},
    "pp2-gpipe": {"data": 1, "tensor": 1, "pipeline": 2, "micro_batch_size": 2, "schedule": "gpipe"},
    "pp2-1f1b": {"data": 1, "tensor": 1, "pipeline": 2, "micro_batch_size": 2, "schedule": "1f1b"},
    "tp2": {"data": 1, "tensor": 2, "pipeline": 1},
    "pp2-tp2": {"data": 1, "tensor": 2, "pipeline": 2, "micro_batch_size": 2},
    "dp2-tp2": {"data": 2, "tensor": 2, "pipeline": 1, "micro_batch_size": 2},
    "dp2-pp2-tp2": {"data": 2, "tensor": 2, "pipeline": 2, "micro_batch_size": 2},
    "dp2-zero1": {"data": 2, "tensor": 1, "pipeline": 1, "zero_stage": 1},
    "dp2-pp2-recompute": {"data": 2, "tensor": 1, "pipeline": 2, "micro_batch_size": 1, "recompute": "full"},
    "pp2-tp2-selective": {
        "data": 1,
        "tensor": 2,
        "pipeline": 2,
        "micro_batch_size": 2,
        "recompute": "selective",
    },
    "tp2-recompute": {"data": 1, "tensor": 2, "pipeline": 1, "micro_batch_size": 2, "recompute": "full"},
    "dp2-pp2-zero3": {"data": 2, "tensor": 1, "pipeline": 2, "micro_batch_size": 1, "zero_stage": 3},
    "dp2-tp2-zero3-recompute": {
        "data": 2,
        "tensor": 2,
        "pipeline": 1,
        "micro_batch_size": 2,
        "zero_stage": 3,
        "recompute": "full",
    },
    "dp2-pp2-zero2": {"data": 2, "tensor": 1, "pipeline": 2, "micro_batch_size": 1, "zero_stage": 2},
    "pp2-tp2-sequence": {"data": 1, "tensor": 2, "pipeline": 2, "micro_batch_size": 2, "sequence_parallel": True},
}

# Schedules that put several stages on a rank or split backwards, beside other axes and savers.
_SCHEDULES: dict[str, dict[str, Any]] = {
    "pp2v2": {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved", "micro_batch_size": 1},
    "pp2-zero-bubble": {"pipeline": 2, "schedule": "zero_bubble", "micro_batch_size": 1},
}
_BESIDE: dict[str, dict[str, Any]] = {
    "": {"data": 1, "tensor": 1},
    "-recompute": {"data": 1, "tensor": 1, "recompute": "full"},
    "-tp2": {"data": 1, "tensor": 2},
    "-dp2-zero1": {"data": 2, "tensor": 1, "zero_stage": 1},
    "-dp2-zero3-recompute": {"data": 2, "tensor": 1, "zero_stage": 3, "recompute": "full"},
    "-dp2-tp2-zero2-recompute": {"data": 2, "tensor": 2, "zero_stage": 2, "recompute": "full"},
}
SCHEDULED = {
    f"{name}{beside}": {**keys, **others} for name, keys in _SCHEDULES.items() for beside, others in _BESIDE.items()
}
STRATEGIES |= SCHEDULED
DEFAULT_SCHEDULED = {
    ("gpt2", "pp2v2"),
    ("llama", "pp2-zero-bubble-recompute"),
    ("gpt2", "pp2-zero-bubble-dp2-zero1"),
    ("llama", "pp2v2-tp2"),
}

# Memory savers: these models by default, the others in the wide matrix.
DEFAULT_SAVERS = {("gpt2", "dp2-pp2-recompute"), ("llama", "tp2-recompute"), ("gpt2", "dp2-tp2-zero3-recompute")}
DEFAULT_SAVERS |= {("llama", "pp2-tp2-sequence")}


def _matrix_model(strategy: str) -> str:
    """The models take turns in the matrix of schedules."""
    return ("gpt2", "llama")[list(SCHEDULED).index(strategy) % 2]


def _is_wide(model: str, strategy: str) -> bool:
    if strategy in SCHEDULED:
        return (model, strategy) not in DEFAULT_SCHEDULED
    degrees = STRATEGIES[strategy]
    saver = "recompute" in degrees or degrees.get("zero_stage") == 3 or "sequence_parallel" in degrees
    return saver and (model, strategy) not in DEFAULT_SAVERS


CASES = [
    pytest.param(
        model, strategy, id=f"{model}-{strategy}", marks=[pytest.mark.wide] if _is_wide(model, strategy) else []
    )
    for model in MODELS
    for strategy, degrees in STRATEGIES.items()
    if not (model == "cnn" and degrees["tensor"] > 1)  # convolutions: pipeline and data only
    if strategy not in SCHEDULED or (model, strategy) in DEFAULT_SCHEDULED or model == _matrix_model(strategy)
]


@dataclass(frozen=True)
class Trained:
    """What three steps left behind, by the user's names."""

    losses: list[float]
    gradients: list[Mapping[str, Tensor]]
    weights: Mapping[str, Tensor]


def single_process(model: nn.Module, batch: Any) -> Trained:
    """The original, trained as its user would."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return Trained(losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


@functools.cache
def prepared(name: str) -> tuple[Any, Traced, Trained]:
    """A batch, the model as traced, and what training it alone leaves behind."""
    model, batch = in_double(*MODELS[name]())
    return batch, traced(model, batch), single_process(model, batch)


def train(rank: int, world: int, program: Program, batch: Any) -> Trained:
    """Three steps on one rank, gathered."""
    optimizer = torch.optim.AdamW(program.parameters(), lr=LEARNING_RATE)
    losses, gradients = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(program.step(batch))
        gradients.append(program.gradients())
        optimizer.step()
    return Trained(losses, gradients, program.state_dict())


def compile_and_train(rank: int, world: int, model: nn.Module, batch: Any, strategy: dict[str, Any]) -> Trained:
    program = program_forced(model, batch, strategy, gpus=world)
    assert_recomputes(program, strategy)
    return train(rank, world, program, batch)


def assert_recomputes(program: Program, strategy: dict[str, Any]) -> None:
    policies = {policy for stage in program.plan.stages for policy in stage.layer_recompute}
    assert policies == {strategy.get("recompute", "none")}


def assert_equal(name: str, found: Tensor, expected: Tensor) -> None:
    bound = 1e-10 * (expected.norm().item() + LEARNING_RATE * math.sqrt(expected.numel()))
    difference = (found - expected).norm().item()
    assert difference <= bound, f"{name}: differs by {difference:.3e}, allowed {bound:.3e}"


def assert_same(ranks: list[Trained], expected: Trained) -> None:
    for rank, found in enumerate(ranks):
        for step in range(STEPS):
            assert found.losses[step] == pytest.approx(expected.losses[step], rel=1e-10), (rank, step)
            for name, gradient in expected.gradients[step].items():
                assert_equal(f"rank {rank}, step {step}, gradient of {name}", found.gradients[step][name], gradient)
        for name, weight in expected.weights.items():
            assert_equal(f"rank {rank}, weight {name}", found.weights[name], weight)


def world_of(strategy: dict[str, Any]) -> int:
    return strategy["data"] * strategy["tensor"] * strategy["pipeline"]


@pytest.mark.parametrize(("model_name", "strategy_name"), CASES)
def test_program_trains_to_the_single_process_numbers(model_name: str, strategy_name: str) -> None:
    batch, model, alone = prepared(model_name)
    strategy = STRATEGIES[strategy_name]
    program = program_planned(model, strategy, gpus=world_of(strategy))
    assert_recomputes(program, strategy)
    assert_same(run_ranks(train, world_of(strategy), program, batch), alone)


@pytest.mark.parametrize(("model_name", "strategy_name"), [("nanogpt", "dp2-pp2-tp2"), ("llama", "dp2-zero1")])
def test_a_program_that_every_rank_compiles_trains_to_the_single_process_numbers(
    model_name: str, strategy_name: str
) -> None:
    """As under torchrun: the ranks find the same plan, each by itself."""
    model, batch = in_double(*MODELS[model_name]())
    strategy = STRATEGIES[strategy_name]
    ranks = run_ranks(compile_and_train, world_of(strategy), model, batch, strategy)
    assert_same(ranks, single_process(model, batch))
