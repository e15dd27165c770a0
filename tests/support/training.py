"""Train a model alone and as a planned program, and compare every number."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import autoplan
from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.request import AskedModel, Traced, Wish, problem_of
from autoplan.runtime import Program
from autoplan.search import search
from tests.support.captures import to_float64
from tests.support.plans import hand_plan, one_layer_a_node, with_recompute

LEARNING_RATE = 1e-2
MAX_NORM = 0.5

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What some steps left behind, by the user's names. ``norms`` are of the gradients before they were clipped."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    peak_in_flight: int = 0


def in_double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    return model.double(), to_float64(batch)


def train_alone(model: nn.Module, batches: list[Any], optimizer: Optimizer = adamw) -> Trained:
    """A single process, as the model's user would train it; the model itself is left as it was."""
    model = copy.deepcopy(model)
    stepper = optimizer(p for p in model.parameters() if p.requires_grad)
    losses, norms, gradients = [], [], []
    for batch in batches:
        stepper.zero_grad()
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        stepper.step()
    return Trained(losses=losses, norms=norms, gradients=gradients, weights=dict(model.state_dict()))


def program_of(captured: Capture, *, recompute: tuple[str, ...] = ("none",), **plan: Any) -> Program:
    """Planned by hand, cut between any two operators, on CPU; ``recompute`` in turn over the operators."""
    layers = one_layer_a_node(captured)
    return Program(captured, with_recompute(hand_plan(layers, **plan), *recompute), layers, device="cpu")


def program_forced(model: nn.Module, batch: Any, strategy: dict[str, Any], *, gpus: int) -> Program:
    """Compiled as a user would, under degrees that are all taken."""
    return _as_forced(
        autoplan.compile(model, gpus=gpus, example_inputs=batch, strategy=strategy, device="cpu"), strategy
    )


def traced(model: nn.Module, batch: Any) -> Traced:
    """``model`` as :func:`autoplan.compile` traces it: once for the programs of many plans. What trains must be
    forked: all these programs hold the model's own parameters."""
    return AskedModel(model, batch, None, None, None, None).trace_whole(Cluster.parse("1xcpu"))


def program_planned(model: Traced, strategy: dict[str, Any], *, gpus: int) -> Program:
    """As :func:`program_forced`, of a model that was traced."""
    cluster = Cluster.parse(f"{gpus}xcpu")
    plan = search(problem_of(model, cluster, Wish(strategy, "adamw")))
    return _as_forced(Program(model.capture, plan, layers=model.layers, cluster=cluster, device="cpu"), strategy)


def _as_forced(program: Program, strategy: dict[str, Any]) -> Program:
    used = program.plan.strategy
    assert all(getattr(used, key) == value for key, value in strategy.items() if key != "recompute")
    return written(program)


def written(program: Program) -> Program:
    """The same program with the graphs of every tensor rank made, once for all ranks that are forked with it."""
    for tensor_rank in range(program.plan.strategy.tensor):
        program._builder.graphs(tensor_rank)
    return program


def capture_double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any, Capture]:
    model, batch = in_double(model, batch)
    return model, batch, capture(model, batch)


def train_program(
    program: Program, batches: list[Any], optimizer: Optimizer = adamw, *, local: bool = False
) -> Trained:
    """On the calling rank."""
    stepper = optimizer(p for p in program.parameters() if p.requires_grad)
    losses, norms, gradients = [], [], []
    for batch in batches:
        stepper.zero_grad()
        losses.append(program.step(batch, local=local))
        norms.append(program.clip_grad_norm_(MAX_NORM).item())
        gradients.append(program.gradients())
        stepper.step()
    return Trained(
        losses=losses,
        norms=norms,
        gradients=gradients,
        weights=program.state_dict(),
        peak_in_flight=program.peak_in_flight,
    )


def assert_same_numbers(found: Trained, expected: Trained) -> None:
    """Within 1e-10 x (norm + learning rate x square root of the size), for every tensor."""
    for a, b in zip(found.losses, expected.losses, strict=True):
        assert math.isclose(a, b, rel_tol=1e-10), (found.losses, expected.losses)
    for a, b in zip(found.norms, expected.norms, strict=True):
        assert math.isclose(a, b, rel_tol=1e-10), (found.norms, expected.norms)
    for step, (these, those) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert set(these) == set(those)
        for name in those:
            assert_close(f"step {step}, gradient of {name}", these[name], those[name])
    assert set(found.weights) == set(expected.weights)
    for name in expected.weights:
        assert_close(name, found.weights[name], expected.weights[name])


def assert_close(name: str, found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape, name
    bound = 1e-10 * (expected.double().norm().item() + LEARNING_RATE * math.sqrt(expected.numel()))
    difference = (found.double() - expected.double()).norm().item()
    assert difference <= bound, f"{name}: differs by {difference:.3e}, allowed {bound:.3e}"
