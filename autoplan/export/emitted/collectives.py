"""What blocks call where the tensor axis splits them: collectives with the right backward.

copy_to_axis and reduce_from_axis are f and g of Megatron-LM (Shoeybi et al. 2019, section 3), gather_for_axis and
scatter_sum_to_axis what sequence parallelism has in their place (Korthikanti et al. 2022, section 4.2.2).
A dimension of ``parts`` (packed q, k, v) or of equal blocks of ``block`` is sliced one by one.  # if PACKED
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel import TENSOR_AXIS as AXIS
from parallel import Split, join, take


class _Exchange(torch.autograd.Function):
    """``there`` forward and ``back`` backward. Compiled stages break here: collectives run as they stand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None


exchange = torch.compiler.disable(_Exchange.apply)


def copy_to_axis(x: Tensor) -> Tensor:
    """A replicated value about to be used by a split operator: identity forward, all-reduce backward."""
    return exchange(x, lambda whole: whole.view_as(whole), _sum)


def reduce_from_axis(x: Tensor) -> Tensor:
    """The sum of partial values: all-reduce forward, identity backward."""
    return exchange(x, _sum, lambda gradient: gradient)


def gather_from_axis(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """The whole of a sharded value, for replicated use: all-gather forward, own slice backward."""
    split = Split(dim, tuple(parts), block)  # if PACKED
    return exchange(x, partial(_gather, split), partial(_own, split))  # if PACKED
    return exchange(x, partial(_gather, dim), partial(_own, dim))  # if WHOLE


def scatter_to_axis(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's slice of a replicated value: no communication forward, all-gather backward."""
    split = Split(dim, tuple(parts), block)  # if PACKED
    return exchange(x, partial(_own, split), partial(_gather, split))  # if PACKED
    return exchange(x, partial(_own, dim), partial(_gather, dim))  # if WHOLE


def gather_for_axis(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """The whole of a sharded value, for split operators: all-gather forward, reduce-scatter backward."""
    split = Split(dim, tuple(parts), block)  # if PACKED
    return exchange(x, partial(_gather, split), partial(_sum_slices, split))  # if PACKED
    return exchange(x, partial(_gather, dim), partial(_sum_slices, dim))  # if WHOLE


def scatter_sum_to_axis(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's slice of the sum of partial values: reduce-scatter forward, all-gather backward."""
    split = Split(dim, tuple(parts), block)  # if PACKED
    return exchange(x, partial(_sum_slices, split), partial(_gather, split))  # if PACKED
    return exchange(x, partial(_sum_slices, dim), partial(_gather, dim))  # if WHOLE


def slice_for_axis(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's slice of a value whose gradient is summed over the axis elsewhere: no communication at all."""
    runs = x.split(Split(dim, tuple(parts), block).runs(x.shape[dim]), dim)  # if PACKED
    return torch.cat([run.chunk(AXIS.size, dim)[AXIS.rank] for run in runs], dim)  # if PACKED
    return x.chunk(AXIS.size, dim)[AXIS.rank]  # if WHOLE


def expand_heads_to_axis(x: Tensor, heads: int) -> Tensor:
    """Keys or values [batch, g, length, width] repeated for ``heads`` query heads, this rank's share of them."""
    local = heads // AXIS.size
    return x.repeat_interleave(heads // x.shape[1], dim=1).narrow(1, AXIS.rank * local, local)


def drawn_apart(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``operation`` on this rank's part of a split value, with random numbers of its own: all ranks draw one seed."""
    number = int(torch.randint(2**62, ()).item())
    devices = [value.device for value in args if isinstance(value, Tensor) and value.is_cuda]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((number + AXIS.rank) % 2**62)
        return operation(*args, **kwargs)


def drawn_in_part(operation: Callable[..., Any], dim: int, x: Tensor, *args: Any) -> Tensor:
    """Dropout of a value whose ``dim`` is split: this rank's part of one drawing for the whole."""
    shape = [size * AXIS.size if at == dim else size for at, size in enumerate(x.shape)]
    with torch.no_grad():
        factors = operation(torch.ones(shape, dtype=x.dtype, device=x.device), *args)
    return x * factors.chunk(AXIS.size, dim)[AXIS.rank]


def vocabulary_embedding(weight: Tensor, indices: Tensor, padding_index: int = -1) -> Tensor:
    """Rows of a table split over its rows: this rank's summand, zero where another rank holds the row."""
    first = AXIS.rank * weight.shape[0]
    elsewhere = (indices < first) | (indices >= first + weight.shape[0])
    padding = padding_index - first if first <= padding_index < first + weight.shape[0] else None
    rows = F.embedding((indices - first).masked_fill(elsewhere, 0), weight, padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


@torch.compiler.disable
def vocabulary_cross_entropy(logits: Tensor, target: Tensor, reduction: int = 1, ignore_index: int = -100) -> Tensor:
    """Cross entropy of logits whose classes (dimension 1, or 0 of one row) are split over the axis. ``reduction``: 1
    the mean over targets that count, 2 their sum. A row's loss is log sum_v exp(x_v) - x_target, from its maximum and
    sum of exponentials over all ranks: all-reduces of one and two numbers a row forward, none backward."""
    rows = logits.movedim(min(1, logits.dim() - 1), -1).to(torch.promote_types(logits.dtype, torch.float32))
    largest = rows.detach().amax(-1, keepdim=True).contiguous()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=AXIS.group)
    rows = rows - largest
    first, counted = AXIS.rank * rows.shape[-1], target != ignore_index
    mine = (target >= first) & (target < first + rows.shape[-1]) & counted
    hit = rows.gather(-1, (target - first).masked_fill(~mine, 0).unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
    exponentials, hits = reduce_from_axis(torch.stack([rows.exp().sum(-1), hit]))
    total = (exponentials.log() - hits).masked_fill(~counted, 0.0).sum()
    return (total / counted.sum() if reduction == 1 else total).to(logits.dtype)


def _sum(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=AXIS.group)
    return total


def _own(split: Split, x: Tensor) -> Tensor:
    return take(x, split, AXIS.rank, AXIS.size)


def _gather(split: Split, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(AXIS.size)]
    dist.all_gather(parts, x.contiguous(), group=AXIS.group)
    return join(parts, split)


def _sum_slices(split: Split, x: Tensor) -> Tensor:
    slices = [take(x, split, rank, AXIS.size) for rank in range(AXIS.size)]
    total = torch.empty_like(slices[0])
    dist.reduce_scatter(total, slices, group=AXIS.group)
    return total
