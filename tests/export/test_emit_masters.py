"""Emitted programs of bf16 models train with float32 masters where the plan's precision counts them, as the runtime
does: the same operators on the same values in the same order, so the very same numbers. Under ZeRO-3 the sums of a
parameter's 16-bit gradients are grouped by block, and differ in their last bits."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.runtime import Program
from tests.support import models
from tests.support.emitted import run_emitted
from tests.support.processes import run_ranks
from tests.zoo.families import FAMILIES

STEPS = 4
LEARNING_RATE = 1e-3  # steps of a thousandth are lost in bf16 weights near one, and not in their masters
ALONE: dict[str, Any] = {"data": 1, "tensor": 1, "pipeline": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "one": ALONE,
    "dp2": {**ALONE, "data": 2, "micro_batch_size": 2},
    "dp2-zero1": {**ALONE, "data": 2, "micro_batch_size": 2, "zero_stage": 1},
    "dp2-zero2": {**ALONE, "data": 2, "micro_batch_size": 2, "zero_stage": 2},
    "dp2-zero3": {**ALONE, "data": 2, "micro_batch_size": 2, "zero_stage": 3},
    "ep2-zero1": {**ALONE, "data": 2, "expert": 2, "zero_stage": 1},
}
DEFAULT = ("dp2-zero1", "dp2-zero3")
CASES = [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.wide]) for name in STRATEGIES]


def built(strategy: dict[str, Any]) -> tuple[nn.Module, Any]:
    if "expert" in strategy:
        return next(entry for entry in FAMILIES if entry.name == "Mixtral").build()[:2]
    return models.tiny_gpt2(layers=2)


def compiled(strategy: dict[str, Any], precision: str) -> tuple[Program, Any]:
    model, batch = built(strategy)
    program = autoplan.compile(
        copy.deepcopy(model).to(torch.bfloat16),
        gpus=strategy["data"],
        example_inputs=batch,
        strategy=strategy,
        precision=precision,
        device="cpu",
    )
    return program, batch


def train(program: Any, batch: Any) -> tuple[list[float], list[torch.dtype]]:
    """``program``: the runtime's or the folder's, which have the same steps."""
    parameters = list(program.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(program.step(batch))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [parameter.dtype for parameter in parameters]


def of_runtime(rank: int, ranks: int, program: Program, batch: Any) -> Any:
    losses, dtypes = train(program, batch)
    return losses, dtypes, program.state_dict()


def of_folder(folder: Path, batch: dict[str, Tensor]) -> Any:
    program = importlib.import_module("program").Program(folder / "weights")
    losses, dtypes = train(program, batch)
    program.save(folder / "trained")
    return losses, dtypes


def saved(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.pt")):
        found |= torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("strategy_name", CASES)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("bf16-pure", marks=pytest.mark.wide)])
def test_it_trains_to_the_runtimes_very_numbers(precision: str, strategy_name: str, tmp_path: Path) -> None:
    strategy = STRATEGIES[strategy_name]
    program, batch = compiled(strategy, precision)
    folder = program.emit(tmp_path / "emitted")

    found = run_ranks(run_emitted, strategy["data"], folder, batch, of_folder)
    expected = run_ranks(of_runtime, strategy["data"], program, batch)

    wide = torch.float32 if precision == "bf16" else torch.bfloat16
    weights = expected[0][2]
    for (losses, dtypes), (their_losses, their_dtypes, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(their_losses, rel=1e-4 if strategy.get("zero_stage") == 3 else 1e-6)
        assert set(dtypes) == set(their_dtypes) == {wide}
    trained = saved(folder / "trained")
    for name, weight in weights.items():
        if name in trained:
            # Both rounded to bf16. A gradient that is zero but for rounding (a key's bias) Adam steps by all the same.
            noise = 0.2 * STEPS * LEARNING_RATE * weight.numel() ** 0.5 if strategy.get("zero_stage") == 3 else 0.0
            difference = (trained[name].float() - weight.float()).norm()
            assert difference <= 2**-8 * weight.float().norm() + noise, name
            assert trained[name].dtype == (wide if weight.is_floating_point() else weight.dtype)


def test_masters_are_saved_and_go_on_from_there(tmp_path: Path) -> None:
    program, batch = compiled(STRATEGIES["dp2-zero1"], "bf16")
    folder = program.emit(tmp_path / "emitted")

    def again(folder: Path, batch: dict[str, Tensor]) -> bool:
        made = importlib.import_module("program").Program
        first = made(folder / "weights")
        train(first, batch)
        first.save(folder / "trained")
        second = made(folder / "trained")
        return all(map(torch.equal, first.parameters(), second.parameters()))

    assert run_ranks(run_emitted, 2, folder, batch, again) == [True, True]
