"""Data parallelism: every rank of the data axis holds all of its stage's parameters and sums their gradients.

Contributions to the loss add up over micro-batches and ranks, so gradients are summed, not averaged. They travel in
buckets, last parameters first, while the backward of the last micro-batch goes on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import Mesh, Spec, buckets, parameters, rounded


class Gradients:
    """``working`` is what the stage reads, ``optimised`` what the optimizer updates: the same but for masters."""

    def __init__(self, mesh: Mesh, specs: Sequence[Spec], tensors: Mapping[str, Tensor]) -> None:
        self.mesh, self.optimised = mesh, parameters(specs, tensors)
        self.working = self.optimised  # if PLAIN
        self.working = rounded(self.optimised, specs)  # if MASTERS
        self.reads = dict[str, Tensor](self.working)  # by the stage, with its buffers
        self._buckets = buckets(self.working) if mesh.data is not None else []
        self._sums: list[tuple[Any, Tensor, list[str]]] = []
        self._last, self._ready = False, set[str]()
        for name in (name for bucket in self._buckets for name in bucket):
            self.working[name].register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))

    @torch.no_grad()  # if MASTERS
    def begin_step(self) -> None:
        for name, master in self.optimised.items():  # if MASTERS
            self.working[name].copy_(master)  # if MASTERS
        self._last, self._sums = False, []
        self._ready.clear()

    def before_backward(self, last: bool) -> None:
        self._last = last

    def _arrived(self, name: str) -> None:
        if self._last:
            self._ready.add(name)
            while len(self._sums) < len(self._buckets) and self._ready.issuperset(self._buckets[len(self._sums)]):
                self._start()

    def _start(self) -> None:
        """Send the next bucket; what got no gradient counts as zero."""
        names = self._buckets[len(self._sums)]
        flat = torch.cat([_gradient(self.working[name]).reshape(-1) for name in names])
        self._sums.append((dist.all_reduce(flat, group=self.mesh.data, async_op=True), flat, names))

    def finish_step(self) -> None:
        """Afterwards every parameter has the gradient of the whole batch."""
        while len(self._sums) < len(self._buckets):
            self._start()
        for work, flat, names in self._sums:
            work.wait()
            pieces = flat.split([self.working[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                self.working[name].grad = piece.view_as(self.working[name])
        self._sums = []
        for name, read in self.working.items():  # if MASTERS
            if read is not (master := self.optimised[name]) and read.grad is not None:  # if MASTERS
                master.grad, read.grad = read.grad.float(), None  # if MASTERS

    def whole(self, name: str) -> Tensor:
        """A parameter (or buffer), whole over the data axis."""
        return self.optimised.get(name, self.reads[name]).detach()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
