"""Programs of compiled plans: their stages run under torch.compile, to the single process's numbers.

``aot_eager`` traces, partitions and functionalises as inductor does, without its code generation: float64 stays exact.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import autoplan
from autoplan.passes import compile_pieces
from autoplan.runtime import Program
from tests.support.models import nano_gpt
from tests.support.processes import run_ranks
from tests.support.training import assert_same_numbers, in_double, train_alone, train_program

STRATEGIES = [
    (1, {"micro_batch_size": 2, "recompute": "full"}),
    (2, {"tensor": 2, "micro_batch_size": 2}),
    (2, {"data": 2, "zero_stage": 3, "micro_batch_size": 2}),
    (2, {"pipeline": 2, "schedule": "zero_bubble", "micro_batch_size": 1}),
    (4, {"data": 2, "pipeline": 2, "micro_batch_size": 1}),
]


def run(rank: int, world: int, program: Program, batch: Any) -> Any:
    counters.clear()
    return train_program(program, [batch] * 2), counters["stats"]["unique_graphs"], program.evaluate(batch)


@pytest.mark.parametrize(("gpus", "strategy"), STRATEGIES, ids=str)
def test_compiled_stages_train_to_the_same_numbers(
    gpus: int, strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_pieces, "BACKEND", "aot_eager")
    model, batch = in_double(*nano_gpt())
    expected = train_alone(model, [batch] * 2)
    program = autoplan.compile(model, gpus=gpus, example_inputs=batch, strategy=strategy, device="cpu", compiled=True)
    for found, graphs, loss in run_ranks(run, gpus, program, batch):
        assert_same_numbers(found, expected)
        assert graphs > 0
        assert loss < expected.losses[0]


COMPILING_S, PATIENCE_S = 6.0, 4.0


def late(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A compiler that takes longer than the ranks of the other stages would wait for work."""
    if not LATE:
        LATE.append(graph)
        time.sleep(COMPILING_S)
    return graph.forward


LATE: list[Any] = []


@pytest.mark.parametrize("strategy", [{"pipeline": 2, "micro_batch_size": 1}, {"tensor": 2}], ids=str)
def test_ranks_wait_for_one_that_compiles(strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pieces, "BACKEND", late)
    model, batch = in_double(*nano_gpt())
    program = autoplan.compile(model, gpus=2, example_inputs=batch, strategy=strategy, device="cpu", compiled=True)

    def step(rank: int, world: int) -> float:
        LATE.extend([program] if rank else [])  # the first rank alone is late
        return program.step(batch)

    first, second = run_ranks(step, 2, timeout_s=PATIENCE_S)
    assert first == second == pytest.approx(model(**batch).item(), rel=1e-10)


class Noisy(nn.Module):
    """Random numbers, and statistics that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.wide)])
def test_statistics_and_random_numbers_are_those_of_eager_mode(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pieces, "BACKEND", backend)
    found = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model, batch = Noisy().double(), {"x": torch.randn(16, 6, dtype=torch.float64)}
        program = autoplan.compile(model, gpus=1, example_inputs=batch, device="cpu", compiled=compiled)
        torch.manual_seed(1)
        found[compiled] = train_program(program, [batch] * 3)
    assert_same_numbers(found[True], found[False])
