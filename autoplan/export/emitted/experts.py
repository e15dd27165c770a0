"""What blocks call where the expert axis gives every rank a share of a layer's experts.

Ranks go on with their own samples. Rows that a router sends to experts stand sorted by expert, so those for one rank
stand together: they go there in one all-to-all of unequal parts, are put in order of the experts there, and the results
come back the same way (Lepikhin et al. 2021, GShard). Nothing is dropped, and an expert, or a rank, may get no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import exchange
from gradients import Gradients
from parallel import EXPERT_AXIS as AXIS
from parallel import Mesh, Spec


class Apart:
    """Gradients of parameters that are experts (``spread``) are summed over the ranks that hold the same ones, those of
    others over all data ranks; with the methods of each of the two."""

    def __init__(self, mesh: Mesh, specs: Sequence[Spec], tensors: Mapping[str, Tensor]) -> None:
        self._others = Gradients(mesh, [spec for spec in specs if not spec.spread], tensors)
        self._experts = Gradients(mesh.of_experts(), [spec for spec in specs if spec.spread], tensors)
        self.reads = {**self._others.reads, **self._experts.reads}
        self.optimised = {**self._others.optimised, **self._experts.optimised}

    def begin_step(self) -> None:
        self._others.begin_step()
        self._experts.begin_step()

    def before_backward(self, last: bool) -> None:
        self._others.before_backward(last)
        self._experts.before_backward(last)

    def finish_step(self) -> None:
        self._others.finish_step()
        self._experts.finish_step()

    def whole(self, name: str) -> Tensor:
        """A parameter (or buffer), whole over the ranks that its gradient is summed over."""
        if name not in self.optimised:
            return self.reads[name]
        return (self._others if name in self._others.optimised else self._experts).whole(name)


@torch.compiler.disable
def route_rows(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows sorted by expert, expert e's ending at ``offsets[e]``: (the offsets of this rank's experts among the rows
    that all ranks send here, and the route: how many rows this rank sends, and gets, [2, ranks, experts a rank])."""
    ends = offsets.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).contiguous()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=AXIS.group)
    route = torch.stack([counts, received]).unflatten(1, (AXIS.size, -1)).cpu()  # the exchanges' sizes depend on it
    return received.unflatten(0, (AXIS.size, -1)).sum(0).cumsum(0).to(offsets.dtype), route


def dispatch_rows(x: Tensor, route: Tensor) -> Tensor:
    """Rows [rows, ...] sorted by expert to the ranks of their experts; the result is sorted by this rank's experts."""
    return exchange(x, partial(_there, route), partial(_back, route))


def combine_rows(x: Tensor, route: Tensor) -> Tensor:
    """The inverse of :func:`dispatch_rows`: every row back where it came from."""
    return exchange(x, partial(_back, route), partial(_there, route))


@torch.compiler.disable
def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [rows, in] sorted by expert, expert e's ending at ``ends[e]``, times its of the weights [experts, in, out]:
    for where torch has no such product, as of float64."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.cat([own @ weight for own, weight in zip(rows.split(sizes), weights.unbind(), strict=True)])


def _there(route: Tensor, x: Tensor) -> Tensor:
    sent, received = route.sum(-1).tolist()
    rows = _exchanged(x, sent, received)
    counts = route[1]
    return _reordered(rows, counts.flatten().tolist(), _transposed(*counts.shape))


def _back(route: Tensor, x: Tensor) -> Tensor:
    sent, received = route.sum(-1).tolist()
    counts = route[1].T
    rows = _reordered(x, counts.flatten().tolist(), _transposed(*counts.shape))
    return _exchanged(rows, received, sent)


def _exchanged(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """``sent[r]`` rows go to rank r, one rank's after the other; of ``received[r]`` from it the result is made."""
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=AXIS.group)
    return result


def _reordered(rows: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """The runs of ``rows``, of ``sizes``, in another order."""
    runs = rows.split(sizes)
    return torch.cat([runs[place] for place in order])


def _transposed(rows: int, columns: int) -> list[int]:
    """Places of a matrix's entries, numbered row by row, column by column."""
    return [row * columns + column for column in range(columns) for row in range(rows)]
