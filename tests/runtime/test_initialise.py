"""Models built without values: each rank makes its own part, and all plans begin with the same weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.errors import StrategyError
from autoplan.layers import build_layers
from autoplan.runtime import Program
from tests.support import models
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 8},
    "dp2-tp2-zero3": {"data": 2, "tensor": 2, "micro_batch_size": 4, "zero_stage": 3},
    "dp2-pp2-zero1": {"data": 2, "pipeline": 2, "micro_batch_size": 4, "zero_stage": 1},
}


@functools.cache
def empty_gpt() -> tuple[nn.Module, Any, Capture]:
    with autoplan.empty_weights():
        model, batch = models.nano_gpt(layers=2)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model, batch, capture(model, batch)


def planned(captured: Capture, name: str) -> Program:
    layers = build_layers(captured)
    plan = hand_plan(layers, **PLANS[name])
    return Program(captured, plan, layers, cluster=Cluster.parse(f"{plan.gpus}xcpu"), device="cpu")


def on_ranks(program: Program, fn: Any) -> Any:
    return run_ranks(lambda rank, world: fn(), program.plan.gpus)[-1] if program.plan.gpus > 1 else fn()


def initialised(name: str, seed: int) -> dict[str, Tensor]:
    model, _, captured = empty_gpt()
    program = planned(captured, name)

    def start() -> dict[str, Tensor]:
        program.initialise(model, seed=seed)
        return program.state_dict()

    return on_ranks(program, start)


@pytest.mark.parametrize("name", ["dp2-pp2-zero1", pytest.param("dp2-tp2-zero3", marks=pytest.mark.wide)])
def test_one_seed_gives_all_plans_the_same_weights_and_the_model_stays_empty(name: str) -> None:
    model, _, _ = empty_gpt()
    first = initialised("one", 7)
    other = initialised(name, 7)
    assert all(torch.equal(first[key], other[key]) for key in first)
    assert not torch.equal(first["wte.weight"], initialised("one", 8)["wte.weight"])
    assert torch.equal(first["wte.weight"], first["lm_head.weight"])
    assert all(parameter.is_meta for parameter in model.parameters())
    linear = next(m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")
    owner = next(n for n, m in model.named_modules() if m is linear)
    assert first[f"{owner}.weight"].abs().max() <= linear.in_features**-0.5  # as reset_parameters draws them


@pytest.mark.wide
@pytest.mark.parametrize("name", ["dp2-tp2-zero3", "dp2-pp2-zero1"])
def test_an_empty_model_loads_shard_by_shard_and_steps_as_a_full_one(tmp_path: Path, name: str) -> None:
    full, batch = models.nano_gpt(layers=2)
    alone = planned(capture(full, batch), "one")
    alone.save(tmp_path / "weights")
    expected = alone.step(batch)

    _, _, captured = empty_gpt()
    program = planned(captured, name)

    def start() -> tuple[float, dict[str, Tensor]]:
        program.load(tmp_path / "weights")
        return program.step(batch), program.state_dict()

    loss, state = on_ranks(program, start)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(state[key], value) for key, value in full.state_dict().items())


def test_a_step_before_there_are_values_is_refused() -> None:
    _, batch, captured = empty_gpt()
    program = planned(captured, "one")
    for use in (lambda: program.step(batch), program.state_dict):
        with pytest.raises(StrategyError, match="on `meta` and have no values yet") as refused:
            use()
        assert "program.load" in refused.value.attempt


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).sum()


def test_a_module_that_cannot_be_initialised_is_named_and_an_init_of_the_users_does_it() -> None:
    with autoplan.empty_weights():
        model = nn.ModuleDict({"odd": Odd()})["odd"]
        model = nn.Sequential(nn.Linear(4, 4), model)
    batch = (torch.ones(8, 4),)
    captured = capture(model, batch)
    program = planned(captured, "one")
    with pytest.raises(StrategyError, match=r"`1` \(Odd\) has parameters and no reset_parameters"):
        program.initialise(model, seed=0)
    program.initialise(model, seed=0, init=lambda module: [p.fill_(2.0) for p in module._parameters.values()])
    assert all(value.eq(2.0).all() for value in program.state_dict().values())


def test_buffers_on_meta_are_refused_because_some_are_in_no_file() -> None:
    with torch.device("meta"):
        model, batch = models.batch_norm_cnn()
    program = planned(capture(model, batch), "one")
    with pytest.raises(StrategyError, match="buffers are on `meta`") as refused:
        program.load("anywhere")
    assert "empty_weights" in refused.value.attempt
