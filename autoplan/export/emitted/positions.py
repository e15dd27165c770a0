"""What blocks call where the context axis splits sequences: collectives with the right backward.

Of a sequence of 2c pieces rank r of c holds piece r and piece 2c-1-r: under a causal mask every rank then has as many
pairs of query and key as any other (Llama 3, Grattafiori et al. 2024, section 3.3.2). All ranks of the axis hold all
parameters, and of every gradient a summand. A dimension of ``parts``, or of equal blocks of ``block``, is several
sequences, one behind the other, of which each is dealt out by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention.bias import causal_lower_right

from collectives import exchange
from parallel import CONTEXT_AXIS as AXIS


def own_positions(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """This rank's pieces of every sequence along ``dim``: no communication, zero elsewhere backward."""
    return _deal(x, AXIS.rank, dim, parts, block)


def all_positions(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """Every rank's pieces in the order of the sequence: all-gather forward, reduce-scatter backward."""
    there, back = partial(_collect, dim=dim, parts=parts, block=block), partial(_sum, dim=dim, parts=parts, block=block)
    return exchange(x, there, back)


def sum_over_axis(x: Tensor) -> Tensor:
    """The sum of every rank's summand, of whose gradient every rank has a summand: all-reduce both ways."""
    return exchange(x, _total, _total)


def share_of(x: Tensor) -> Tensor:
    """A summand of a value that all ranks hold whole."""
    return x / AXIS.size


@torch.compiler.disable
def positions_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
    heads_inside: bool = False,
) -> Tensor:
    """Attention of this rank's queries [..., heads, length / c, width] to the keys and values of all ranks.

    Under ``causal`` each of the two pieces of queries meets the keys up to its own last. For the backward this rank's
    keys and values are kept alone; those of all ranks are gathered again. With ``heads_inside`` the result lies in
    memory as [..., length / c, heads, width].
    """
    dim, local = key.dim() - 2, torch.cat([key, value], -1)
    gathered = all_positions(local, dim)
    keys, values = gathered.split([key.shape[-1], value.shape[-1]], -1)
    again = _GatheredAgain(local.detach(), gathered, dim)
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scale, enable_gqa=enable_gqa)
    # What is recomputed keeps nothing anyhow, and its own hooks must see what is saved.
    with nullcontext() if AXIS.recomputing else saved_tensors_hooks(again.pack, again.unpack):
        if causal:
            piece = query.shape[-2] // 2
            ends = [(place + 1) * piece for place in (AXIS.rank, 2 * AXIS.size - 1 - AXIS.rank)]
            pairs = [
                (mine, keys[..., :end, :], values[..., :end, :], causal_lower_right(piece, end))
                for mine, end in zip(query.split(piece, -2), ends, strict=True)
            ]
            result = torch.cat([attend(*pair) for pair in pairs], -2)
        else:
            result = attend(query, keys, values, mask)
    return result.transpose(-3, -2).contiguous().transpose(-3, -2) if heads_inside else result.contiguous()


def positions_attention_apart(*args: Any) -> Tensor:
    """The same with dropout that draws numbers of this rank's own."""
    return drawn_by_positions(positions_attention, *args)


def drawn_by_positions(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``operation`` on this rank's positions, with random numbers of its own: all ranks draw one seed."""
    number = int(torch.randint(2**62, ()).item())
    devices = [value.device for value in args if isinstance(value, Tensor) and value.is_cuda]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed((number + AXIS.rank) % 2**62)
        return operation(*args, **kwargs)


def drawn_for_positions(operation: Callable[..., Any], dim: int, x: Tensor, *args: Any) -> Tensor:
    """Dropout of this rank's positions: its pieces of one drawing for the whole sequence."""
    shape = [size * AXIS.size if at == dim else size for at, size in enumerate(x.shape)]
    with torch.no_grad():
        factors = operation(torch.ones(shape, dtype=x.dtype, device=x.device), *args)
    return x * own_positions(factors, dim)


class _Place(NamedTuple):
    """A view of a tensor that is not kept."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _GatheredAgain:
    """Hooks on saved tensors: of views of ``gathered`` only their place is kept, and the backward gathers again."""

    def __init__(self, local: Tensor, gathered: Tensor, dim: int) -> None:
        self._local, self._dim = local, dim
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
        whole = _collect(self._local, self._dim) if self._whole is None else self._whole
        self._waiting -= 1
        self._whole = whole if self._waiting > 0 else None
        return whole.as_strided(saved.size, saved.stride, saved.offset)


def _runs(size: int, parts: Sequence[int], block: int) -> tuple[int, ...]:
    """The lengths of the sequences that a whole dimension of ``size`` consists of."""
    return tuple(parts) or ((block,) * (size // block) if block else (size,))


def _deal(x: Tensor, rank: int, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    """Pieces ``rank`` and 2c - 1 - ``rank`` of every sequence along ``dim``."""
    runs = _runs(x.shape[dim], parts, block)
    if len(set(runs)) > 1:
        return torch.cat([_deal(run, rank, dim) for run in x.split(runs, dim)], dim)
    pieces = x.unflatten(dim, (len(runs), 2 * AXIS.size, -1))
    mine = [pieces.narrow(dim + 1, place, 1) for place in (rank, 2 * AXIS.size - 1 - rank)]
    return torch.cat(mine, dim + 1).flatten(dim, dim + 2)


def _joined(shards: list[Tensor], dim: int, parts: Sequence[int], block: int) -> Tensor:
    """Whole sequences from every rank's pieces."""
    runs = _runs(shards[0].shape[dim] * AXIS.size, parts, block)
    if len(set(runs)) > 1:
        split = [shard.split([run // AXIS.size for run in runs], dim) for shard in shards]
        return torch.cat([_joined(list(run), dim, (), 0) for run in zip(*split, strict=True)], dim)
    halves = [shard.unflatten(dim, (len(runs), 2, -1)) for shard in shards]
    front = [half.narrow(dim + 1, 0, 1) for half in halves]
    back = [half.narrow(dim + 1, 1, 1) for half in reversed(halves)]
    return torch.cat([*front, *back], dim + 1).flatten(dim, dim + 2)


def _collect(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(AXIS.size)]
    dist.all_gather(shards, x.contiguous(), group=AXIS.group)
    return _joined(shards, dim, parts, block)


def _sum(x: Tensor, dim: int, parts: Sequence[int] = (), block: int = 0) -> Tensor:
    pieces = [_deal(x, rank, dim, parts, block).contiguous() for rank in range(AXIS.size)]
    total = torch.empty_like(pieces[0])
    dist.reduce_scatter(total, pieces, group=AXIS.group)
    return total


def _total(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=AXIS.group)
    return total
