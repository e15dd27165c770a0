"""Promise 1 under the expert axis: experts spread over data ranks train to the single process's numbers.

As in :mod:`tests.equivalence.test_context`, for the mixtures of experts of transformers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.runtime import Program
from autoplan.runtime.checkpoints import Checkpoints
from tests.support.processes import run_ranks
from tests.support.training import (
    LEARNING_RATE,
    MAX_NORM,
    assert_close,
    assert_same_numbers,
    in_double,
    program_forced,
    train_alone,
    train_program,
)
from tests.zoo.families import FAMILIES

STEPS = 2
ALONE = {"tensor": 1, "pipeline": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ep2": {**ALONE, "data": 2, "expert": 2},
    "ep4": {**ALONE, "data": 4, "expert": 4},
    "dp4-ep2-zero1": {**ALONE, "data": 4, "expert": 2, "zero_stage": 1},
    "ep2-pp2-recompute": {
        "tensor": 1,
        "data": 2,
        "pipeline": 2,
        "expert": 2,
        "micro_batch_size": 1,
        "recompute": "full",
    },
}
DEFAULT = {("Mixtral", "ep2")}
WIDE = {
    ("Qwen3-MoE", "ep2"),
    ("DeepSeek-V3", "ep4"),
    ("Mixtral", "ep4"),
    ("Mixtral", "dp4-ep2-zero1"),
    ("Qwen3-MoE", "ep2-pp2-recompute"),
}
CASES = [
    pytest.param(*case, id="-".join(case), marks=[] if case in DEFAULT else [pytest.mark.wide])
    for case in sorted(DEFAULT | WIDE)
]


def trained(rank: int, world: int, program: Program, batch: Any) -> Any:
    held = {name: tuple(parameter.shape) for name, parameter in program.named_parameters()}
    return train_program(program, [batch] * STEPS), held


@pytest.mark.parametrize(("family", "strategy_name"), CASES)
def test_experts_over_ranks_train_to_the_single_process_numbers(family: str, strategy_name: str) -> None:
    built = next(entry for entry in FAMILIES if entry.name == family).build()
    model, batch = in_double(*built[:2])
    strategy = STRATEGIES[strategy_name]
    expected = train_alone(model, [batch] * STEPS)
    world = strategy["data"] * strategy["pipeline"]
    program = program_forced(model, batch, strategy, gpus=world)
    for found, held in run_ranks(trained, world, program, batch):
        assert_same_numbers(found, expected)
        for name, shape in held.items():
            if ".experts." in name and not strategy.get("zero_stage"):
                assert shape[0] == model.get_parameter(name).shape[0] // strategy["expert"]


def resumed(rank: int, world: int, model: nn.Module, batch: Any, root: Path, plans: list[dict[str, Any]]) -> Any:
    """A step under each plan in turn, from the checkpoint that the one before left; the last one's weights."""
    for step, strategy in enumerate(plans):
        program = autoplan.compile(
            copy.deepcopy(model), gpus=world, example_inputs=batch, strategy=strategy, device="cpu"
        )
        optimizer = torch.optim.AdamW(program.parameters(), lr=LEARNING_RATE)
        checkpoints = Checkpoints(root, program, optimizer)
        if step:
            checkpoints.resume()
        optimizer.zero_grad()
        program.step(batch)
        program.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        checkpoints.save(step + 1)
        checkpoints.wait()
    return program.state_dict()


@pytest.mark.wide
def test_a_checkpoint_holds_whole_experts(tmp_path: Path) -> None:
    """From spread experts to whole ones with sharded state, and back."""
    built = next(entry for entry in FAMILIES if entry.name == "Mixtral").build()
    model, batch = in_double(*built[:2])
    whole = {**ALONE, "data": 2, "zero_stage": 1}
    plans = [STRATEGIES["ep2"], whole, STRATEGIES["ep2"]]
    expected = train_alone(model, [batch] * len(plans)).weights
    for found in run_ranks(resumed, 2, model, batch, tmp_path, plans):
        for name, weight in expected.items():
            assert_close(name, found[name], weight)
