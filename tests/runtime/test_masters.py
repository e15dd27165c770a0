"""16-bit weights with float32 masters, as the plan's precision counts them: under every axis, in checkpoints, and next
to a single process that keeps masters by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoplan
from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.cost_models.recipes import recipe
from autoplan.layers import build_layers
from autoplan.runtime import Checkpoints, GradScaler, Program
from autoplan.runtime.masters import EXECUTED, keeps_masters
from tests.support import models
from tests.support.plans import hand_plan, with_recompute
from tests.support.processes import run_ranks
from tests.support.training import MAX_NORM, Trained, train_program, written

WITHIN = 2e-2  # bfloat16 has 8 bits: sums in another order differ by some 2^-9 of what is summed
STEPS = 4
PLANS: dict[str, dict[str, Any]] = {
    "dp2-pp2-zero1": {"data": 2, "pipeline": 2, "zero_stage": 1, "micro_batch_size": 2, "micro_batches": 2},
    "pp2-tp2-zero-bubble": {
        "pipeline": 2,
        "tensor": 2,
        "micro_batch_size": 4,
        "micro_batches": 2,
        "schedule": "zero_bubble",
    },
    "dp4": {"data": 4, "micro_batch_size": 1, "micro_batches": 2},
    "dp2-tp2-zero2": {"data": 2, "tensor": 2, "zero_stage": 2, "micro_batch_size": 2, "micro_batches": 2},
    "dp2-pp2-zero3": {"data": 2, "pipeline": 2, "zero_stage": 3, "micro_batch_size": 1, "micro_batches": 4},
    "dp2-interleaved": {
        "data": 2,
        "pipeline": 2,
        "virtual_stages": 2,
        "schedule": "interleaved",
        "micro_batch_size": 2,
        "micro_batches": 2,
    },
}
USUAL = ("dp2-pp2-zero1",)
FAMILIES = {"gpt2": models.tiny_gpt2, "llama": models.tiny_llama, "nano": models.nano_gpt}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@functools.cache
def half(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any, Capture]:
    model, batch = FAMILIES[name](layers=2)
    model = model.to(dtype)
    return model, batch, capture(model, batch)


def program(name: str, precision: str = "bf16", dtype: torch.dtype = torch.bfloat16, **degrees: Any) -> Program:
    _, _, captured = half(name, dtype)
    layers = build_layers(captured)
    plan = dataclasses.replace(with_recompute(hand_plan(layers, **degrees), "none", "full"), precision=precision)
    return written(Program(captured, plan, layers, cluster=Cluster.parse(f"{plan.gpus}xcpu"), device="cpu"))


@functools.cache
def by_hand(name: str, max_norm: float = MAX_NORM) -> Trained:
    """A single process: masters are rounded into the model, its gradients widened, and the masters updated."""
    model, batch, _ = half(name)
    model = copy.deepcopy(model)
    masters = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    stepper = adamw(masters.values())
    losses, norms, gradients = [], [], []
    for _ in range(STEPS):
        with torch.no_grad():
            for n, parameter in model.named_parameters():
                parameter.copy_(masters[n])
        model.zero_grad()
        output = model(**batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        for n, parameter in model.named_parameters():
            masters[n].grad = parameter.grad.float()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(masters.values(), max_norm).item())
        gradients.append({n: m.grad.clone() for n, m in masters.items()})
        stepper.step()
    return Trained(losses=losses, norms=norms, gradients=gradients, weights={n: m.detach() for n, m in masters.items()})


Found = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]


def held(program: Program) -> Found:
    """What this rank's optimizer updates: (whole shape, offset, values) by name."""
    state = program._rank_part().state
    return {
        name: [(part.shape, piece.offset, piece.view.clone()) for piece in part.pieces]
        for name, part in ((name, state.part(name, stored)) for name, stored in state.parameters().items())
    }


def put_together(ranks: list[Found]) -> dict[str, Tensor]:
    """Whole masters, which ranks that hold the same elements must agree on."""
    whole: dict[str, Tensor] = {}
    for found in ranks:
        for name, entries in found.items():
            for shape, offset, values in entries:
                assert values.dtype == torch.float32
                into = whole.setdefault(name, torch.full(shape, float("nan")))
                there = into[tuple(slice(o, o + size) for o, size in zip(offset, values.shape, strict=True))]
                assert torch.equal(torch.where(there.isnan(), values, there), values), name
                there.copy_(values)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all tensors together, as a share of the expected ones' norm."""
    difference = sum((found[name].double() - tensor.double()).square().sum() for name, tensor in expected.items())
    return math.sqrt(difference / sum(tensor.double().square().sum() for tensor in expected.values()))


def members() -> list[Any]:
    for_wide = [(name, plan) for name in ("gpt2", "llama") for plan in PLANS]
    return [
        *(pytest.param("nano", plan, id=f"nano-{plan}") for plan in USUAL),
        *(pytest.param(*member, id="-".join(member), marks=pytest.mark.wide) for member in for_wide),
    ]


