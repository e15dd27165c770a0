"""A program as a module, for loops that call a model and then ``loss.backward()``.

Calling it runs the whole planned step; ``backward`` of the loss that it returns puts the gradients, times whatever
factor the loss was multiplied with, onto the program's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoplan.runtime import Program


class PlannedModule(nn.Module):
    """``module(batch)`` or ``module(**batch)`` is the loss of the global batch, of which every data rank passes its own
    rows; its parameters are this rank's."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        batch = kwargs if kwargs else args[0] if len(args) == 1 else args
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        loss = self.program.step(batch, local=True)
        fresh = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient
        anchor = torch.zeros((), requires_grad=True)
        return _Step.apply(anchor, torch.tensor(loss, dtype=torch.float64), parameters, fresh)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.program.parameters()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.program.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.program.zero_grad(set_to_none)


class _Step(torch.autograd.Function):
    """The loss, whose gradients are known already."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loss: Tensor, parameters: list[nn.Parameter], gradients: list[Tensor | None]
    ) -> Tensor:
        ctx.pairs = list(zip(parameters, gradients, strict=True))
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        pairs, ctx.pairs = ctx.pairs, []
        for parameter, gradient in pairs:
            if gradient is None:
                continue
            scaled = gradient if float(factor) == 1.0 else gradient * factor.to(gradient.device, gradient.dtype)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return None, None, None, None
