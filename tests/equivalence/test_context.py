"""Promise 1 under the context axis: positions dealt out over ranks train to the single process's numbers.

As in :mod:`tests.equivalence.test_training`: gloo processes, float64, two AdamW steps, 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from autoplan.runtime import Program
from tests.support import models
from tests.support.processes import run_ranks
from tests.support.training import assert_same_numbers, in_double, program_forced, train_alone, train_program

STEPS = 2
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": lambda: models.tiny_gpt2(layers=2),
    "llama": lambda: models.tiny_llama(layers=2),
    "nanogpt": lambda: models.nano_gpt(layers=2),
}
ALONE = {"data": 1, "tensor": 1, "pipeline": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "cp2": {**ALONE, "context": 2},
    "cp4": {**ALONE, "context": 4},
    "cp2-dp2-zero1": {**ALONE, "context": 2, "data": 2, "zero_stage": 1},
    "cp2-pp2": {**ALONE, "context": 2, "pipeline": 2, "micro_batch_size": 2},
    "cp2-tp2": {**ALONE, "context": 2, "tensor": 2},
    "cp2-recompute": {**ALONE, "context": 2, "micro_batch_size": 4, "recompute": "full"},
}
DEFAULT = {("llama", "cp2")}
WIDE = {  # the models take turns
    ("gpt2", "cp2-pp2"),
    ("nanogpt", "cp2"),
    ("llama", "cp4"),
    ("gpt2", "cp2-dp2-zero1"),
    ("llama", "cp2-tp2"),
    ("gpt2", "cp2-recompute"),
}
CASES = [
    pytest.param(*case, id="-".join(case), marks=[] if case in DEFAULT else [pytest.mark.wide])
    for case in sorted(DEFAULT | WIDE)
]


def trained(rank: int, world: int, program: Program, batch: Any) -> Any:
    return train_program(program, [batch] * STEPS)


@pytest.mark.parametrize(("model_name", "strategy_name"), CASES)
def test_positions_over_ranks_train_to_the_single_process_numbers(model_name: str, strategy_name: str) -> None:
    model, batch = in_double(*MODELS[model_name]())
    strategy = STRATEGIES[strategy_name]
    expected = train_alone(model, [batch] * STEPS)
    world = strategy["data"] * strategy["tensor"] * strategy["pipeline"] * strategy["context"]
    program = program_forced(model, batch, strategy, gpus=world)
    for found in run_ranks(trained, world, program, batch):
        assert_same_numbers(found, expected)
