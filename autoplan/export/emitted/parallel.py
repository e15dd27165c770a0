"""How the ranks work together: mesh, pipeline, checkpoints. Needs torch and nothing else.

Ranks are numbered with the tensor axis innermost, then data, then pipeline: rank = (pipeline * D + data) * T + tensor.
Stage s of the model stands on pipeline rank s mod P, so that a rank may hold several.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Split:
    """Rank t of the tensor axis holds the t-th slice along ``dim`` of every run: of the whole dimension, of ``parts``
    that stand one behind the other (packed q, k, v), or of equal blocks of ``block``."""

    dim: int
    parts: tuple[int, ...] = ()
    block: int = 0

    def runs(self, size: int) -> tuple[int, ...]:
        return self.parts or ((self.block,) * (size // self.block) if self.block else (size,))


@dataclass(frozen=True)
class Spec:
    """A parameter (or buffer) of a stage under the model's own name, with its whole shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: Split | None = None
    trainable: bool = True
    is_parameter: bool = True
    summed: bool = False  # every tensor rank finds a summand of its gradient


@dataclass(frozen=True)
class Input:
    """A tensor of the batch; its first dimension counts samples where ``batched``. Integers are below ``below``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool
    below: int = 2


@dataclass(frozen=True)
class Stage:
    """``run(p, batch, *layers, *received)``: the values to send, in order, and on the last stage the loss.
    ``layers``: for each loop of it the first layer and the one past the last."""

    run: Callable[..., tuple[Tensor, ...]]
    layers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Value:
    """A tensor that stage ``source`` computes and sends to ``readers``. A dimension is a * samples + b long, for its
    (a, b) in ``sizes``; ``order`` lists the dimensions from the outermost in memory to the innermost."""

    name: str
    source: int
    readers: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


class Parameters(Mapping[str, Tensor]):
    """The tensors of one block under their names inside it; ``root`` holds all under their full names."""

    def __init__(self, root: Mapping[str, Tensor], prefix: str = "") -> None:
        self.root, self.prefix = root, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.root[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name[len(self.prefix) :] for name in self.root if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def of(self, prefix: str) -> Parameters:
        return Parameters(self.root, prefix)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Keep the arguments alone and run ``function`` again in the backward."""
    return checkpoint(function, *arguments, use_reentrant=False)


@dataclass
class Axis:
    """Where this rank stands on an axis of the mesh, and whom its collectives talk to."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1


TENSOR_AXIS = Axis()  # set by the mesh


class Mesh:
    """Where this rank stands, and its groups."""

    def __init__(self, pipeline: int, data: int, tensor: int, edges: Iterable[tuple[int, int]]) -> None:
        if not dist.is_initialized():
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", "29512")
            rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
            backend = "nccl" if DEVICE.type == "cuda" else "gloo"
            dist.init_process_group(backend, rank=rank, world_size=world, timeout=timedelta(minutes=10))
        if dist.get_world_size() != pipeline * data * tensor:
            raise SystemExit(f"this program runs on {pipeline * data * tensor} ranks, not {dist.get_world_size()}")
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        self.degrees = (pipeline, data, tensor)
        outer, self.tensor_rank = divmod(dist.get_rank(), tensor)
        self.pipeline_rank, self.data_rank = divmod(outer, data)
        # Every rank makes every group, in one order. A directed edge has its own: NCCL runs a communicator in order.
        self.tensor = self._groups(
            [[self.at(p, d, t) for t in range(tensor)] for p in range(pipeline) for d in range(data)]
        )
        TENSOR_AXIS.group, TENSOR_AXIS.rank, TENSOR_AXIS.size = self.tensor, self.tensor_rank, tensor
        self.data = self._groups(
            [[self.at(p, d, t) for d in range(data)] for p in range(pipeline) for t in range(tensor)]
        )
        columns = [(d, t) for d in range(data) for t in range(tensor)]
        self.edges = {
            (way, a, b): self._groups([[self.at(a, d, t), self.at(b, d, t)] for d, t in columns])
            for a, b in sorted(set(edges))
            if (a - b) % pipeline
            for way in ("forward", "backward")
        }

    def at(self, stage: int, data: int, tensor: int) -> int:
        """The rank that stands there."""
        return (stage % self.degrees[0] * self.degrees[1] + data) * self.degrees[2] + tensor

    def peer(self, stage: int) -> int:
        """The rank of another stage with this rank's place on the other axes."""
        return self.at(stage, self.data_rank, self.tensor_rank)

    def _groups(self, all_members: list[list[int]]) -> dist.ProcessGroup | None:
        mine = None
        for members in all_members:
            if len(members) > 1:
                group = dist.new_group(members)
                mine = group if dist.get_rank() in members else mine
        return mine


