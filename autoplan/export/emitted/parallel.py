"""How the ranks work together: mesh, pipeline, checkpoints. Needs torch and nothing else.

Ranks are numbered with the tensor axis innermost, then data, then pipeline: rank = (pipeline * D + data) * T + tensor.
Stage s of the model stands on pipeline rank s mod P, so that a rank may hold several.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
BUCKET_BYTES = 25 * 2**20

Action = tuple[int, str, int]  # stage, "F" or "B", micro-batch
Batch = tuple[int, Mapping[str, Tensor]]  # samples, and the inputs


class Split(NamedTuple):  # if PACKED
    """Rank t of the tensor axis holds the t-th slice along ``dim``."""  # if PACKED

    dim: int  # if PACKED
    parts: tuple[int, ...] = ()  # one behind the other (packed q, k, v): the t-th slice of each  # if PACKED
    block: int = 0  # long equal blocks: the t-th slice of each  # if PACKED

    def runs(self, size: int) -> tuple[int, ...]:  # if PACKED
        return self.parts or ((self.block,) * (size // self.block) if self.block else (size,))  # if PACKED


class Spec(NamedTuple):
    """A parameter (or buffer) of a stage under the model's own name, with its whole shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: Split | None = None
    trainable: bool = True
    is_parameter: bool = True
    summed: bool = False  # every tensor rank finds a summand of its gradient
    spread: bool = False  # each rank of the expert axis holds a run of dimension 0  # if EXPERT


Split = int  # rank t of the tensor axis holds the t-th slice along this dimension  # if WHOLE


class Input(NamedTuple):
    """A tensor of the batch; its first dimension counts samples where ``batched``. Integers are below ``below``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    batched: bool
    below: int = 2


class Stage(NamedTuple):
    """``run(p, batch, *layers, *received)``: the values to send, in order, and on the last stage the loss.
    ``layers``: of each loop of it."""

    run: Callable[..., tuple[Tensor, ...]]
    layers: tuple[range, ...] = ()


class Value(NamedTuple):
    """A tensor that stage ``source`` computes and sends to ``readers``. A dimension is a * samples + b long, for its
    (a, b) in ``sizes``; ``order`` lists the dimensions from the outermost in memory to the innermost."""

    name: str
    source: int
    readers: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


class Parameters:
    """The tensors of one block under their names inside it; ``root`` holds all under their full names."""

    def __init__(self, root: Mapping[str, Tensor], prefix: str = "") -> None:
        self.root, self.prefix = root, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.root[self.prefix + name]

    def of(self, prefix: str) -> Parameters:
        return Parameters(self.root, prefix)


TENSOR_AXIS = SimpleNamespace(group=None, rank=0, size=1)  # where this rank stands on it: set by the mesh
CONTEXT_AXIS = SimpleNamespace(group=None, rank=0, size=1, recomputing=False)
EXPERT_AXIS = SimpleNamespace(group=None, rank=0, size=1)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Keep the arguments alone and run ``function`` again in the backward."""
    return checkpoint(partial(_telling, function), *arguments, use_reentrant=False)  # if CONTEXT
    return checkpoint(function, *arguments, use_reentrant=False)  # if NOCONTEXT


