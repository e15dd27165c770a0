"""What graphs call where the expert axis gives every rank a share of a layer's experts.

Ranks go on with their own samples. Rows that a router sends to experts stand sorted by expert, so those for one rank
stand together: they go there in one all-to-all of unequal parts, are put in order of the experts there, and the results
come back the same way (Lepikhin et al. 2021, GShard). Nothing is dropped, and an expert, or a rank, may get no row.

==============  ===========================================  ====================
function        forward                                      backward
==============  ===========================================  ====================
route_rows      all-to-all of counts                         none (whole numbers)
dispatch_rows   all-to-all to the experts' ranks, in order   combine_rows
combine_rows    the way back, in the order before            dispatch_rows
==============  ===========================================  ====================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoplan.passes.operators import Communicator, current


def route_rows(offsets: Tensor, axis: str) -> tuple[Tensor, Tensor]:
    """Of rows sorted by expert, expert e's ending at ``offsets[e]``: (the offsets of this rank's experts among the rows
    that all ranks send here, and the route: how many rows this rank sends, and gets, [2, ranks, experts a rank]).

    The route is on the CPU, because the sizes of the exchanges depend on it.
    """
    communicator = current()
    ends = offsets.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).contiguous()
    ranks = communicator.size(axis)
    each = counts.numel() // ranks
    sizes = [each] * ranks
    received = communicator.all_to_all(counts, sizes, sizes, axis).view(ranks, each)
    route = torch.stack([counts.view(ranks, each), received]).cpu()
    return received.sum(0).cumsum(0).to(offsets.dtype), route


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Tensor, axis: str) -> Tensor:
        ctx.communicator, ctx.route, ctx.axis = current(), route, axis
        return _there(x.detach(), route, ctx.communicator, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _back(gradient, ctx.route, ctx.communicator, ctx.axis), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Tensor, axis: str) -> Tensor:
        ctx.communicator, ctx.route, ctx.axis = current(), route, axis
        return _back(x.detach(), route, ctx.communicator, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _there(gradient, ctx.route, ctx.communicator, ctx.axis), None, None


def dispatch_rows(x: Tensor, route: Tensor, axis: str) -> Tensor:
    """Rows [rows, ...] sorted by expert to the ranks of their experts; the result is sorted by this rank's experts."""
    return _Dispatch.apply(x, route, axis)


def combine_rows(x: Tensor, route: Tensor, axis: str) -> Tensor:
    """The inverse of :func:`dispatch_rows`: every row back where it came from."""
    return _Combine.apply(x, route, axis)


def _there(x: Tensor, route: Tensor, communicator: Communicator, axis: str) -> Tensor:
    sent, received = route.sum(-1).tolist()
    rows = communicator.all_to_all(x.contiguous(), sent, received, axis)
    counts = route[1]
    return _reordered(rows, counts.flatten().tolist(), _transposed(*counts.shape))


def _back(x: Tensor, route: Tensor, communicator: Communicator, axis: str) -> Tensor:
    sent, received = route.sum(-1).tolist()
    counts = route[1]
    rows = _reordered(x, counts.T.flatten().tolist(), _transposed(*counts.T.shape))
    return communicator.all_to_all(rows.contiguous(), received, sent, axis)


def _reordered(rows: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """The runs of ``rows``, of ``sizes``, in another order."""
    runs = rows.split(sizes)
    return torch.cat([runs[place] for place in order])


def _transposed(rows: int, columns: int) -> list[int]:
    """Places of a matrix's entries, numbered row by row, column by column."""
    return [row * columns + column for column in range(columns) for row in range(rows)]
