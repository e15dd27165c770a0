"""What tests of captured graphs share: a graph's loss and gradients beside the eager model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autoplan.capture import Capture, gather_inputs


class Round(torch.autograd.Function):
    """A straight-through estimator, whose backward a trace would lose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def to_float64(batch: Any) -> Any:
    """Floating tensors of a batch in float64."""
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def first_samples(batch: Any, samples: int) -> Any:
    return tree_map(lambda x: x[:samples] if isinstance(x, Tensor) else x, batch)


def eager(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by name of the model as the user runs it."""
    model.zero_grad()
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = output if isinstance(output, Tensor) else output["loss"] if isinstance(output, dict) else output.loss
    return _backward(model, loss)


def captured(capture: Capture, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, on the same Parameters, of the captured graph."""
    model.zero_grad()
    return _backward(model, capture.graph_module(*gather_inputs(capture, batch)))


def _backward(model: nn.Module, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def largest_difference(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> float:
    """Of the loss and every gradient: the norm of the difference relative to the norm, or to 1 for small tensors."""
    assert one[1].keys() == other[1].keys()
    pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in one[1])]
    return max(((a - b).norm() / max(1e-3, b.norm().item())).item() for a, b in pairs)


def line_of(file: str, marker: str) -> str:
    """``file:number`` of the line that ends in the comment ``# marker``."""
    numbers = [
        number
        for number, line in enumerate(Path(file).read_text().splitlines(), start=1)
        if line.rstrip().endswith(f"# {marker}")
    ]
    assert len(numbers) == 1, (marker, numbers)
    return f"{file}:{numbers[0]}"


def seeded(build: Any, *args: Any, **kwargs: Any) -> Any:
    """Build something under seed 0."""
    torch.manual_seed(0)
    return build(*args, **kwargs)
