"""Run a rank's actions: the very lists of :mod:`autoplan.schedules` that the simulator prices.

Forward of a micro-batch: receive the values that earlier stages computed, run the stage's graph, send each result to
every stage that reads it. Backward: receive the gradient of each result from each of its readers, sum them, run
autograd, send the gradients of what was received. A micro-batch's activations live from its forward to its backward
and no longer; in a backward of two parts what the weights' gradients need lives on to the second. What goes from one
stage to another of the same rank is handed over, not sent. Sizes follow each micro-batch, so they may be uneven, and
there may be fewer of them than stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.passes.operators import Communicator, communicating
from autoplan.passes.split_stages import StageGraph, Value
from autoplan.passes.weight_gradients import WeightGradients, putting_aside
from autoplan.runtime.collectives import Channels
from autoplan.runtime.faults import RankFault, action_fault
from autoplan.runtime.progress import WATCH
from autoplan.runtime.waits import WAITS
from autoplan.schedules import Action

_WORDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """``samples`` rows; ``inputs`` by placeholder name (the batch's tensors and the loss totals)."""

    samples: int
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One of a rank's stages. ``adds``: by kind of action ("B", or "I" and "W") the parameters to which it adds
    gradients, by the user's names."""

    stage: StageGraph
    adds: Mapping[str, frozenset[str]]


@dataclass(slots=True)
class _InFlight:
    """What a micro-batch keeps between its forward and its backward."""

    received: list[tuple[Value, Tensor]]
    sent: list[tuple[Value, Tensor]]
    loss: Tensor | None
    weights: WeightGradients


@dataclass(slots=True)
class _Pending:
    """Sends on their way, with the tensors that must live until they have left."""

    sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def add(self, work: dist.Work, tensor: Tensor) -> None:
        self.sends = [(w, t) for w, t in self.sends if not w.is_completed()]
        self.sends.append((work, tensor))

    def wait(self) -> None:
        if self.sends:
            with WAITS.during("pipeline"):
                for work, _ in self.sends:
                    work.wait()
        self.sends = []


class RankInterpreter:
    """Executes the actions of one rank on the stages that it holds.

    ``channels`` is None where no other rank holds a stage. ``around_forward(stage, micro_batch)`` is entered around
    each run of a stage's graph. ``before_backward(adds, last)`` is called ahead of each action that adds gradients: to
    which parameters, and to which of them no later action of the step adds any more. ``peak_in_flight`` is the most
    micro-batches (of all stages together) whose activations were held at once in the latest run.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        rank: int,
        device: torch.device,
        channels: Channels | None,
        communicator: Communicator | None,
        around_forward: Callable[[int, int], AbstractContextManager[None]],
        before_backward: Callable[[frozenset[str], frozenset[str]], None],
    ) -> None:
        self.chunks = {chunk.stage.index: chunk for chunk in chunks}
        self.rank, self.device = rank, device
        self.peak_in_flight = 0
        self.loss_scale = 1.0  # what gradients are multiplied by: see autoplan.runtime.scaling
        self._channels, self._communicator = channels, communicator
        self._around_forward, self._before_backward = around_forward, before_backward

    def run(self, actions: Sequence[Action], micro_batches: Sequence[MicroBatch], *, step: int) -> Tensor:
        """The sum of the loss contributions of this rank's micro-batches, 0-dim float64; 0 but on the last stage.

        Gradients accumulate into the stages' parameters. Raises RuntimeFault naming rank, step, stage, micro-batch,
        action and operator, the original chained.
        """
        last = self._last_to_add(actions)
        awaited = {(action.stage, action.micro_batch) for action in actions if action.kind in "BI"}
        run = _Run(micro_batches, loss=torch.zeros((), dtype=torch.float64, device=self.device))
        self.peak_in_flight = 0
        with self._installed():
            for index, action in enumerate(actions):
                with self._naming(step, action.stage, action.micro_batch, _WORDS[action.kind]):
                    if action.kind == "F":
                        self._forward(action, run)
                        if (action.stage, action.micro_batch) not in awaited:  # an evaluation keeps nothing
                            del run.in_flight[action.stage, action.micro_batch]
                    elif action.kind == "W":
                        self._weight_gradients(action, run, last[index])
                    else:
                        self._backward(action, run, last[index])
                self.peak_in_flight = max(self.peak_in_flight, len(run.in_flight))
            with self._naming(step, actions[-1].stage if actions else 0, None, "send"):
                run.pending.wait()
        return run.loss

    def of_forwards(
        self, stages: Sequence[StageGraph], around_forward: Callable[[int, int], AbstractContextManager[None]]
    ) -> RankInterpreter:
        """Of other graphs of the same stages, over the same channels, for lists without a backward."""
        return RankInterpreter(
            [Chunk(stage=stage, adds={}) for stage in stages],
            rank=self.rank,
            device=self.device,
            channels=self._channels,
            communicator=self._communicator,
            around_forward=around_forward,
            before_backward=self._before_backward,
        )

    def _last_to_add(self, actions: Sequence[Action]) -> list[frozenset[str]]:
        """For each action the parameters to which it is the last to add gradients."""
        seen: set[str] = set()
        done: set[tuple[int, str]] = set()
        found = [frozenset[str]()] * len(actions)
        for index in range(len(actions) - 1, -1, -1):
            stage, kind, _ = actions[index]
            if kind != "F" and (stage, kind) not in done:
                done.add((stage, kind))
                found[index] = self.chunks[stage].adds[kind] - seen
                seen |= found[index]
        return found

    def _installed(self) -> AbstractContextManager[None]:
        return communicating(self._communicator) if self._communicator is not None else nullcontext()

    @contextmanager
    def _naming(self, step: int, stage: int, micro_batch: int | None, action: str) -> Any:
        graph = self.chunks[stage].stage.graph_module
        WATCH.main.mark(action, step=step, stage=stage, micro_batch=micro_batch, graph=graph)
        try:
            yield
        except RankFault:
            raise
        except Exception as error:
            raise action_fault(
                error,
                rank=self.rank,
                step=step,
                stage=stage,
                micro_batch=micro_batch,
                action=action,
                graph_module=graph,
            ) from error

    # --------------------------------------------------------------------------------------------------------- forward

    def _forward(self, action: Action, run: _Run) -> None:
        stage, index = self.chunks[action.stage].stage, action.micro_batch
        micro_batch = run.micro_batches[index]
        received = self._receive(stage, index, run)
        inputs = [micro_batch.inputs[name] for name in stage.batch_inputs]
        weights = WeightGradients()
        with self._around_forward(action.stage, index), putting_aside(weights):
            outputs = stage.graph_module(*inputs, *(tensor for _, tensor in received))
        sent = list(zip(stage.sends, outputs, strict=False))
        loss = outputs[-1] if stage.returns_loss else None
        for value, output in sent:
            self._send(value, output, index, run)
        if loss is not None:
            run.loss += loss.detach().double()
        run.in_flight[action.stage, index] = _InFlight(received, sent, loss, weights)

    def _receive(self, stage: StageGraph, index: int, run: _Run) -> list[tuple[Value, Tensor]]:
        samples = run.micro_batches[index].samples
        posted: list[tuple[Value, Tensor, dist.Work | None]] = []
        for value in stage.receives:
            handed = run.handed.pop(("forward", value.name, stage.index, index), None)
            if handed is not None:
                posted.append((value, handed, None))
                continue
            assert self._channels is not None
            shape = value.shape(samples)
            memory = torch.empty([shape[d] for d in value.order], dtype=value.dtype, device=self.device)
            work = self._channels.receive(memory, value, at=stage.index, micro_batch=index)
            posted.append((value, memory, work))
        received = []
        for value, memory, arrival in posted:
            if arrival is not None:
                with WAITS.during("pipeline"):
                    arrival.wait()
            tensor = memory.permute([value.order.index(d) for d in range(memory.dim())])
            received.append((value, tensor.requires_grad_(value.differentiable)))
        return received

    def _send(self, value: Value, output: Tensor, index: int, run: _Run) -> None:
        _check_shape(value, output, run.micro_batches[index].samples)
        tensor = output.detach().permute(value.order).contiguous()
        for destination in value.destinations:
            if destination in self.chunks:
                run.handed["forward", value.name, destination, index] = tensor.detach()
                continue
            assert self._channels is not None
            work = self._channels.send(tensor, value, destination=destination, micro_batch=index)
            run.pending.add(work, tensor)

    # -------------------------------------------------------------------------------------------------------- backward

    def _backward(self, action: Action, run: _Run, last: frozenset[str]) -> None:
        chunk, index = self.chunks[action.stage], action.micro_batch
        held = run.in_flight.pop((action.stage, index))
        roots: list[tuple[Tensor, Tensor]] = []
        if held.loss is not None and held.loss.requires_grad:
            roots.append((held.loss, torch.full_like(held.loss, self.loss_scale)))
        for (_, output), gradient in zip(held.sent, self._receive_gradients(held, index, run), strict=True):
            if gradient is not None and output.requires_grad:
                roots.append((output, gradient))
        self._before_backward(chunk.adds[action.kind], last)
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        for value, tensor in held.received:
            if value.differentiable:
                gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                self._send_gradient(value, gradient.contiguous(), action, run)
        if action.kind == "I":
            run.weights[action.stage, index] = held.weights
        else:
            held.weights.compute()

    def _weight_gradients(self, action: Action, run: _Run, last: frozenset[str]) -> None:
        self._before_backward(self.chunks[action.stage].adds["W"], last)
        run.weights.pop((action.stage, action.micro_batch)).compute()

    def _send_gradient(self, value: Value, gradient: Tensor, action: Action, run: _Run) -> None:
        stage, index = action.stage, action.micro_batch
        if value.source in self.chunks:
            run.handed["backward", value.name, stage, index] = gradient
            return
        assert self._channels is not None
        work = self._channels.send_gradient(gradient, value, at=stage, micro_batch=index)
        run.pending.add(work, gradient)

    def _receive_gradients(self, held: _InFlight, index: int, run: _Run) -> list[Tensor | None]:
        """For each value sent: the sum of its readers' gradients, in the order of stages; None without any."""
        posted: list[list[tuple[Tensor, dist.Work | None]]] = []
        for value, output in held.sent:
            posted.append([])
            for destination in value.destinations if value.differentiable else ():
                handed = run.handed.pop(("backward", value.name, destination, index), None)
                if handed is not None:
                    posted[-1].append((handed, None))
                    continue
                assert self._channels is not None
                buffer = torch.empty(output.shape, dtype=output.dtype, device=output.device)
                work = self._channels.receive_gradient(buffer, value, destination=destination, micro_batch=index)
                posted[-1].append((buffer, work))
        sums: list[Tensor | None] = []
        for parts in posted:
            for _, arrival in parts:
                if arrival is not None:
                    with WAITS.during("pipeline"):
                        arrival.wait()
            # What was handed over may be kept by others, so a sum is a tensor of its own.
            sums.append(functools.reduce(torch.add, [buffer for buffer, _ in parts]) if parts else None)
        return sums


class _Run:
    """One step's state. ``in_flight`` and ``weights`` by stage and micro-batch; ``handed``: what one stage of this rank
    left for another, by direction, value, reading stage and micro-batch."""

    def __init__(self, micro_batches: Sequence[MicroBatch], *, loss: Tensor) -> None:
        self.micro_batches, self.loss = micro_batches, loss
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self.weights: dict[tuple[int, int], WeightGradients] = {}
        self.handed: dict[tuple[str, str, int, int], Tensor] = {}
        self.pending = _Pending()


def _check_shape(value: Value, tensor: Tensor, samples: int) -> None:
    """A message of another size than its reader expects aborts the process in gloo and hangs NCCL: stop here."""
    expected = value.shape(samples)
    if tuple(tensor.shape) != expected or tensor.dtype != value.dtype:
        raise ValueError(
            f"`{value.name}` is {tuple(tensor.shape)} {tensor.dtype}, and its readers expect {expected} {value.dtype}"
        )
