"""Products whose backward leaves the weight's gradient for later: what graphs of zero-bubble schedules call.

The same numbers as the operators in whose place they stand. The backward gives the gradients of the input and the bias,
and puts aside what the weight's needs, the input and the output's gradient, with the :class:`WeightGradients` that was
installed around the forward; :meth:`WeightGradients.compute` does the rest. Nothing runs twice: autograd goes through
its graph once, and where a layer is recomputed, what that made for the backward is what is put aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

aten = torch.ops.aten


@dataclass(slots=True)
class _Part:
    """What one weight's gradient in one product needs. ``edge``: where it goes; ``transposed``: [in, out]."""

    edge: GradientEdge
    inputs: Tensor
    gradient: Tensor
    transposed: bool

    def weight_gradient(self) -> Tensor:
        inputs = self.inputs.reshape(-1, self.inputs.shape[-1])
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        return inputs.t().mm(gradient) if self.transposed else gradient.t().mm(inputs)


@dataclass(slots=True)
class WeightGradients:
    """What a micro-batch's backward has put aside."""

    parts: list[_Part] = field(default_factory=list)

    @torch.no_grad()
    def compute(self) -> None:
        """Compute the weights' gradients and add them up where autograd would have; then nothing is held any more.

        All of a parameter's (or, where parameters are gathered together, of a gather's) arrive at once, so that hooks
        on it run once.
        """
        together: dict[Node, list[_Part]] = {}
        for part in self.parts:
            together.setdefault(_target(part.edge.node), []).append(part)
        self.parts = []
        for target in list(together):
            group = together.pop(target)
            gradients = [part.weight_gradient() for part in group]
            torch.autograd.backward([part.edge for part in group], gradients)


def _target(node: Node) -> Node:
    """Through casts and views to what they are of: the parameter's own node, or the gather's."""
    while len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


_ASIDE: ContextVar[WeightGradients] = ContextVar("autoplan_weight_gradients")


@contextmanager
def putting_aside(weights: WeightGradients) -> Iterator[None]:
    """Install where forwards in this context have their backwards put weights' gradients aside."""
    token = _ASIDE.set(weights)
    try:
        yield
    finally:
        _ASIDE.reset(token)


class _Cell:
    """Where a product's output leaves its gradient for :class:`_Held` of its input."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def keep(self, gradient: Tensor) -> None:
        self.gradient = gradient


class _Held(torch.autograd.Function):
    """The input of a product, kept for its weight's gradient: identity both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: GradientEdge, cell: _Cell, transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.aside, ctx.edge, ctx.cell, ctx.transposed = _ASIDE.get(), edge, cell, transposed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient, ctx.cell.gradient = ctx.cell.gradient, None
        if gradient is not None:
            (x,) = ctx.saved_tensors
            ctx.aside.parts.append(_Part(ctx.edge, x, gradient, ctx.transposed))
        return gradients[0], None, None, None


class _OfConstant(torch.autograd.Function):
    """A product whose input needs no gradient: all of its backward but the bias's is for later. ``anchor`` has the
    backward called where nothing else would; the weight comes detached, so that nothing arrives at it before time."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        edge: GradientEdge,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.aside, ctx.edge, ctx.transposed = _ASIDE.get(), edge, transposed
        return _product(x, weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        (x,) = ctx.saved_tensors
        ctx.aside.parts.append(_Part(ctx.edge, x, gradient, ctx.transposed))
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return None, None, of_bias, None, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return aten.linear.default(x, weight, bias)
    return aten.mm.default(x, weight) if bias is None else aten.addmm.default(bias, x, weight)


def _in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return _product(x, weight, bias, transposed)
    edge = get_gradient_edge(weight)
    if not x.requires_grad:
        anchor = weight.new_empty(()).requires_grad_()
        return _OfConstant.apply(x, weight.detach(), bias, anchor, edge, transposed)
    # The product itself stays autograd's, which gives the gradients of its input and bias and keeps the weight for it
    # before it computes: a recomputed layer that ends here stops ahead of the product, as it would without us.
    cell = _Cell()
    result = _product(_Held.apply(x, edge, cell, transposed), weight.detach(), bias, transposed)
    result.register_hook(cell.keep)
    return result


def linear_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear(x, weight, bias)``, of whose backward the weight's gradient is put aside."""
    return _in_parts(x, weight, bias, transposed=False)


def addmm_in_parts(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``addmm(bias, x, weight)`` with a bias of one dimension, likewise."""
    return _in_parts(x, weight, bias, transposed=True)


def mm_in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """``mm(x, weight)``, likewise."""
    return _in_parts(x, weight, None, transposed=True)
