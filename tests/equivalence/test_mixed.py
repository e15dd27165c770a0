"""A plan for kinds of different pace has uneven stages, and trains to the single process's numbers all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import autoplan
from autoplan.plan import Plan
from tests.support.models import tiny_gpt2
from tests.support.processes import run_ranks
from tests.support.training import Trained, assert_same_numbers, in_double, train_alone, train_program

GROUPS = """
[[groups]]
name = "fast"
device = "cpu"
gpus_per_node = {width}

[[groups]]
name = "slow"
gpus_per_node = {width}

[groups.device]
base = "cpu"
gemm_efficiency = 0.2
memory_bytes_per_s = 1e9
launch_s = 40e-6
"""


def trained(
    rank: int, world: int, model: nn.Module, batch: Any, cluster: str, forced: dict[str, Any]
) -> tuple[Plan, Trained]:
    program = autoplan.compile(model, gpus=cluster, example_inputs=batch, strategy=forced, device="cpu")
    return program.plan, train_program(program, [batch] * 2)


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_uneven_stages_train_to_the_single_process_numbers(tmp_path: Path, data: int) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(GROUPS.format(width=data))
    forced = {"data": data, "tensor": 1, "pipeline": 2, "micro_batch_size": 2}
    model, batch = in_double(*tiny_gpt2(layers=4))
    expected = train_alone(model, [batch] * 2)
    ranks = run_ranks(trained, 2 * data, model, batch, str(cluster), forced)
    plan = ranks[0][0]
    assert sorted(stage.device for stage in plan.stages) == ["fast", "slow"]
    layers = {stage.device: stage.last_layer - stage.first_layer + 1 for stage in plan.stages}
    assert layers["fast"] > layers["slow"]
    for _, found in ranks:
        assert_same_numbers(found, expected)
