"""What training loops do around a step: scaling for fp16, groups, schedulers, frozen weights, uneven losses. Each ends
as the same loop does in a single process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.runtime import Checkpoints, GradScaler, Program
from tests.support import models
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks
from tests.support.training import MAX_NORM, assert_close, capture_double, program_of

PLANS: dict[str, dict[str, Any]] = {
    "dp2-zero1": {"data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 1},
    "pp2-tp2": {"pipeline": 2, "tensor": 2, "micro_batch_size": 4, "micro_batches": 2},
    "dp2-zero3": {"data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 3},
    "pp2v2": {
        "pipeline": 2,
        "virtual_stages": 2,
        "schedule": "interleaved",
        "micro_batch_size": 4,
        "micro_batches": 2,
    },
    "dp2-pp2-zero-bubble": {
        "data": 2,
        "pipeline": 2,
        "schedule": "zero_bubble",
        "micro_batch_size": 2,
        "micro_batches": 2,
    },
}
STEPS = 4


@functools.cache
def gpt() -> tuple[nn.Module, Any, Capture]:
    """The second half's norms and the position table are frozen; labels count unevenly over the batch's rows."""
    model, batch = models.nano_gpt(layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (name.startswith("wpe") or ("norm" in name and ".1." in name)))
    return capture_double(model, batch)


Named = Iterable[tuple[str, nn.Parameter]]


def in_groups(named: Named) -> torch.optim.Optimizer:
    """Vectors don't decay, the embedding learns slower; a rank may lack all of a group."""
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    matrices = [p for name, p in trained if "weight" in name and "norm" not in name and "wte" not in name]
    embedding = [p for name, p in trained if "wte" in name]
    others = [p for name, p in trained if "bias" in name or "norm" in name]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": embedding, "lr": 1e-3},
        {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def momentum(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.05, momentum=0.9, nesterov=True)


def loop(
    named: Named, step: Callable[[], Any], clip: Callable[[], Any], make: Callable[[Named], torch.optim.Optimizer]
) -> None:
    """Warm-up, then a cosine: the rate changes every step."""
    optimizer = make(named)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])
    for _ in range(STEPS):
        optimizer.zero_grad()
        step()
        clip()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("plan", "make"),
    [
        ("pp2-tp2", in_groups),
        pytest.param("dp2-zero3", momentum, marks=pytest.mark.wide),
        *(pytest.param(name, in_groups, marks=pytest.mark.wide) for name in PLANS if name != "pp2-tp2"),
    ],
)
def test_groups_schedulers_frozen_weights_and_clipping_end_as_alone(
    plan: str, make: Callable[[Named], torch.optim.Optimizer]
) -> None:
    model, batch, captured = gpt()
    alone = copy.deepcopy(model)
    parameters = list(alone.named_parameters())
    clip = lambda: nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)  # noqa: E731
    loop(parameters, lambda: alone(**batch).backward(), clip, make)

    layers = build_layers(captured)
    made = hand_plan(layers, **PLANS[plan])
    program = Program(captured, made, layers, cluster=Cluster.parse(f"{made.gpus}xcpu"), device="cpu")

    def train(rank: int, world: int) -> dict[str, Tensor]:
        named = list(program.named_parameters())
        loop(named, lambda: program.step(batch), lambda: program.clip_grad_norm_(MAX_NORM), make)
        return program.state_dict()

    found = run_ranks(train, made.gpus)[-1]
    for name, weight in alone.state_dict().items():
        assert_close(name, found[name], weight)
    assert torch.equal(found["wpe.weight"], model.state_dict()["wpe.weight"])


# ---------------------------------------------------------------------------------------------------------------- fp16


class Halves(nn.Module):
    """In fp16; its loss is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).float().square().mean()


def half_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).half()}


class AloneScaler(torch.amp.GradScaler):
    """Torch's, for gradients that are fp16 themselves."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


# The first scale overflows fp16, so that the first steps are skipped; then it doubles every two steps.
OPTIONS = {"init_scale": 2.0**24, "growth_interval": 2}
SCALED_STEPS = 16


@pytest.mark.parametrize(
    "plan",
    [
        {"pipeline": 2, "gpus": 3, "micro_batch_size": 4, "micro_batches": 2},
        pytest.param({"data": 2, "micro_batch_size": 4, "zero_stage": 2}, marks=pytest.mark.wide),
    ],
    ids=["pp2-and-an-idle-rank", "dp2-zero2"],
)
def test_fp16_is_scaled_and_steps_are_skipped_as_alone(tmp_path: Path, plan: dict[str, Any]) -> None:
    alone, batch = Halves(), half_batch()
    captured = capture(Halves(), batch)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    scaler = AloneScaler("cpu", **OPTIONS)
    scales, losses = [], []
    for _ in range(SCALED_STEPS):
        optimizer.zero_grad()
        loss = alone(**batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        losses.append(loss.item())
    assert scales[0] == OPTIONS["init_scale"] / 2 and max(scales[1:]) > min(scales)

    program = program_of(captured, **plan)

    def train(rank: int, world: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
        optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
        scaler = GradScaler(program, **OPTIONS)
        checkpoints = Checkpoints(tmp_path, program, optimizer, scaler=scaler)
        scales, losses = [], []
        for step in range(SCALED_STEPS):
            optimizer.zero_grad()
            losses.append(program.step(batch))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if step == SCALED_STEPS // 2:  # forgotten, and read again
                checkpoints.save(step)
                scaler.update(new_scale=1.0)
                assert checkpoints.resume() is not None
        return scales, losses, program.state_dict()

    for found_scales, found_losses, weights in run_ranks(train, program.plan.gpus):
        assert found_scales == scales
        assert found_losses == pytest.approx(losses, rel=2e-2)
        for name, weight in alone.state_dict().items():
            assert (weights[name] - weight).float().norm() <= 2e-2 * weight.float().norm(), name
