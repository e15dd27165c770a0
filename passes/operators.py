"""What rewritten graphs call: collectives as named functions with the right backward.

Graphs hold only ``call_function`` nodes to the functions here, so the rewritten program reads like the maths. A
function talks to the :class:`Communicator` that the runtime installs around a stage's execution; it keeps it for the
backward, which may run on another thread.

The first two are Megatron's f and g (Shoeybi et al. 2019, section 3):

===================  ============================  ============================
function             forward                       backward
===================  ============================  ============================
copy_to_axis         identity                      all-reduce
reduce_from_axis     all-reduce                    identity
gather_from_axis     all-gather along ``dim``      own slice (see below)
gather_for_axis      all-gather along ``dim``      reduce-scatter along ``dim``
scatter_to_axis      own slice along ``dim``       all-gather along ``dim``
scatter_sum_to_axis  reduce-scatter along ``dim``  all-gather along ``dim``
slice_for_axis       own slice along ``dim``       own slice's gradient, zero elsewhere
===================  ============================  ============================

``gather_for_axis`` and ``scatter_sum_to_axis`` are what sequence parallelism puts in place of f and g (Korthikanti et
al. 2022, section 4.2.2). ``gather_from_axis``'s gradient is alike on all ranks when what follows is replicated, so its
backward keeps the own slice; ``gather_for_axis``'s is a summand. ``parts`` and ``block`` are those of
:class:`autoplan.sharding.Shard`: a dimension made of several runs, each of which is sliced by itself. Every function
returns a tensor of its own, contiguous where it came from a collective.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint


class Communicator(Protocol):
    """Collectives over the axes of one rank. Every tensor given is contiguous; all_reduce works in place; all_to_all
    sends ``sent[r]`` rows to rank r, one rank's after the other, and gets ``received[r]`` from it."""

    def rank(self, axis: str) -> int: ...

    def size(self, axis: str) -> int: ...

    def all_reduce(self, tensor: Tensor, axis: str, operation: str = "sum") -> None: ...

    def all_gather(self, tensor: Tensor, axis: str) -> list[Tensor]: ...

    def reduce_scatter(self, parts: list[Tensor], axis: str) -> Tensor: ...

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], axis: str) -> Tensor: ...


_CURRENT: ContextVar[Communicator] = ContextVar("autoplan_communicator")


@contextmanager
def communicating(communicator: Communicator) -> Iterator[None]:
    """Install the communicator that the functions here use in this context."""
    token = _CURRENT.set(communicator)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Communicator:
    """The communicator that is installed in this context."""
    return _CURRENT.get()


class ParameterSlices(Protocol):
    """Parameters split over the data axis, as the runtime keeps them."""

    def gather(self, shapes: Sequence[Sequence[int]], slices: Sequence[Tensor]) -> list[Tensor]:
        """The whole parameters, each in storage of its own (a collective)."""
        ...

    def scatter(self, slices: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Sum whole gradients over the axis and keep this rank's slices of the sums (a collective)."""
        ...


_SLICES: ContextVar[ParameterSlices] = ContextVar("autoplan_parameter_slices")


@contextmanager
def gathering(slices: ParameterSlices) -> Iterator[None]:
    """Install what :func:`gather_slices` in this context talks to."""
    token = _SLICES.set(slices)
    try:
        yield
    finally:
        _SLICES.reset(token)


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: Sequence[Sequence[int]], *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.slices = _SLICES.get(), slices
        ctx.set_materialize_grads(False)
        return tuple(ctx.owner.gather(shapes, slices))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.owner.scatter(ctx.slices, gradients)  # which keeps the sums: nothing arrives here
        return (None,) * (1 + len(ctx.slices))


def gather_slices(shapes: Sequence[Sequence[int]], *slices: Tensor) -> tuple[Tensor, ...]:
    """Whole parameters from flat slices over the data axis: all-gather forward, reduce-scatter backward."""
    return _GatherSlices.apply(shapes, *slices)


def drawn_apart(operation: Callable[..., Any], axis: str, *args: Any, **kwargs: Any) -> Any:
    """``operation(*args, **kwargs)`` on this rank's part of a split value, with random numbers of this rank's own.

    Every rank of the axis draws one number from its generator, alike on all, which seeds a generator for each rank; the
    rank's own generator goes on behind that number, so that what the ranks compute alike stays alike.
    """
    number = int(torch.randint(2**62, ()).item())
    devices = {value.device for value in args if isinstance(value, Tensor) and value.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed((number + _CURRENT.get().rank(axis)) % 2**62)
        return operation(*args, **kwargs)


def drawn_in_part(operation: Callable[..., Any], axis: str, dim: int, x: Tensor, *args: Any) -> Tensor:
    """Dropout ``operation(x, *args)`` of a value whose ``dim`` is split: this rank's part of one drawing for the whole.

    Every rank draws for the whole value, from generators that are alike, and takes its slice of the factors; so the
    numbers are those of a program that does not split the value, and the generators stay alike.
    """
    communicator = _CURRENT.get()
    ranks = communicator.size(axis)
    shape = [size * ranks if at == dim else size for at, size in enumerate(x.shape)]
    with torch.no_grad():
        factors = operation(torch.ones(shape, dtype=x.dtype, device=x.device), *args)
    return x * _slice(factors, communicator.rank(axis), ranks, dim, (), 0)


_RECOMPUTING: ContextVar[bool] = ContextVar("autoplan_recomputing", default=False)


def recomputing() -> bool:
    """Whether what runs is kept by nobody, because it runs again in the backward."""
    return _RECOMPUTING.get()


def recomputed(module: GraphModule, *inputs: Any) -> Any:
    """``module(*inputs)``, of which only ``inputs`` are kept: it runs again when the backward first needs a value, and
    stops after the last one needed. Collectives in it run again too, on every rank of their group alike.

    ``module.meta["random"]``: the generators' state is kept, so that the same numbers are drawn again.
    """
    if not torch.is_grad_enabled() or not any(isinstance(i, Tensor) and i.requires_grad for i in inputs):
        return module.forward(*inputs)
    # Autograd may call from a thread that knows of no communicator: take along what is installed now.
    context = contextvars.copy_context()
    context.run(_RECOMPUTING.set, True)
    run = functools.partial(context.run, module.forward)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=bool(module.meta.get("random", True)))


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


class _GatherFromAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, dim: int, parts: Sequence[int], block: int) -> Tensor:
        communicator = _CURRENT.get()
        ctx.layout = (communicator.rank(axis), communicator.size(axis), dim, parts, block)
        return _join(communicator.all_gather(x.detach().contiguous(), axis), dim, parts, block)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _slice(gradient, *ctx.layout), None, None, None, None