@pytest.mark.parametrize(("name", "plan"), members())
def test_bfloat16_is_within_two_percent_of_a_single_process_with_masters(name: str, plan: str) -> None:
    _, batch, _ = half(name)
    planned = program(name, **PLANS[plan])
    ranks = run_ranks(lambda rank, world: (train_program(planned, [batch] * STEPS, adamw), held(planned)), 4)
    expected = by_hand(name)
    found = ranks[0][0]
    assert found.losses == pytest.approx(expected.losses, rel=WITHIN)
    assert found.norms == pytest.approx(expected.norms, rel=WITHIN)
    for step, gradients in enumerate(expected.gradients):
        assert distance(found.gradients[step], gradients) <= WITHIN, step
    assert distance(found.weights, expected.weights) <= WITHIN
    assert {tensor.dtype for tensor in found.weights.values()} == {torch.bfloat16}
    masters = put_together([each for _, each in ranks])
    assert distance(masters, expected.weights) <= WITHIN / 4
    for parameter, master in masters.items():  # what the model computes with, and what is saved for it, is the masters
        assert torch.equal(found.weights[parameter], master.bfloat16())


def test_where_no_sum_changes_its_order_masters_are_equal_bit_by_bit() -> None:
    """Llama's tables are not tied: gradients of tied ones are summed over stages in float32, and alone in bfloat16."""
    _, batch, _ = half("llama")
    planned = program("llama", pipeline=2, micro_batch_size=8)

    def train(rank: int, world: int) -> tuple[list[float], Found]:
        stepper, losses = adamw(planned.parameters()), []
        for _ in range(STEPS):
            losses.append(planned.step(batch))
            stepper.step()
            stepper.zero_grad()
        return losses, held(planned)

    ranks = run_ranks(train, 2)
    expected = by_hand("llama", max_norm=math.inf)
    assert ranks[0][0] == expected.losses
    masters = put_together([each for _, each in ranks])
    assert all(torch.equal(masters[name], tensor) for name, tensor in expected.weights.items())


def test_masters_move_by_less_than_weights_can() -> None:
    """At 1 bfloat16's next values are 2^-8 above and 2^-9 below: a hundred steps of 1e-5 move nothing in place."""
    _, batch, _ = half("nano")

    def train(rank: int, world: int, precision: str) -> float:
        planned = program("nano", precision, micro_batch_size=8)
        norm = dict(planned.named_parameters())["h.0.ln_1.weight"]
        stepper = torch.optim.AdamW(planned.parameters(), lr=1e-5, weight_decay=0.0)
        before = norm.detach().clone()
        for _ in range(3):
            planned.step(batch)
            stepper.step()
            stepper.zero_grad()
        return (norm.detach() - before).abs().max().item()

    assert run_ranks(train, 1, "bf16-pure") == [0.0]
    assert run_ranks(train, 1, "bf16") == [pytest.approx(3e-5, rel=0.1)]


def test_a_checkpoint_brings_masters_and_their_state_to_another_plan(tmp_path: Path) -> None:
    _, batch, _ = half("nano")
    first, second = program("nano", **PLANS["dp2-pp2-zero1"]), program("nano", data=2, zero_stage=3, micro_batch_size=4)

    def save(rank: int, world: int) -> Found:
        stepper = adamw(first.parameters())
        for _ in range(2):
            first.step(batch)
            stepper.step()
            stepper.zero_grad()
        checkpoints = Checkpoints(tmp_path, first, stepper)
        checkpoints.save(2)
        checkpoints.wait()
        return held(first)

    def load(rank: int, world: int) -> tuple[Found, set[torch.dtype], dict[str, Tensor]]:
        stepper = adamw(second.parameters())
        assert Checkpoints(tmp_path, second, stepper).resume() is not None
        moments = {state["exp_avg"].dtype for state in stepper.state.values()}
        return held(second), moments, second.state_dict()

    saved = put_together(run_ranks(save, 4))
    ranks = run_ranks(load, 2)
    loaded = put_together([each for each, _, _ in ranks])
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(ranks[1][2][name], tensor.bfloat16())
    assert ranks[0][1] == {torch.float32}


def test_the_scaler_unscales_masters_and_skips_what_overflowed() -> None:
    _, batch, _ = half("nano", torch.float16)
    planned = program("nano", "fp16", torch.float16, data=2, zero_stage=1, micro_batch_size=4)

    def train(rank: int, world: int) -> list[bool]:
        stepper = adamw(planned.parameters())
        scaler = GradScaler(planned, init_scale=2.0**24, growth_interval=1000, backoff_factor=2.0**-14)
        moved = []
        for _ in range(2):
            before = [p.detach().clone() for p in planned.parameters()]
            planned.step(batch)
            scaler.unscale_(stepper)
            planned.clip_grad_norm_(MAX_NORM)
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, planned.parameters(), strict=True)))
        assert {p.dtype for p in planned.parameters()} == {torch.float32}
        return moved

    assert run_ranks(train, 2) == [[False, True]] * 2


def test_compile_keeps_what_the_plan_prices() -> None:
    model, batch, _ = half("nano")
    kept = {}
    for precision in (None, "bf16", "bf16-pure"):
        compiled = autoplan.compile(model, gpus=1, example_inputs=batch, precision=precision, device="cpu")
        assert compiled.plan.precision == (precision or "bf16")
        kept[precision] = {parameter.dtype for parameter in compiled.parameters()}
    assert kept == {None: {torch.float32}, "bf16": {torch.float32}, "bf16-pure": {torch.bfloat16}}
    with pytest.raises(autoplan.StrategyError) as refused:
        autoplan.compile(model, gpus=1, example_inputs=batch, precision="bf16-megatron", device="cpu")
    assert refused.value.legal == "bf16 or bf16-pure"


def test_precisions_have_masters_as_they_are_counted() -> None:
    assert {precision: keeps_masters(precision) for precision in EXECUTED} == {
        precision: recipe(precision).master_weights == 4 for precision in EXECUTED
    }
