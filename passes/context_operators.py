"""What graphs call where the context axis splits the sequence of a batch.

Of a sequence of 2c pieces rank r of c holds piece r and piece 2c-1-r, one from the front and one from the back: under a
causal mask every rank then has as many pairs of query and key as any other, 2c + 1 pieces' worth (Llama 3, Grattafiori
et al. 2024, section 3.3.2). All ranks hold all parameters, and of every gradient a summand.

=====================  ==============================  =================================================
function               forward                         backward
=====================  ==============================  =================================================
own_positions          own two pieces along ``dim``    zero elsewhere
all_positions          all-gather along ``dim``        reduce-scatter along ``dim``
sum_over_axis          all-reduce                      all-reduce
share_of               1/c of the value                1/c of the gradient
positions_attention    all-gather of keys and values   that again, and reduce-scatter of their gradients
=====================  ==============================  =================================================

``parts`` and ``block`` are those of :class:`autoplan.sharding.Shard`: a dimension that is several sequences, one after
the other, of which each is dealt out by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from autoplan.passes.operators import Communicator, current, drawn_apart, recomputing


def own_positions(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's pieces of every sequence along ``dim``; no communication."""
    return _deal(x, current().rank(axis), current().size(axis), dim, parts, block)


class _AllPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, dim: int, parts: Sequence[int], block: int) -> Tensor:
        ctx.communicator, ctx.axis, ctx.layout = current(), axis, (dim, parts, block)
        return _collect(ctx.communicator.all_gather(x.detach().contiguous(), axis), dim, parts, block)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        communicator: Communicator = ctx.communicator
        ranks = communicator.size(ctx.axis)
        pieces = [_deal(gradient, rank, ranks, *ctx.layout).contiguous() for rank in range(ranks)]
        return communicator.reduce_scatter(pieces, ctx.axis), None, None, None, None


def all_positions(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """Every rank's pieces in the order of the sequence; the gradient is a summand on every rank."""
    return _AllPositions.apply(x, axis, dim, tuple(parts), block)


class _SumOverAxis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str) -> Tensor:
        ctx.communicator, ctx.axis = current(), axis
        total = x.detach().clone(memory_format=torch.contiguous_format)
        ctx.communicator.all_reduce(total, axis)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.detach().clone(memory_format=torch.contiguous_format)
        ctx.communicator.all_reduce(total, ctx.axis)
        return total, None


def sum_over_axis(x: Tensor, axis: str) -> Tensor:
    """The sum of every rank's summand, of whose gradient every rank has a summand in turn."""
    return _SumOverAxis.apply(x, axis)


def share_of(x: Tensor, axis: str) -> Tensor:
    """A summand of a value that all ranks hold whole."""
    return x / current().size(axis)


