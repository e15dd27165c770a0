"""Run an emitted folder as on a machine without autoplan, and compare it with the model alone."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.capture import gather_inputs
from autoplan.runtime import Program
from autoplan.verification.precision import float64_throughout
from tests.support.processes import run_ranks
from tests.support.training import in_double

LEARNING_RATE = 1e-2
STEPS = 3

_ABSENT = ("autoplan", "transformers")


class _NoAutoplan(MetaPathFinder):
    """As on a machine without autoplan and transformers."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.split(".")[0] in _ABSENT:
            raise ModuleNotFoundError(f"an emitted program imports {name}")


def run_emitted(
    rank: int, ranks: int, folder: Path, batch: dict[str, Tensor], train: Callable[..., Any] | None = None
) -> Any:
    """``train(folder, batch)`` of the folder's program in this forked rank: three steps unless given, whose weights go
    to ``folder/trained``. What widens this test's floats stays, for torch.compile looks it up where it was defined."""
    gone = [name for name in sys.modules if name.split(".")[0] in _ABSENT and name != float64_throughout.__module__]
    known = {name: sys.modules.pop(name) for name in gone}
    sys.meta_path.insert(0, _NoAutoplan())
    sys.path.insert(0, str(folder))
    try:
        return (train or train_emitted)(folder, batch)
    finally:  # the rank reports with autoplan's own errors
        sys.meta_path.pop(0)
        sys.modules.update(known)


def train_emitted(folder: Path, batch: dict[str, Tensor], compiler: str | None = None) -> list[float]:
    program = importlib.import_module("program").Program(folder / "weights", compiler=compiler)
    optimizer = torch.optim.AdamW(program.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        losses.append(program.step(batch))
        optimizer.step()
        optimizer.zero_grad()
    program.save(folder / "trained")
    return losses


def single_process(model: nn.Module, batch: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def compiled(build: Callable[[], tuple[nn.Module, Any]], strategy: dict[str, Any]) -> tuple[Any, nn.Module, Any]:
    model, batch = in_double(*build())
    gpus = strategy["data"] * strategy["tensor"] * strategy["pipeline"] * strategy.get("context", 1)
    program = autoplan.compile(
        copy.deepcopy(model), gpus=gpus, example_inputs=batch, strategy=dict(strategy), device="cpu"
    )
    return program, model, batch


def assert_trains_alike(program: Program, model: nn.Module, batch: Any, folder: Path) -> None:
    """Emit ``program`` to ``folder`` and train it there: to the losses and weights of ``model`` alone, at 1e-10."""
    program.emit(folder)
    names = [spec.placeholder for spec in program._capture.inputs]
    inputs = dict(zip(names, gather_inputs(program._capture, batch), strict=True))
    expected_losses, expected = single_process(model, batch)

    losses = run_ranks(run_emitted, program.plan.gpus, folder, inputs)

    for of_rank in losses:
        assert of_rank == pytest.approx(expected_losses, rel=1e-10)
    found: dict[str, Tensor] = {}
    for file in sorted((folder / "trained").glob("*.pt")):
        found |= torch.load(file, weights_only=True)
    trained = {name for name, _ in model.named_parameters()}
    assert trained <= set(found)
    for name in trained:
        bound = 1e-10 * (expected[name].norm() + LEARNING_RATE * expected[name].numel() ** 0.5)
        assert (found[name] - expected[name]).norm() <= bound, name
