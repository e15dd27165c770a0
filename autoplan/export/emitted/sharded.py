"""Sharded optimizer state: rank d of the data axis optimises the d-th slice of every parameter, flattened and padded;
gradients are reduce-scattered after the last micro-batch, a step begins by gathering the slices (ZeRO-1).  # if LAST
gradients are reduce-scattered after every micro-batch, a step begins by gathering the slices (ZeRO-2).  # if EVERY
Optimizers that work element by element (SGD, Adam, AdamW) compute the same numbers on slices as on whole parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel import Mesh, Spec, buckets, parameters, rounded


class Gradients:
    """``working`` is what the stage reads, ``optimised`` this rank's slices, for the optimizer."""

    def __init__(self, mesh: Mesh, specs: Sequence[Spec], tensors: Mapping[str, Tensor]) -> None:
        self.mesh, held = mesh, parameters(specs, tensors)
        self.working = held  # if PLAIN
        self.working = rounded(held, specs)  # if MASTERS
        self.reads = dict[str, Tensor](self.working)  # by the stage, with its buffers
        mine = {name: self._rows(p)[mesh.data_rank] for name, p in held.items() if p.requires_grad}
        self.optimised = {name: nn.Parameter(row.clone()) for name, row in mine.items()}
        self._buckets = buckets(self.working)
        self._sums: dict[str, Tensor] = {}
        self._sent: list[tuple[Any, Tensor, list[str]]] = []
        self._started, self._ready = len(self._buckets), set[str]()
        for name in self.optimised:
            self.working[name].register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))

    def _rows(self, tensor: Tensor) -> Tensor:
        """Flattened and padded; row d belongs to rank d."""
        flat = tensor.detach().reshape(-1)
        return F.pad(flat, (0, -flat.numel() % self.mesh.degrees[1])).view(self.mesh.degrees[1], -1)

    @torch.no_grad()
    def begin_step(self) -> None:
        """Working parameters from all ranks' slices."""
        for names in self._buckets:
            dtype = self.working[names[0]].dtype  # if MASTERS
            mine = torch.cat([self.optimised[name].detach().to(dtype) for name in names])  # if MASTERS
            mine = torch.cat([self.optimised[name].detach() for name in names])  # if PLAIN
            everyone = mine.new_empty(self.mesh.degrees[1], mine.numel())
            dist.all_gather_into_tensor(everyone.view(-1), mine, group=self.mesh.data)
            columns = everyone.split([self.optimised[name].numel() for name in names], dim=1)
            for whole, column in zip((self.working[name] for name in names), columns, strict=True):
                whole.copy_(column.reshape(-1)[: whole.numel()].view_as(whole))
        self._sums, self._started = {}, len(self._buckets)

    def before_backward(self, last: bool) -> None:
        self._flush()
        self._started = 0 if last else len(self._buckets)  # if LAST
        self._started = 0  # if EVERY
        self._ready.clear()

    def _arrived(self, name: str) -> None:
        self._ready.add(name)
        while self._started < len(self._buckets) and self._ready.issuperset(self._buckets[self._started]):
            self._start()

    def _start(self) -> None:
        names, rows = self._buckets[self._started], []
        for name in names:
            gradient = self.working[name].grad
            rows.append(self._rows(torch.zeros_like(self.working[name]) if gradient is None else gradient))
            self.working[name].grad = None
        matrix = torch.cat(rows, dim=1)
        mine = matrix.new_empty(matrix.shape[1])
        work = dist.reduce_scatter_tensor(mine, matrix.view(-1), group=self.mesh.data, async_op=True)
        self._sent.append((work, mine, names))
        self._started += 1

    def _flush(self) -> None:
        while self._started < len(self._buckets):
            self._start()
        for work, mine, names in self._sent:
            work.wait()
            pieces = mine.split([self.optimised[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                self._sums[name] = self._sums[name].add_(piece) if name in self._sums else piece
        self._sent = []

    def finish_step(self) -> None:
        """Afterwards every slice has its gradient of the whole batch."""
        self._flush()
        for name, total in self._sums.items():
            self.optimised[name].grad = total  # if PLAIN
            self.optimised[name].grad = total.to(self.optimised[name].dtype)  # if MASTERS

    def whole(self, name: str) -> Tensor:
        """A parameter (or buffer), whole over the data axis."""
        if (mine := self.optimised.get(name)) is None:
            return self.reads[name].detach()
        everyone = mine.new_empty(self.mesh.degrees[1] * mine.numel())
        dist.all_gather_into_tensor(everyone, mine.detach(), group=self.mesh.data)
        return everyone[: self.working[name].numel()].view_as(self.working[name])