def positions_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    axis: str,
    scale: float | None = None,
    enable_gqa: bool = False,
    heads_inside: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` of this rank's queries to the keys and values of all ranks.

    ``query`` [..., heads, length / c, width]; ``key``, ``value`` likewise; ``mask`` [..., length / c, length], the rows
    of this rank's queries. Under ``is_causal`` each of the two pieces of queries meets the keys up to its own last.
    For the backward this rank's keys and values are kept alone; those of all ranks are gathered again. With
    ``heads_inside`` the result lies in memory as [..., length / c, heads, width], as views that follow may rely on.
    """
    dim = key.dim() - 2
    local = torch.cat([key, value], -1)
    gathered = all_positions(local, axis, dim)
    keys, values = gathered.split([key.shape[-1], value.shape[-1]], -1)
    again = _GatheredAgain(local.detach(), gathered, axis, dim)
    with nullcontext() if recomputing() else saved_tensors_hooks(again.pack, again.unpack):
        result = _attend(query, keys, values, mask, dropout_p, is_causal, axis, scale, enable_gqa)
    if heads_inside:
        return result.transpose(-3, -2).contiguous().transpose(-3, -2)
    return result.contiguous()


def positions_attention_apart(*args: Any) -> Tensor:
    """:func:`positions_attention` whose dropout draws numbers of this rank's own."""
    axis = args[6]
    return drawn_apart(positions_attention, axis, *args)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    axis: str,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """This rank's queries to all keys and values."""
    if not is_causal:
        return scaled_dot_product_attention(
            query, keys, values, mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa
        )
    ranks, rank = current().size(axis), current().rank(axis)
    piece = query.shape[-2] // 2
    results = []
    for mine, place in zip(query.split(piece, -2), (rank, 2 * ranks - 1 - rank), strict=True):
        end = (place + 1) * piece
        results.append(
            scaled_dot_product_attention(
                mine,
                keys[..., :end, :],
                values[..., :end, :],
                attn_mask=causal_lower_right(piece, end),
                dropout_p=dropout_p,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        )
    return torch.cat(results, -2)


class _GatheredAgain:
    """Hooks on saved tensors: of views of ``gathered`` only their place is kept, and the backward gathers again."""

    def __init__(self, local: Tensor, gathered: Tensor, axis: str, dim: int) -> None:
        self._local, self._axis, self._dim = local, axis, dim
        self._communicator = current()
        self._storage = gathered.untyped_storage()._cdata
        self._whole: Tensor | None = None
        self._waiting = 0  # views that the backward has not asked for

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != self._storage:
            return tensor
        self._waiting += 1
        return _Place(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Place):
            return saved
        if self._whole is None:
            self._whole = _collect(self._communicator.all_gather(self._local, self._axis), self._dim, (), 0)
        view = self._whole.as_strided(saved.size, saved.stride, saved.offset)
        self._waiting -= 1
        if self._waiting <= 0:
            self._whole = None
        return view


@dataclass(frozen=True, slots=True)
class _Place:
    """A view of a tensor that is not kept."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def drawn_for_positions(operation: Callable[..., Any], axis: str, dim: int, x: Tensor, *args: Any) -> Tensor:
    """Dropout ``operation(x, *args)`` of this rank's positions: its pieces of one drawing for the whole sequence, so
    that the numbers are those of a program that does not split it."""
    shape = [size * current().size(axis) if at == dim else size for at, size in enumerate(x.shape)]
    with torch.no_grad():
        factors = operation(torch.ones(shape, dtype=x.dtype, device=x.device), *args)
    return x * own_positions(factors, axis, dim)


def _runs(size: int, parts: Sequence[int], block: int) -> tuple[int, ...]:
    """The lengths of the sequences that a whole dimension of ``size`` consists of."""
    return tuple(parts) or ((block,) * (size // block) if block else (size,))


def _deal(x: Tensor, rank: int, ranks: int, dim: int, parts: Sequence[int], block: int) -> Tensor:
    """Pieces ``rank`` and 2 x ranks - 1 - rank of every sequence along ``dim``."""
    runs = _runs(x.shape[dim], parts, block)
    if len(set(runs)) > 1:
        return torch.cat([_deal(run, rank, ranks, dim, (), 0) for run in x.split(runs, dim)], dim)
    pieces = x.unflatten(dim, (len(runs), 2 * ranks, -1))
    mine = [pieces.narrow(dim + 1, place, 1) for place in (rank, 2 * ranks - 1 - rank)]
    return torch.cat(mine, dim + 1).flatten(dim, dim + 2)


def _collect(shards: list[Tensor], dim: int, parts: Sequence[int], block: int) -> Tensor:
    """Whole sequences from every rank's pieces; inverse of :func:`_deal`."""
    ranks = len(shards)
    runs = _runs(shards[0].shape[dim] * ranks, parts, block)
    if len(set(runs)) > 1:
        split = [shard.split([run // ranks for run in runs], dim) for shard in shards]
        return torch.cat([_collect(list(run), dim, (), 0) for run in zip(*split, strict=True)], dim)
    halves = [shard.unflatten(dim, (len(runs), 2, -1)) for shard in shards]
    front = [half.narrow(dim + 1, 0, 1) for half in halves]
    back = [half.narrow(dim + 1, 1, 1) for half in reversed(halves)]
    return torch.cat([*front, *back], dim + 1).flatten(dim, dim + 2)
