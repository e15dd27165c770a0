"""Pipelines of stages in a row: stage s sends one value to stage s + 1 and gets its gradient back. It takes the place
of the Pipeline in parallel.py, which serves any graph of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import DEVICE, Action, Batch, Mesh


class Value(NamedTuple):
    """What a stage sends to the next. A dimension is a * samples + b long, for its (a, b) in ``sizes``."""

    sizes: tuple[tuple[int, int], ...]
    dtype: torch.dtype


class Pipeline:
    """Runs the actions of this rank: receive, compute, send; forwards keep what their backwards need.

    ``stages`` are this rank's, by their number in the model; stage s sends ``values[s]``, the last computes the loss.
    """

    def __init__(self, mesh: Mesh, stages: Mapping[int, Callable[..., Any]], values: Sequence[Value]) -> None:
        self.mesh, self.stages, self.values = mesh, stages, values
        self._here: dict[tuple[int, int, int], Tensor] = {}  # between stages of this rank
        self._posted: list[tuple[Any, Tensor]] = []

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], before_backward: Callable[..., Any]) -> Tensor:
        """The sum of this rank's loss contributions. ``batches``: (samples, inputs) of each micro-batch."""
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
        kept: dict[tuple[int, int], tuple[list[Tensor], Tensor]] = {}
        last = max(index for index, action in enumerate(actions) if action[1] == "B")
        for index, (stage, kind, micro_batch) in enumerate(actions):
            samples, inputs = batches[micro_batch]
            ends = stage == len(self.values)
            if kind == "F":
                received = [self._receive(stage - 1, stage, micro_batch, samples).requires_grad_()] if stage else []
                output = self.stages[stage](micro_batch, inputs, *received)[0]
                kept[stage, micro_batch] = (received, output)
                if ends:
                    loss += output.detach().double()
                else:
                    self._send(output.detach(), stage, stage + 1, micro_batch)
            else:
                before_backward(index == last)
                received, output = kept.pop((stage, micro_batch))
                gradient = None if ends else self._receive(stage + 1, stage, micro_batch, samples)
                if output.requires_grad:
                    torch.autograd.backward(output, gradient)
                for x in received:
                    self._send(torch.zeros_like(x) if x.grad is None else x.grad, stage, stage - 1, micro_batch)
        while self._posted:
            self._posted.pop(0)[0].wait()
        return loss

    def _send(self, tensor: Tensor, source: int, reader: int, micro_batch: int) -> None:
        if reader in self.stages:
            self._here[source, reader, micro_batch] = tensor
            return
        tensor = tensor.contiguous()
        work: Any = dist.isend(tensor, self.mesh.peer(reader), group=self.mesh.edges[source, reader], tag=micro_batch)
        self._posted = [(work, held) for work, held in self._posted if not work.is_completed()] + [(work, tensor)]

    def _receive(self, source: int, reader: int, micro_batch: int, samples: int) -> Tensor:
        if source in self.stages:
            return self._here.pop((source, reader, micro_batch))
        value = self.values[min(source, reader)]
        tensor = torch.empty([a * samples + b for a, b in value.sizes], dtype=value.dtype, device=DEVICE)
        work: Any = dist.irecv(tensor, self.mesh.peer(source), group=self.mesh.edges[source, reader], tag=micro_batch)
        work.wait()
        return tensor
