"""Stages that no cut of the traced order gives train to the single process's numbers, and compile finds such stages.

Real gloo processes, float64; see :mod:`tests.equivalence.test_training` for the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import autoplan
from autoplan.capture import Capture
from autoplan.layers import LayerGraph, build_layers
from autoplan.layers.order import in_order_of, reordered
from autoplan.plan import Plan
from autoplan.runtime import Program
from tests.support.branching_models import encoder_decoder, two_towers, unet
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks
from tests.support.training import assert_same_numbers, capture_double, in_double, train_alone, train_program

STEPS = 2


def by_hand(rank: int, world: int, captured: Capture, plan: Plan, layers: LayerGraph, batch: Any) -> Any:
    return train_program(Program(captured, plan, layers, device="cpu"), [batch] * STEPS)


def compiled(rank: int, world: int, model: nn.Module, batch: Any, strategy: dict[str, Any]) -> Any:
    program = autoplan.compile(model, gpus=world, example_inputs=batch, strategy=strategy, device="cpu")
    return program.plan.model.layers, train_program(program, [batch] * STEPS)


# Of each model the stages as layers of the traced order, none of them a run of it.
CASES = [
    pytest.param(unet, [{0, 2}, {1, *range(3, 11)}], id="unet-pp2", marks=pytest.mark.wide),
    pytest.param(unet, [{2}, {0, 1, 3, 4, 5}, {*range(6, 11)}], id="unet-pp3"),
    pytest.param(two_towers, [{0, 1, 2, 5, 6}, {3, 4, 7, 8, 9, 10}], id="two-towers-pp2"),
    pytest.param(two_towers, [{5, 6, 7, 8, 9}, {0, 1, 2, 3, 4}, {10}], id="two-towers-pp3", marks=pytest.mark.wide),
    pytest.param(encoder_decoder, [{0, 1, 4}, {2, 3, 5}, {6, 7, 8}], id="encoder-decoder-pp3", marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("build", "stages"), CASES)
def test_any_convex_stages_train_to_the_single_process_numbers(
    build: Callable[[], tuple[nn.Module, Any]], stages: list[set[int]]
) -> None:
    model, batch, captured = capture_double(*build())
    layers = build_layers(captured)
    order = [layer for stage in stages for layer in sorted(stage)]
    assert order != sorted(order)
    cuts = tuple(sum(len(stage) for stage in stages[: k + 1]) for k in range(len(stages) - 1))
    plan = hand_plan(
        reordered(layers, order), cuts=cuts, pipeline=len(stages), micro_batch_size=2, micro_batches=4, schedule="1f1b"
    )
    expected = train_alone(model, [batch] * STEPS)
    for found in run_ranks(by_hand, len(stages), captured, plan, layers, batch):
        assert_same_numbers(found, expected)


@pytest.mark.parametrize("pipeline", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_compile_cuts_across_the_towers(pipeline: int) -> None:
    model, batch = in_double(*two_towers(features=64, layers=(4, 2) if pipeline == 2 else (4, 4), bags=True))
    strategy = {"data": 1, "tensor": 1, "pipeline": pipeline, "micro_batch_size": 2, "schedule": "1f1b"}
    expected = train_alone(model, [batch] * STEPS)
    for names, found in run_ranks(compiled, pipeline, model, batch, strategy):
        layers = build_layers(capture_double(model, batch)[2])
        assert names != tuple(layer.name for layer in layers.layers)
        assert tuple(layer.name for layer in in_order_of(layers, names).layers) == names
        assert_same_numbers(found, expected)
