"""Train the model alone and as the plan's program, a few steps each, and compare every number.

    |found - expected| <= tolerance x (|expected| + learning rate x square root of its size)

in the 2-norm, for the loss, the gradient norm, every gradient of every step, every weight and buffer after the last.
The learning-rate term is there because some gradients are zero in exact arithmetic (a key's bias), and Adam scales
their rounding noise up. Whole tensors are compared as the program gathers them, and beside them each rank's own part:
a copy that no gather reads must be right as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from autoplan.capture import Capture
from autoplan.capture.batch import tensors
from autoplan.capture.trace import CallAndLoss
from autoplan.runtime import Program, launch
from autoplan.runtime.build import STACKED
from autoplan.sharding.placements import REPLICATE, take_shard

LEARNING_RATE = 1e-2
EPSILON = 1e-6  # of AdamW: at torch's 1e-8, rounding noise of 1e-17 moves a weight by 1e-11
STEPS = 3
MAX_NORM = 0.5
TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-5  # where float32 stands in the model itself
DEADLINE_S = 240.0  # of one comparison's ranks
ENORMOUS = 1e300  # stands for an error that is not a number: JSON has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What the steps left, by the user's names; ``norms`` are of gradients before they were clipped."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[Mapping[str, Tensor], ...]
    state: Mapping[str, Tensor]


class Finding(NamedTuple):
    """One comparison of one rank; ``ratio`` is the error as a share of what is allowed."""

    quantity: str
    name: str
    step: int
    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.error / self.allowed if self.allowed else (0.0 if not self.error else ENORMOUS)


def on_ranks(count: int, body: Callable[[], Any]) -> list[Any]:
    """What ``body`` returns on each of ``count`` forked ranks; of one, in this process."""
    if count == 1:
        return [body()]
    return launch(body, gpus=count, device="cpu", timeout_s=DEADLINE_S / 2, deadline_s=DEADLINE_S)


@contextmanager
def values_kept(capture: Capture) -> Iterator[None]:
    """Whatever the body trains, the model's values are as before afterwards."""
    module = capture.graph_module
    held = [*module.parameters(), *module.buffers()]
    before = [tensor.detach().clone() for tensor in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(held, before, strict=True):
                tensor.copy_(values)
        for parameter in module.parameters():
            parameter.grad = None


def train_alone(
    model: torch.nn.Module, loss_fn: Callable[..., Any] | None, capture: Capture, batches: Sequence[Any]
) -> Numbers:
    """The user's module in one process, as its user would train it: eager, whole batches, AdamW. Its values are as
    before afterwards."""
    with values_kept(capture):
        return advance_alone(model, loss_fn, capture, batches)


def advance_alone(
    model: torch.nn.Module, loss_fn: Callable[..., Any] | None, capture: Capture, batches: Sequence[Any]
) -> Numbers:
    """The same, which leaves the model trained."""
    named = dict(capture.graph_module.named_parameters())
    trained = [p for p in named.values() if p.requires_grad]
    losses, norms, gradients = [], [], []
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=EPSILON)
    for batch in batches:
        optimizer.zero_grad()
        loss = CallAndLoss(model, loss_fn, batch)(*tensors(batch).values())
        loss.backward()
        losses.append(float(loss.item()))
        gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM).item()))
        optimizer.step()
    optimizer.zero_grad()
    state = {name: value.detach().clone() for name, value in capture.graph_module.state_dict().items()}
    return Numbers(losses=tuple(losses), norms=tuple(norms), gradients=tuple(gradients), state=state)


def advance_rank(program: Program, batches: Sequence[Any]) -> None:
    """Train on the calling rank as :func:`train_rank` does, and compare nothing."""
    optimizer = _optimizer(program)
    for batch in batches:
        program.step(batch)
        program.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def _optimizer(program: Program) -> torch.optim.Optimizer:
    trained = [p for p in program.parameters() if p.requires_grad]
    # Of a rank whose stage is frozen nothing is trained, and torch's optimizers refuse an empty list.
    return torch.optim.AdamW(trained or list(program.parameters()), lr=LEARNING_RATE, eps=EPSILON)


def train_rank(program: Program, batches: Sequence[Any], expected: Numbers, tolerance: float) -> list[Finding]:
    """Train on the calling rank and compare with what the single process had; one finding a tensor and step."""
    optimizer = _optimizer(program)
    compare = _Comparison(tolerance)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = program.step(batch)
        compare.number("loss", loss, expected.losses[step], step)
        gradients = program.gradients()
        for name in {**expected.gradients[step], **gradients}:
            compare.tensor("gradient", name, gradients.get(name), expected.gradients[step].get(name), step)
        _compare_own(compare, program, "gradient", expected.gradients[step], step)
        norm = float(program.clip_grad_norm_(MAX_NORM).item())
        compare.number("gradient norm", norm, expected.norms[step], step)
        optimizer.step()
    state, last = program.state_dict(), len(batches) - 1
    parameters = {name for name, _ in program._capture.graph_module.named_parameters(remove_duplicate=False)}
    for name, wanted in expected.state.items():
        compare.tensor("weight" if name in parameters else "buffer", name, state.get(name), wanted, last)
    _compare_own(compare, program, "weight", expected.state, last)
    return compare.found


def _compare_own(
    compare: _Comparison, program: Program, quantity: str, expected: Mapping[str, Tensor], step: int
) -> None:
    """This rank's own parameters, or slices of them, against its part of the whole."""
    part = program._rank_part()
    if part.sync is None or part.mesh.at is None:
        return
    at, strategy = part.mesh.at, program.plan.strategy
    for name, parameter in part.sync.parameters.items():
        found = parameter.detach() if quantity == "weight" else parameter.grad
        wanted = expected.get(name)
        if wanted is None or found is None:
            continue
        mesh = part.mesh
        if name in part.experts:
            wanted = take_shard(wanted, STACKED, index=mesh.expert_index, degree=strategy.expert)
            mesh = mesh.of_experts()
        wanted = take_shard(wanted, part._placements.get(name, REPLICATE), index=at.tensor, degree=strategy.tensor)
        if found.shape != wanted.shape:  # a flat slice of a parameter whose state is sharded
            copies = mesh.strategy.data
            assert mesh.at is not None
            wanted = functional.pad(wanted.reshape(-1), (0, -wanted.numel() % copies)).view(copies, -1)[mesh.at.data]
        if found.shape == wanted.shape:
            compare.tensor(quantity, name, found, wanted, step)


class _Comparison:
    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.found: list[Finding] = []

    def number(self, quantity: str, found: float, expected: float, step: int) -> None:
        self.found.append(
            Finding(quantity, "", step, _finite(abs(found - expected)), self.tolerance * max(abs(expected), 1e-6))
        )

    def tensor(self, quantity: str, name: str, found: Tensor | None, expected: Tensor | None, step: int) -> None:
        if expected is None or found is None:
            present = found if expected is None else expected
            assert present is not None
            # A gradient of zeros is not none: AdamW decays a weight for the one and leaves it for the other.
            error = max(1.0, present.double().norm().item())
            self.found.append(Finding(quantity, name, step, _finite(error), self.tolerance))
            return
        if found.shape != expected.shape:
            self.found.append(Finding(quantity, name, step, ENORMOUS, self.tolerance))
            return
        whole = expected.double()
        allowed = self.tolerance * (whole.norm().item() + LEARNING_RATE * math.sqrt(max(1, whole.numel())))
        error = (found.double() - whole).norm().item()
        self.found.append(Finding(quantity, name, step, _finite(error), allowed))


def _finite(error: float) -> float:
    return error if math.isfinite(error) else ENORMOUS