class Pipeline:
    """Runs the actions of this rank: receive, compute, send; forwards keep what their backwards need.

    ``stages`` are this rank's, by their number in the model; ``values`` are all that stages send to each other.
    """

    def __init__(
        self, mesh: Mesh, stages: Mapping[int, Callable[..., Sequence[Tensor]]], values: Sequence[Value]
    ) -> None:
        self.mesh, self.stages = mesh, stages
        self.receives = {stage: [value for value in values if stage in value.readers] for stage in stages}
        self.sends = {stage: [value for value in values if value.source == stage] for stage in stages}
        self._number = {value.name: index for index, value in enumerate(values)}
        self._posted: list[tuple[Any, Tensor]] = []
        self._here: dict[tuple[str, str, int, int], Tensor] = {}  # between stages of this rank

    def run(
        self,
        actions: Sequence[tuple[int, str, int]],
        batches: Sequence[tuple[int, Mapping[str, Tensor]]],
        before_backward: Callable[[bool], None],
    ) -> Tensor:
        """The sum of this rank's loss contributions. ``batches``: (samples, inputs) of each micro-batch."""
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
        kept: dict[tuple[int, int], tuple[list[Tensor], Sequence[Tensor]]] = {}
        last = max(index for index, action in enumerate(actions) if action[1] == "B")
        for index, (stage, kind, micro_batch) in enumerate(actions):
            if kind == "F":
                samples, inputs = batches[micro_batch]
                received = self._receive(stage, samples, micro_batch)
                outputs = self.stages[stage](micro_batch, inputs, *received)
                for value, output in zip(self.sends[stage], outputs, strict=False):
                    for reader in value.readers:
                        tensor = output.detach().permute(value.order).contiguous()
                        self._send(tensor, "forward", value, reader, reader, micro_batch)
                if len(outputs) > len(self.sends[stage]):
                    loss += outputs[-1].detach().double()
                kept[stage, micro_batch] = (received, outputs)
            else:
                before_backward(index == last)
                self._backward(stage, *kept.pop((stage, micro_batch)), micro_batch)
        for work, _ in self._posted:
            work.wait()
        self._posted = []
        return loss

    def _receive(self, stage: int, samples: int, micro_batch: int) -> list[Tensor]:
        shapes = [[a * samples + b for a, b in value.sizes] for value in self.receives[stage]]
        posted = []
        for v, shape in zip(self.receives[stage], shapes, strict=True):
            memory = torch.empty([shape[d] for d in v.order], dtype=v.dtype, device=DEVICE)
            posted.append(self._post(memory, "forward", v, stage, v.source, micro_batch))
        tensors = []
        for value, arrived in zip(self.receives[stage], posted, strict=True):
            memory = arrived()
            tensor = memory.permute([value.order.index(d) for d in range(memory.dim())])
            tensors.append(tensor.requires_grad_(value.differentiable))
        return tensors

    def _backward(self, stage: int, received: list[Tensor], outputs: Sequence[Tensor], micro_batch: int) -> None:
        roots, gradients = [], []
        for value, output in zip(self.sends[stage], outputs, strict=False):
            total: Tensor | None = None
            for reader in value.readers if value.differentiable else ():
                memory = torch.empty(output.shape, dtype=output.dtype, device=DEVICE)
                gradient = self._post(memory, "backward", value, reader, reader, micro_batch)()
                total = gradient if total is None else total + gradient
            if total is not None and output.requires_grad:
                roots.append(output)
                gradients.append(total)
        if len(outputs) > len(self.sends[stage]) and outputs[-1].requires_grad:
            roots.append(outputs[-1])
            gradients.append(torch.ones_like(outputs[-1]))
        if roots:
            torch.autograd.backward(roots, gradients)
        for value, tensor in zip(self.receives[stage], received, strict=True):
            if value.differentiable:
                gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._send(gradient.contiguous(), "backward", value, stage, value.source, micro_batch)

    def _send(self, tensor: Tensor, way: str, value: Value, reader: int, peer: int, micro_batch: int) -> None:
        """``value``, or its gradient, for ``reader`` between this rank and the rank of stage ``peer``."""
        if peer in self.stages:
            self._here[way, value.name, reader, micro_batch] = tensor
            return
        work: Any = dist.isend(tensor, self.mesh.peer(peer), **self._channel(way, value, reader, micro_batch))
        self._posted = [(work, held) for work, held in self._posted if not work.is_completed()] + [(work, tensor)]

    def _post(
        self, memory: Tensor, way: str, value: Value, reader: int, peer: int, micro_batch: int
    ) -> Callable[[], Tensor]:
        """Ask for what :meth:`_send` sends; call the answer to wait for it."""
        if peer in self.stages:
            return lambda: self._here.pop((way, value.name, reader, micro_batch))
        work: Any = dist.irecv(memory, self.mesh.peer(peer), **self._channel(way, value, reader, micro_batch))

        def arrived() -> Tensor:
            work.wait()
            return memory

        return arrived

    def _channel(self, way: str, value: Value, reader: int, micro_batch: int) -> dict[str, Any]:
        tag = micro_batch * len(self._number) + self._number[value.name]
        return {"group": self.mesh.edges[way, value.source, reader], "tag": tag}


