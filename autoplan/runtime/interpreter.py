"""Run a stage's actions: the very lists of :mod:`autoplan.schedules` that the simulator prices.

Forward of a micro-batch: receive the values that earlier stages computed, run the stage's graph, send each result to
every stage that reads it. Backward: receive the gradient of each result from each of its readers, sum them, run
autograd, send the gradients of what was received. A micro-batch's activations live from its forward to its backward
and no longer. Sizes follow each micro-batch, so they may be uneven, and there may be fewer of them than stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.passes.operators import Communicator, communicating
from autoplan.passes.split_stages import StageGraph, Value
from autoplan.runtime.collectives import Channels
from autoplan.runtime.faults import RankFault, action_fault
from autoplan.schedules import Action

_WORDS = {"F": "forward", "B": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """``samples`` rows; ``inputs`` by placeholder name (the batch's tensors and the loss totals)."""

    samples: int
    inputs: Mapping[str, Tensor]


@dataclass(slots=True)
class _InFlight:
    """What a micro-batch keeps between its forward and its backward."""

    received: list[tuple[Value, Tensor]]
    sent: list[tuple[Value, Tensor]]
    loss: Tensor | None


@dataclass(slots=True)
class _Pending:
    """Sends on their way, with the tensors that must live until they have left."""

    sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        self.sends = [(w, t) for w, t in self.sends if not w.is_completed()]
        self.sends.append((work, tensor))

    def wait(self) -> None:
        for work, _ in self.sends:
            work.wait()
        self.sends = []


class StageInterpreter:
    """Executes the actions of one stage on one rank.

    ``channels`` is None for a single stage, which communicates with no other. ``around_forward(micro_batch)`` is
    entered around each run of the stage's graph. ``before_backward(last)`` is called ahead of each backward; ``last``
    says that no other follows in this step. ``peak_in_flight`` is the most micro-batches whose activations were held at
    once in the latest run.
    """

    def __init__(
        self,
        stage: StageGraph,
        *,
        rank: int,
        device: torch.device,
        channels: Channels | None,
        communicator: Communicator | None,
        around_forward: Callable[[int], AbstractContextManager[None]],
        before_backward: Callable[[bool], None],
    ) -> None:
        self.stage, self.rank, self.device = stage, rank, device
        self.peak_in_flight = 0
        self._channels, self._communicator = channels, communicator
        self._around_forward, self._before_backward = around_forward, before_backward

    def run(self, actions: Sequence[Action], micro_batches: Sequence[MicroBatch], *, step: int) -> Tensor:
        """The sum of the loss contributions of this rank's micro-batches, 0-dim float64; 0 but on the last stage.

        Gradients accumulate into the stage's parameters. Raises RuntimeFault naming rank, step, stage, micro-batch,
        action and operator, the original chained.
        """
        last = max((index for index, action in enumerate(actions) if action.kind == "B"), default=-1)
        run = _Run(micro_batches, loss=torch.zeros((), dtype=torch.float64, device=self.device))
        self.peak_in_flight = 0
        with self._installed():
            for index, action in enumerate(actions):
                with self._naming(step, action.micro_batch, _WORDS[action.kind]):
                    if action.kind == "F":
                        self._forward(action.micro_batch, run)
                    else:
                        self._backward(action.micro_batch, run, last=index == last)
                self.peak_in_flight = max(self.peak_in_flight, len(run.in_flight))
            with self._naming(step, None, "send"):
                run.pending.wait()
        return run.loss

    def _installed(self) -> AbstractContextManager[None]:
        return communicating(self._communicator) if self._communicator is not None else nullcontext()

    @contextmanager
    def _naming(self, step: int, micro_batch: int | None, action: str) -> Any:
        try:
            yield
        except RankFault:
            raise
        except Exception as error:
            raise action_fault(
                error,
                rank=self.rank,
                step=step,
                stage=self.stage.index,
                micro_batch=micro_batch,
                action=action,
                graph_module=self.stage.graph_module,
            ) from error

    def _forward(self, index: int, run: _Run) -> None:
        micro_batch = run.micro_batches[index]
        received = self._receive(index, micro_batch.samples)
        inputs = [micro_batch.inputs[name] for name in self.stage.batch_inputs]
        with self._around_forward(index):
            outputs = self.stage.graph_module(*inputs, *(tensor for _, tensor in received))
        sent = list(zip(self.stage.sends, outputs, strict=False))
        loss = outputs[-1] if self.stage.returns_loss else None
        for value, output in sent:
            self._send(value, output, index, run)
        if loss is not None:
            run.loss += loss.detach().double()
        run.in_flight[index] = _InFlight(received, sent, loss)

    def _receive(self, index: int, samples: int) -> list[tuple[Value, Tensor]]:
        posted = []
        for value in self.stage.receives:
            assert self._channels is not None
            shape = value.shape(samples)
            memory = torch.empty([shape[d] for d in value.order], dtype=value.dtype, device=self.device)
            work = self._channels.receive(memory, value, at=self.stage.index, micro_batch=index)
            posted.append((value, memory, work))
        received = []
        for value, memory, work in posted:
            work.wait()
            tensor = memory.permute([value.order.index(d) for d in range(memory.dim())])
            received.append((value, tensor.requires_grad_(value.differentiable)))
        return received

    def _send(self, value: Value, output: Tensor, index: int, run: _Run) -> None:
        assert self._channels is not None
        _check_shape(value, output, run.micro_batches[index].samples)
        tensor = output.detach().permute(value.order).contiguous()
        for destination in value.destinations:
            work = self._channels.send(tensor, value, destination=destination, micro_batch=index)
            run.pending.add(work, tensor)

    def _backward(self, index: int, run: _Run, *, last: bool) -> None:
        held = run.in_flight.pop(index)
        roots: list[tuple[Tensor, Tensor]] = []
        if held.loss is not None and held.loss.requires_grad:
            roots.append((held.loss, torch.ones_like(held.loss)))
        for (_, output), gradient in zip(held.sent, self._receive_gradients(held, index), strict=True):
            if gradient is not None and output.requires_grad:
                roots.append((output, gradient))
        self._before_backward(last)
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        for value, tensor in held.received:
            if value.differentiable:
                assert self._channels is not None
                gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                gradient = gradient.contiguous()
                work = self._channels.send_gradient(gradient, value, at=self.stage.index, micro_batch=index)
                run.pending.add(work, gradient)

    def _receive_gradients(self, held: _InFlight, index: int) -> list[Tensor | None]:
        """For each value sent: the sum of its readers' gradients, in the order of stages; None without any."""
        posted: list[list[tuple[Tensor, dist.Work]]] = []
        for value, output in held.sent:
            assert self._channels is not None
            posted.append([])
            for destination in value.destinations if value.differentiable else ():
                buffer = torch.empty(output.shape, dtype=output.dtype, device=output.device)
                work = self._channels.receive_gradient(buffer, value, destination=destination, micro_batch=index)
                posted[-1].append((buffer, work))
        sums: list[Tensor | None] = []
        for parts in posted:
            for _, work in parts:
                work.wait()
            for buffer, _ in parts[1:]:
                parts[0][0].add_(buffer)
            sums.append(parts[0][0] if parts else None)
        return sums


class _Run:
    """One step's state."""

    def __init__(self, micro_batches: Sequence[MicroBatch], *, loss: Tensor) -> None:
        self.micro_batches, self.loss = micro_batches, loss
        self.in_flight: dict[int, _InFlight] = {}
        self.pending = _Pending()


def _check_shape(value: Value, tensor: Tensor, samples: int) -> None:
    """A message of another size than its reader expects aborts the process in gloo and hangs NCCL: stop here."""
    expected = value.shape(samples)
    if tuple(tensor.shape) != expected or tensor.dtype != value.dtype:
        raise ValueError(
            f"`{value.name}` is {tuple(tensor.shape)} {tensor.dtype}, and its readers expect {expected} {value.dtype}"
        )