class _ScatterToAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, dim: int, parts: Sequence[int], block: int) -> Tensor:
        ctx.communicator, ctx.layout = _CURRENT.get(), (axis, dim, parts, block)
        return _slice(x.detach(), ctx.communicator.rank(axis), ctx.communicator.size(axis), dim, parts, block)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        axis, dim, parts, block = ctx.layout
        return (
            _join(ctx.communicator.all_gather(gradient.contiguous(), axis), dim, parts, block),
            None,
            None,
            None,
            None,
        )


class _GatherForAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, dim: int, parts: Sequence[int], block: int) -> Tensor:
        ctx.communicator, ctx.axis, ctx.layout = _CURRENT.get(), axis, (dim, parts, block)
        return _join(ctx.communicator.all_gather(x.detach().contiguous(), axis), dim, parts, block)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _scatter_sum(gradient, ctx.communicator, ctx.axis, *ctx.layout), None, None, None, None


class _ScatterSumToAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, dim: int, parts: Sequence[int], block: int) -> Tensor:
        ctx.communicator, ctx.axis, ctx.layout = _CURRENT.get(), axis, (dim, parts, block)
        return _scatter_sum(x.detach(), ctx.communicator, axis, dim, parts, block)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gathered = ctx.communicator.all_gather(gradient.contiguous(), ctx.axis)
        return _join(gathered, *ctx.layout), None, None, None, None