def _telling(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function``, inside which the context axis knows that it is recomputed."""
    earlier, CONTEXT_AXIS.recomputing = CONTEXT_AXIS.recomputing, True
    try:
        return function(*arguments)
    finally:
        CONTEXT_AXIS.recomputing = earlier


class Mesh:
    """Where this rank stands, and its groups: ``data`` (None of one rank), and one a directed edge."""

    def __init__(self, pipeline: int, data: int, tensor: int, edges: Iterable[tuple[int, int]]) -> None:
        if not dist.is_initialized():
            alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1"}  # if ALONE
            os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})  # if ALONE
            backend = "nccl" if DEVICE.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=10))
        if dist.get_world_size() != pipeline * data * tensor:
            raise SystemExit(f"this program runs on {pipeline * data * tensor} ranks, not {dist.get_world_size()}")
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        self.degrees, names = (pipeline, data, tensor), ("pipeline", "data", "tensor")
        mesh = init_device_mesh(DEVICE.type, self.degrees, mesh_dim_names=names)
        self.pipeline_rank, self.data_rank, self.tensor_rank = map(mesh.get_local_rank, names)
        self.data = mesh.get_group("data") if data > 1 else None
        TENSOR_AXIS.group = mesh.get_group("tensor") if tensor > 1 else None
        TENSOR_AXIS.rank, TENSOR_AXIS.size = self.tensor_rank, tensor
        # Every rank makes every group, in one order. A directed edge has its own: NCCL runs a communicator in order.
        self._ranks = mesh.mesh
        self.edges: dict[tuple[int, int], dist.ProcessGroup] = {}
        for a, b in sorted(set(edges)):
            pairs = torch.stack([self._ranks[s % pipeline] for s in (a, b)]).flatten(1).T.tolist()
            for edge in ((a, b), (b, a)) if (a - b) % pipeline else ():
                self.edges[edge] = dist.new_subgroups_by_enumeration(pairs)[0]

    def set_inside_data(self, axis: SimpleNamespace, size: int) -> None:  # if INSIDE
        """``size`` ranks next to each other on the data axis are those of ``axis``."""  # if INSIDE
        runs = self._ranks.transpose(1, 2).reshape(-1, size).tolist()  # if INSIDE
        axis.group, _ = dist.new_subgroups_by_enumeration(runs)  # if INSIDE
        axis.rank, axis.size = self.data_rank % size, size  # if INSIDE

    def of_experts(self) -> Mesh:  # if EXPERT
        """This mesh with the ranks that hold the same experts for its data axis."""  # if EXPERT
        found, size = copy.copy(self), EXPERT_AXIS.size  # if EXPERT
        copies = self._ranks.unflatten(1, (-1, size)).movedim(1, -1).flatten(0, -2).tolist()  # if EXPERT
        found.degrees = (self.degrees[0], self.degrees[1] // size, self.degrees[2])  # if EXPERT
        found.data, found.data_rank = dist.new_subgroups_by_enumeration(copies)[0], self.data_rank // size  # if EXPERT
        return found  # if EXPERT

    def peer(self, stage: int) -> int:
        """The rank of another stage with this rank's place on the other axes."""
        return int(self._ranks[stage % len(self._ranks), self.data_rank, self.tensor_rank])


class Pipeline:
    """Runs the actions of this rank: receive, compute, send; forwards keep what their backwards need.

    ``stages`` are this rank's, by their number in the model; ``values`` are all that stages send to each other.
    """

    def __init__(self, mesh: Mesh, stages: Mapping[int, Callable[..., Any]], values: Sequence[Value]) -> None:
        self.mesh, self.stages = mesh, stages
        self.receives = {stage: [value for value in values if stage in value.readers] for stage in stages}
        self.sends = {stage: [value for value in values if value.source == stage] for stage in stages}
        self._number = {value.name: index for index, value in enumerate(values)}
        self._posted: list[tuple[Any, Tensor]] = []
        self._here: dict[tuple[str, str, int, int], Tensor] = {}  # between stages of this rank

    def run(self, actions: Sequence[Action], batches: Sequence[Batch], before_backward: Callable[..., Any]) -> Tensor:
        """The sum of this rank's loss contributions. ``batches``: (samples, inputs) of each micro-batch."""
        loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
        kept: dict[tuple[int, int], tuple[list[Tensor], Sequence[Tensor]]] = {}
        last = max(index for index, action in enumerate(actions) if action[1] == "B")
        for index, (stage, kind, micro_batch) in enumerate(actions):
            if kind == "B":
                before_backward(index == last)
                self._backward(stage, *kept.pop((stage, micro_batch)), micro_batch)
                continue
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
        while self._posted:
            self._posted.pop(0)[0].wait()
        return loss

    def _receive(self, stage: int, samples: int, micro_batch: int) -> list[Tensor]:
        posted = []
        for v in self.receives[stage]:
            shape = [a * samples + b for a, b in v.sizes]
            memory = torch.empty([shape[d] for d in v.order], dtype=v.dtype, device=DEVICE)
            posted.append((v, self._post(memory, "forward", v, stage, v.source, micro_batch)))
        arrived = [(v, wait().permute([v.order.index(d) for d in range(len(v.order))])) for v, wait in posted]
        return [tensor.requires_grad_(v.differentiable) for v, tensor in arrived]

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
        return lambda: (work.wait(), memory)[1]

    def _channel(self, way: str, value: Value, reader: int, micro_batch: int) -> dict[str, Any]:
        tag = micro_batch * len(self._number) + self._number[value.name]
        edge = (value.source, reader) if way == "forward" else (reader, value.source)
        return {"group": self.mesh.edges[edge], "tag": tag}


def buckets(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Names of trainable parameters that travel together: last first, one dtype, about BUCKET_BYTES."""
    answer: list[list[str]] = []
    room, dtype = 0, None
    for name, parameter in reversed([item for item in parameters.items() if item[1].requires_grad]):
        if parameter.nbytes > room or parameter.dtype != dtype:
            answer.append([])
            room, dtype = BUCKET_BYTES, parameter.dtype
        answer[-1].append(name)
        room -= parameter.nbytes
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


def parameters(specs: Iterable[Spec], tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Those of ``specs``, of this rank's ``tensors``."""
    return {s.name: nn.Parameter(tensors[s.name], requires_grad=s.trainable) for s in specs if s.is_parameter}


def rounded(masters: Mapping[str, nn.Parameter], specs: Iterable[Spec]) -> dict[str, nn.Parameter]:
    """What stages read: 16-bit copies of float32 masters; what has its own dtype is shared."""
    held = [(spec.name, spec.dtype, masters[spec.name]) for spec in specs if spec.is_parameter]
    return {name: m if m.dtype == dtype else nn.Parameter(m.detach().to(dtype)) for name, dtype, m in held}


def take(whole: Tensor, split: Split | None, rank: int, ranks: int) -> Tensor:
    """This rank's part of a whole tensor, in storage of its own."""
    if split is None or ranks == 1:  # if PACKED
        return whole.detach().clone()  # if PACKED
    runs = whole.detach().split(split.runs(whole.shape[split.dim]), split.dim)  # if PACKED
    return torch.cat([run.chunk(ranks, split.dim)[rank] for run in runs], split.dim).contiguous()  # if PACKED
    mine = whole if split is None else whole.chunk(ranks, split)[rank]  # if WHOLE
    return mine.detach().clone(memory_format=torch.contiguous_format)  # if WHOLE


def join(parts: list[Tensor], split: Split | None) -> Tensor:
    """The whole tensor from all ranks' parts."""
    if split is None or len(parts) == 1:  # if PACKED
        return parts[0]  # if PACKED
    runs = split.runs(parts[0].shape[split.dim] * len(parts))  # if PACKED
    pieces = [part.split([run // len(parts) for run in runs], split.dim) for part in parts]  # if PACKED
    return torch.cat([piece for run in zip(*pieces, strict=True) for piece in run], split.dim)  # if PACKED
    return parts[0] if split is None else torch.cat(parts, split)  # if WHOLE


def part(whole: Tensor, spec: Spec) -> Tensor:
    """This rank's part of a whole tensor, as it is kept."""
    axis = EXPERT_AXIS if spec.spread else TENSOR_AXIS  # if EXPERT
    mine = take(whole, spec.split, axis.rank, axis.size)  # if EXPERT
    mine = take(whole, spec.split, TENSOR_AXIS.rank, TENSOR_AXIS.size)  # if DENSE
    half = spec.is_parameter and spec.trainable and spec.dtype in (torch.bfloat16, torch.float16)  # if MASTERS
    return mine.to(DEVICE, torch.float32 if half else spec.dtype)  # a master in float32  # if MASTERS
    return mine.to(DEVICE, spec.dtype)  # if PLAIN


def save(mesh: Mesh, specs: Sequence[Spec], read: Callable[[str], Tensor], directory: str | Path) -> None:
    """Write whole tensors under the model's own names, a file a pipeline rank; then rename. The one before is kept.
    ``read(name)``: this rank's part."""
    target, beside, last = (Path(f"{directory}{end}") for end in ("", ".part", ".last"))
    if dist.get_rank() == 0:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    dist.barrier()
    whole: dict[str, Tensor] = {}
    for spec in specs:
        axis = EXPERT_AXIS if spec.spread else TENSOR_AXIS  # if EXPERT
        axis = TENSOR_AXIS  # if DENSE
        mine = read(spec.name).detach().contiguous()
        parts = [mine] if spec.split is None else [torch.empty_like(mine) for _ in range(axis.size)]
        if spec.split is not None:
            dist.all_gather(parts, mine, group=axis.group)
        if mesh.data_rank == mesh.tensor_rank == 0:
            whole[spec.name] = join(parts, spec.split).cpu()
    if mesh.data_rank == mesh.tensor_rank == 0:
        torch.save(whole, beside / f"pipeline-{mesh.pipeline_rank:03d}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(last, ignore_errors=True)  # the new one is whole, beside
        if target.exists():
            os.replace(target, last)
        os.replace(beside, target)
    dist.barrier()


def load(specs: Sequence[Spec], directory: str | Path) -> dict[str, Tensor]:
    """This rank's parts of what :func:`save` wrote, under this or any other split. Files are mapped, not read whole."""
    found: dict[str, Tensor] = {}
    for file in sorted(Path(directory).glob("*.pt")):
        found |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    missing = [spec.name for spec in specs if spec.name not in found]
    if missing:
        raise SystemExit(f"{directory} lacks {missing[0]} and {len(missing) - 1} more of this rank's tensors")
    return {spec.name: part(found[spec.name], spec) for spec in specs}
