"""What rewritten graphs call: collectives as named functions with the right backward.

Graphs hold only ``call_function`` nodes to the functions here, so the rewritten program reads like the maths. A
function talks to the :class:`Communicator` that the runtime installs around a stage's execution; it keeps it for the
backward, which may run on another thread.

The pairs are Megatron's f and g (Shoeybi et al. 2019, section 3) and sequence parallelism's (Korthikanti et al. 2022):

==================  ==========================  ==========================
function            forward                     backward
==================  ==========================  ==========================
copy_to_axis        identity                    all-reduce
reduce_from_axis    all-reduce                  identity
gather_from_axis    all-gather along ``dim``    own slice (see below)
scatter_to_axis     own slice along ``dim``     all-gather along ``dim``
==================  ==========================  ==========================

``gather_from_axis``'s gradient is alike on all ranks when what follows is replicated, so its backward keeps the own slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor


class Communicator(Protocol):
    """Collectives over the tensor axis of one rank. Every tensor given is contiguous; all_reduce works in place."""

    def rank(self, axis: str) -> int: ...

    def size(self, axis: str) -> int: ...

    def all_reduce(self, tensor: Tensor, axis: str, operation: str = "sum") -> None: ...

    def all_gather(self, tensor: Tensor, axis: str) -> list[Tensor]: ...


_CURRENT: ContextVar[Communicator] = ContextVar("autoplan_communicator")


@contextmanager
def communicating(communicator: Communicator) -> Iterator[None]:
    """Install the communicator that the functions here use in this context."""
    token = _CURRENT.set(communicator)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _own(tensor: Tensor) -> Tensor:
    """A contiguous copy that may be reduced in place: gradients may be expanded views, or shared."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class _CopyToAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
        ctx.axis, ctx.communicator = axis, _CURRENT.get()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = _own(gradient)
        ctx.communicator.all_reduce(total, ctx.axis)
        return total, None


class _ReduceFromAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
        total = _own(x)
        _CURRENT.get().all_reduce(total, axis)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def copy_to_axis(x: Tensor, axis: str) -> Tensor:
    """Replicated value about to be used by a split operator: identity forward, all-reduce backward."""
    return _CopyToAxis.apply(x, axis)


def reduce_from_axis(x: Tensor, axis: str) -> Tensor:
    """Sum of partial values: all-reduce forward, identity backward."""
    return _ReduceFromAxis.apply(x, axis)