def gather_from_axis(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """The whole of a sharded value, for replicated use: all-gather forward, own slice backward."""
    return _GatherFromAxis.apply(x, axis, dim, tuple(parts), block)


def gather_for_axis(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """The whole of a sharded value, for split operators: all-gather forward, reduce-scatter backward."""
    return _GatherForAxis.apply(x, axis, dim, tuple(parts), block)


def scatter_sum_to_axis(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's slice of the sum of partial values: reduce-scatter forward, all-gather backward."""
    return _ScatterSumToAxis.apply(x, axis, dim, tuple(parts), block)


def scatter_to_axis(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's slice of a replicated value: no communication forward, all-gather backward."""
    return _ScatterToAxis.apply(x, axis, dim, tuple(parts), block)


def slice_for_axis(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's slice of a value whose gradient is summed over the axis elsewhere: no communication at all."""
    communicator = _CURRENT.get()
    return _slice(x, communicator.rank(axis), communicator.size(axis), dim, tuple(parts), block)


def expand_heads_to_axis(x: Tensor, axis: str, heads: int) -> Tensor:
    """Whole keys or values [batch, g, length, width], repeated for ``heads`` query heads, this rank's share of them.

    For grouped-query attention where the ranks are more than the g groups; gradients are zero for other ranks' heads.
    """
    communicator = _CURRENT.get()
    local = heads // communicator.size(axis)
    return x.repeat_interleave(heads // x.shape[1], dim=1).narrow(1, communicator.rank(axis) * local, local)


def vocabulary_embedding(weight: Tensor, indices: Tensor, axis: str, padding_index: int = -1) -> Tensor:
    """Rows of a table that is split over its rows: this rank's summand, zero where another rank holds the row.

    ``weight`` [rows / ranks, width], ``indices`` of any shape with global rows; ``padding_index`` gets no gradient.
    """
    first = _CURRENT.get().rank(axis) * weight.shape[0]
    elsewhere = (indices < first) | (indices >= first + weight.shape[0])
    padding = padding_index - first if first <= padding_index < first + weight.shape[0] else None
    rows = torch.nn.functional.embedding((indices - first).masked_fill(elsewhere, 0), weight, padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """log sum_v exp(x_v) - x_target a row, from each row's maximum and sum of exponentials over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, axis: str, reduction: int, ignore_index: int, class_dim: int
    ) -> Tensor:
        communicator = _CURRENT.get()
        precise = torch.promote_types(logits.dtype, torch.float32)
        rows = logits.detach().movedim(class_dim, -1).to(precise)
        largest = rows.amax(-1).contiguous()
        communicator.all_reduce(largest, axis, "max")
        rows = rows - largest.unsqueeze(-1)
        first = communicator.rank(axis) * rows.shape[-1]
        mine = (target >= first) & (target < first + rows.shape[-1]) & (target != ignore_index)
        index = (target - first).masked_fill(~mine, 0).unsqueeze(-1)
        hit = rows.gather(-1, index).squeeze(-1).masked_fill(~mine, 0.0)
        exponentials = rows.exp()
        sums = torch.stack([exponentials.sum(-1), hit])
        communicator.all_reduce(sums, axis)
        counted = target != ignore_index
        losses = (sums[0].log() - sums[1]).masked_fill(~counted, 0.0)
        weight = (
            1.0 / counted.sum().to(precise)
            if reduction == _MEAN
            else torch.ones((), dtype=precise, device=logits.device)
        )
        ctx.save_for_backward(exponentials / sums[0].unsqueeze(-1), index, mine, counted, weight)
        ctx.class_dim, ctx.dtype = class_dim, logits.dtype
        return (losses.sum() * weight).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        probabilities, index, mine, counted, weight = ctx.saved_tensors
        down = probabilities.scatter_add(-1, index, -mine.to(probabilities.dtype).unsqueeze(-1))
        down = down * (counted.to(down.dtype) * (gradient.to(down.dtype) * weight)).unsqueeze(-1)
        return down.to(ctx.dtype).movedim(-1, ctx.class_dim), None, None, None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, target: Tensor, axis: str, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    """Cross entropy of logits whose classes (dimension 1, or 0 of one row) are split over the axis.

    ``reduction``: 1 the mean over targets that count, 2 their sum (torch's numbers). Two all-reduces of one and two
    numbers a row forward, none backward.
    """
    class_dim = min(1, logits.dim() - 1)
    return _VocabularyCrossEntropy.apply(logits, target, axis, reduction, ignore_index, class_dim)


_MEAN = 1


def _runs(size: int, parts: Sequence[int], block: int) -> tuple[int, ...]:
    """Sizes of the runs of a whole dimension of ``size``."""
    return tuple(parts) or ((block,) * (size // block) if block else (size,))


def _slice(x: Tensor, rank: int, ranks: int, dim: int, parts: Sequence[int], block: int) -> Tensor:
    """The rank-th slice of every run of ``dim``, one after the other."""
    runs = x.split(_runs(x.shape[dim], parts, block), dim)
    slices = [run.narrow(dim, rank * (run.shape[dim] // ranks), run.shape[dim] // ranks) for run in runs]
    return slices[0].contiguous() if len(slices) == 1 else torch.cat(slices, dim)


def _scatter_sum(
    x: Tensor, communicator: Communicator, axis: str, dim: int, parts: Sequence[int], block: int
) -> Tensor:
    """This rank's slice of the sum over ranks."""
    ranks = communicator.size(axis)
    return communicator.reduce_scatter([_slice(x, rank, ranks, dim, parts, block) for rank in range(ranks)], axis)


def _join(shards: list[Tensor], dim: int, parts: Sequence[int], block: int) -> Tensor:
    """Whole runs from every rank's slices; inverse of :func:`_slice`."""
    runs = _runs(shards[0].shape[dim] * len(shards), parts, block)
    if len(runs) == 1:
        return torch.cat(shards, dim)
    split = [shard.split([size // len(shards) for size in runs], dim) for shard in shards]
    return torch.cat([piece for run in zip(*split, strict=True) for piece in run], dim)
