"""What users see when a rank fails in a step, when no ranks are there, and when a plan cannot run."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.errors import AutoplanError, RuntimeFault, StrategyError
from autoplan.runtime import Program, RankFault
from tests.support import models
from tests.support.plans import hand_plan, one_layer_a_node
from tests.support.processes import run_ranks
from tests.support.training import program_of


class Late(nn.Module):
    """The table is read in the last stage: an index past its end fails there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return (torch.tanh(self.first(x)) * self.table(ids)).sum(-1).mean()


def late_batch(bad_row: int | None = None) -> dict[str, Tensor]:
    ids = torch.zeros(4, dtype=torch.int64)
    if bad_row is not None:
        ids[bad_row] = 99
    return {"x": torch.ones(4, 4), "ids": ids}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_fault_names_rank_step_stage_micro_batch_operator_and_the_users_line(recompute: str) -> None:
    captured = capture(Late(), late_batch())
    program = program_of(captured, cuts=(2,), pipeline=2, micro_batch_size=1, micro_batches=4, recompute=(recompute,))

    def train(rank: int, world: int) -> None:
        program.step(late_batch())
        program.step(late_batch(bad_row=2))

    started = time.monotonic()
    with pytest.raises(RuntimeFault) as caught:
        run_ranks(train, 2)
    assert time.monotonic() - started < 30.0
    fault = caught.value
    assert isinstance(fault, RankFault)
    assert (fault.rank, fault.step, fault.stage, fault.micro_batch) == (1, 1, 1, 2)
    assert fault.action == "forward"
    text = str(fault)
    assert "rank 1, step 1, stage 1, micro-batch 2, forward, operator `embedding`" in text
    assert "index out of range" in text
    assert "test_faults.py" in fault.where
    assert "self.table(ids)" in fault.where
    assert "Traceback" in fault.traceback_text


def test_a_step_without_ranks_says_how_to_launch() -> None:
    model, batch = models.mlp()
    program = program_of(capture(model, batch), gpus=4, data=4, micro_batch_size=2)
    with pytest.raises(RuntimeFault) as caught:
        program.step(batch)
    for way in (
        "torchrun --nproc-per-node 4 script.py",
        "autoplan run script.py --gpus 4 --device cpu",
        'autoplan.launch(train, gpus=4, device="cpu")',
    ):
        assert way in str(caught.value)


def test_another_number_of_ranks_than_planned_is_refused() -> None:
    model, batch = models.mlp()
    program = program_of(capture(model, batch), data=4, micro_batch_size=2)
    with pytest.raises(StrategyError, match="the plan is for 4 GPUs and 2 processes are running"):
        run_ranks(lambda rank, world: program.step(batch), 2)


def test_a_model_on_meta_can_be_planned_and_not_run() -> None:
    with torch.device("meta"):
        model = models.MLP()
        batch = {"x": torch.empty(8, 16), "y": torch.empty(8, 16)}
    program = program_of(capture(model, batch), micro_batch_size=8)
    with pytest.raises(StrategyError, match="on `meta` and have no values"):
        program.step({"x": torch.zeros(8, 16), "y": torch.zeros(8, 16)})


def test_a_batch_that_does_not_divide_is_refused_before_anything_runs() -> None:
    model, batch = models.mlp(samples=9)
    program = program_of(capture(model, batch), data=2, micro_batch_size=4)
    with pytest.raises(StrategyError, match="9 samples does not divide over 2") as caught:
        run_ranks(lambda rank, world: program.step(batch), 2)
    assert "8 or 10" in caught.value.legal


def test_local_batches_of_unequal_size_are_refused_on_every_rank() -> None:
    model, batch = models.mlp()
    program = program_of(capture(model, batch), data=2, micro_batch_size=4)

    def message(rank: int, world: int) -> str:
        try:
            program.step({name: tensor[: 3 + rank] for name, tensor in batch.items()}, local=True)
        except StrategyError as error:
            return error.what
        return ""

    assert run_ranks(message, 2) == ["the ranks' own batches have 3 to 4 samples"] * 2


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"data": 2, "zero_stage": 4}, "zero_stage = 4 cannot be executed"),
        ({"virtual_stages": 2}, "virtual_stages = 2"),
        ({"context": 2}, "context 2 splits the sequence"),
        ({"schedule": "looped_bfs"}, "schedule 'looped_bfs'"),
    ],
)
def test_what_cannot_be_executed_is_refused_when_it_is_compiled(strategy: dict[str, Any], message: str) -> None:
    model, batch = models.mlp()
    with pytest.raises(StrategyError, match=message):
        program_of(capture(model, batch), **strategy)


def test_a_plan_that_recomputes_some_layers_must_say_which() -> None:
    model, batch = models.mlp()
    captured = capture(model, batch)
    layers = one_layer_a_node(captured)
    plan = hand_plan(layers)
    stages = tuple(dataclasses.replace(stage, recompute={"full": 1, "none": 1}) for stage in plan.stages)
    with pytest.raises(StrategyError, match="recomputes"):
        Program(captured, dataclasses.replace(plan, stages=stages), layers)


def test_a_batch_whose_samples_meet_is_not_split() -> None:
    model, batch = models.batch_norm_cnn()
    with pytest.raises(StrategyError, match="makes samples of a batch meet"):
        program_of(capture(model, batch), data=2, micro_batch_size=4)


def test_stages_that_leave_layers_out_are_refused() -> None:
    model, batch = models.mlp()
    captured = capture(model, batch)
    layers = one_layer_a_node(captured)
    plan = hand_plan(layers, pipeline=2, micro_batch_size=8)
    gap = dataclasses.replace(plan, stages=(plan.stages[0], dataclasses.replace(plan.stages[1], first_layer=99)))
    with pytest.raises(AutoplanError, match="stage 1 starts at layer 99"):
        Program(captured, gap, layers, device="cpu")


def test_code_shows_any_ranks_program_without_ranks() -> None:
    model, batch = models.nano_gpt(layers=2)
    program = program_of(capture(model, batch), gpus=5, data=2, pipeline=2, micro_batch_size=1, micro_batches=4)
    first, last = program.code(0), program.code(3)
    assert "Rank 0 of 4: stage 0, data rank 0" in first
    assert "Schedule 1f1b: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3" in first
    assert "sends" in first and "receives" not in first
    assert "sums the gradient of" in first
    assert "receives" in last and "sends" not in last
    assert "cross_entropy" in last and "cross_entropy" not in first
    assert program.code(4) == "# Rank 4 is idle: the plan uses 4 of 5 GPUs.\n"
    with pytest.raises(StrategyError, match="no rank 5"):
        program.code(5)
    compile(first, "stage", "exec")
