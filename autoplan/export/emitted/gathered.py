"""Sharded parameters (ZeRO-3): between uses rank d of the data axis holds the d-th slice of every parameter alone.

A block's parameters are gathered when it starts, forward and, where the block is recomputed, backward; their gradients
are reduce-scattered as soon as they are made. Without recompute the gathered parameters live until the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel import Mesh, Parameters, Spec, parameters, rounded


class Slices(dict[str, Tensor]):
    """This rank's slices (and the stage's buffers) by name, with what makes them whole."""

    mesh: Mesh
    shapes: dict[Tensor, torch.Size]  # of the whole parameters


class Gradients:
    """``optimised`` are this rank's slices; :func:`gathers` makes them whole for a block."""

    def __init__(self, mesh: Mesh, specs: Sequence[Spec], tensors: Mapping[str, Tensor]) -> None:
        self.reads = Slices()  # by the stage, with its buffers
        self.reads.mesh, self.reads.shapes = mesh, {}
        self.optimised: dict[str, nn.Parameter] = {}
        held = parameters(specs, tensors)
        for name, parameter in held.items():
            mine = _rows(parameter, mesh)[mesh.data_rank].clone()
            self.optimised[name] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
        self._working = self.optimised  # if PLAIN
        self._working = rounded(self.optimised, specs)  # if MASTERS
        for name, mine in self._working.items():
            self.reads[name], self.reads.shapes[mine] = mine, held[name].shape

    @torch.no_grad()  # if MASTERS
    def begin_step(self) -> None:
        """Nothing is kept between steps but the slices."""  # if PLAIN
        for name, master in self.optimised.items():  # if MASTERS
            self._working[name].copy_(master)  # if MASTERS

    def finish_step(self) -> None:
        """The slices have their gradients already."""  # if PLAIN
        for name, read in self._working.items():  # if MASTERS
            if read is not (master := self.optimised[name]) and read.grad is not None:  # if MASTERS
                master.grad, read.grad = read.grad.float(), None  # if MASTERS

    def before_backward(self, last: bool) -> None:
        """Every backward scatters what it makes."""

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter (or buffer), whole over the data axis."""
        if name not in self.optimised:
            return self.reads[name]
        shape = self.reads.shapes[self._working[name]]
        return _Gather.apply(self.reads.mesh, [shape], self.optimised[name])[0]


class _Gather(torch.autograd.Function):
    """Slices of one dtype to whole parameters; their gradients back to sums of slices."""

    @staticmethod
    def forward(ctx: Any, mesh: Mesh, shapes: list[torch.Size], *slices: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        mine = torch.cat([each.detach() for each in slices])
        everyone = mine.new_empty(mesh.degrees[1], mine.numel())
        dist.all_gather_into_tensor(everyone.view(-1), mine, group=mesh.data)
        columns = everyone.split([each.numel() for each in slices], dim=1)
        return tuple(c.reshape(-1)[: s.numel()].view(s).clone() for c, s in zip(columns, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = [_rows(gradient, ctx.mesh) for gradient in gradients]
        matrix = torch.cat(rows, dim=1)
        mine = matrix.new_empty(matrix.shape[1])
        dist.reduce_scatter_tensor(mine, matrix.view(-1), group=ctx.mesh.data)
        return None, None, *mine.split([row.shape[1] for row in rows])


def _whole(root: Slices, names: list[str]) -> dict[str, Tensor]:
    answer: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(root[name].dtype for name in names):
        alike = [name for name in names if root[name].dtype == dtype]
        slices = [root[name] for name in alike]
        whole = _Gather.apply(root.mesh, [root.shapes[each] for each in slices], *slices)
        answer |= zip(alike, whole, strict=True)
    return answer


def gathers(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Around a block: the parameters that it reads, by their names in it (or "/" and the full name), made whole."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(p: Parameters, *arguments: Any) -> Any:
            assert isinstance(p.root, Slices)
            full = [name[1:] if name.startswith("/") else p.prefix + name for name in names]
            return function(Parameters({**p.root, **_whole(p.root, full)}, p.prefix), *arguments)

        return run

    return around


def _rows(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Flattened and padded; row d belongs to rank d."""
    flat = tensor.detach().reshape(-1)
    return F.pad(flat, (0, -flat.numel() % mesh.degrees[1])).view(mesh.degrees[1], -1)