def weight_totals(
    mesh: Mesh, weights: Callable[..., Sequence[Tensor]], batches: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """What each mean of the loss divides by: its weight over all micro-batches and data ranks."""
    with torch.no_grad():
        parts = [[weight.double() for weight in weights(inputs)] for inputs in batches]
    if not parts[0]:
        return []
    total = torch.stack([torch.stack(part) for part in parts]).sum(0)
    if mesh.data is not None:
        dist.all_reduce(total, group=mesh.data)
    return list(total)


def buckets(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names of trainable parameters that travel together: last first, one dtype, about BUCKET_BYTES."""
    answer: list[list[str]] = []
    room, dtype = 0, None
    for name, parameter in reversed(list(parameters.items())):
        if not parameter.requires_grad:
            continue
        size = parameter.numel() * parameter.element_size()
        if not answer or size > room or parameter.dtype != dtype:
            answer.append([])
            room, dtype = BUCKET_BYTES, parameter.dtype
        answer[-1].append(name)
        room -= size
    return answer


def sum_tied(mesh: Mesh, parameters: Mapping[str, nn.Parameter], tied: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """A parameter that several ranks hold gets the sum of their gradients, along the chain of ranks and back."""
    for name, stages in tied:
        ranks = sorted({stage % mesh.degrees[0] for stage in stages})
        parameter = parameters.get(name)  # a frozen one is nothing that is optimised
        if mesh.pipeline_rank not in ranks or len(ranks) == 1 or parameter is None or not parameter.requires_grad:
            continue
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        own = ranks.index(mesh.pipeline_rank)
        if own > 0:
            earlier = torch.empty_like(total)
            dist.recv(earlier, mesh.peer(ranks[own - 1]))
            total += earlier
        if own < len(ranks) - 1:
            dist.send(total, mesh.peer(ranks[own + 1]))
            dist.recv(total, mesh.peer(ranks[own + 1]))
        if own > 0:
            dist.send(total, mesh.peer(ranks[own - 1]))
        parameter.grad = total


def sum_over_tensor(mesh: Mesh, parameters: Mapping[str, nn.Parameter], specs: Iterable[Spec]) -> None:
    """Gradients of which the tensor ranks hold summands: norms and late biases under sequence parallelism."""
    for spec in specs:
        gradient = parameters[spec.name].grad if spec.summed and spec.name in parameters else None
        if gradient is not None:
            dist.all_reduce(gradient, group=mesh.tensor)


def take(whole: Tensor, split: Split | None, rank: int, ranks: int) -> Tensor:
    """This rank's part of a whole tensor, in storage of its own."""
    if split is None or ranks == 1:
        return whole.detach().clone()
    runs = whole.detach().split(split.runs(whole.shape[split.dim]), split.dim)
    return torch.cat([run.chunk(ranks, split.dim)[rank] for run in runs], split.dim).contiguous()


def join(parts: list[Tensor], split: Split | None) -> Tensor:
    """The whole tensor from all ranks' parts."""
    if split is None or len(parts) == 1:
        return parts[0]
    runs = split.runs(parts[0].shape[split.dim] * len(parts))
    pieces = [part.split([run // len(parts) for run in runs], split.dim) for part in parts]
    return torch.cat([piece for run in zip(*pieces, strict=True) for piece in run], split.dim)


def save(mesh: Mesh, specs: Sequence[Spec], tensors: Mapping[str, Tensor], directory: str | Path) -> None:
    """Write whole tensors under the model's own names, one file a pipeline rank; beside, then renamed.

    Whole state of the optimizer is written in the same way: pass its tensors under names of the same shapes.
    """
    target = Path(directory)
    beside = target.with_name(target.name + ".part")
    if dist.get_rank() == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    dist.barrier()
    whole: dict[str, Tensor] = {}
    for spec in specs:
        mine = tensors[spec.name].detach().contiguous()
        parts = [mine]
        if spec.split is not None and mesh.tensor is not None:
            parts = [torch.empty_like(mine) for _ in range(mesh.degrees[2])]
            dist.all_gather(parts, mine, group=mesh.tensor)
        if mesh.data_rank == mesh.tensor_rank == 0:
            whole[spec.name] = join(parts, spec.split).cpu()
    if mesh.data_rank == mesh.tensor_rank == 0:
        torch.save(whole, beside / f"pipeline-{mesh.pipeline_rank:03d}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        old = target.with_name(target.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            os.replace(target, old)
        os.replace(beside, target)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(mesh: Mesh, specs: Sequence[Spec], directory: str | Path) -> dict[str, Tensor]:
    """This rank's parts of what :func:`save` wrote, under this or any other split. Files are mapped, not read whole."""
    files = sorted(Path(directory).glob("*.pt"))
    found: dict[str, Tensor] = {}
    for file in files:
        found |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    missing = [spec.name for spec in specs if spec.name not in found]
    if missing:
        raise SystemExit(f"{directory} lacks {missing[0]} and {len(missing) - 1} more of this rank's tensors")
    return {s.name: take(found[s.name], s.split, mesh.tensor_rank, mesh.degrees[2]).to(DEVICE) for s in specs}
