"""The data axis: gradients summed once a step, and ZeRO-1 and -2 (Rajbhandari et al. 2020; -3 in its own module).

Loss contributions of micro-batches and ranks add up to the loss of the whole batch, so gradients are summed, never
averaged. They travel in flat buckets, last parameters first, each as soon as the backward of the last micro-batch has
finished all of its gradients, while that backward goes on. Buckets start in one fixed order, so that ranks agree.

:class:`Replicated` (ZeRO 0) all-reduces them. :class:`Sharded` keeps the *names* of the user's parameters and splits
their *contents*: each parameter is flattened, padded to a multiple of the degree, and rank d optimises the d-th slice,
a 1-D Parameter. Optimizers that work element by element (SGD, Adam, AdamW and their like) compute the very same numbers
on slices; those that look at a parameter's shape or norm (LAMB, Muon, Adafactor) do not, and need zero_stage=0. A
step begins with an all-gather that rebuilds the working parameters from the slices. ZeRO-1 reduce-scatters gradients
in the last backward; ZeRO-2 in every one, because only so are a whole rank's gradients never kept: it sends as often
as there are micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from autoplan.runtime.collectives import Mesh
from autoplan.runtime.masters import masters_of, round_into, widened
from autoplan.runtime.waits import WAITS

BUCKET_BYTES = 25 * 2**20  # torch DDP's default: large enough for bandwidth, small enough to start early


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters of one dtype whose gradients travel together."""

    names: tuple[str, ...]


def fill_buckets(parameters: Mapping[str, nn.Parameter], *, limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Trainable parameters, last first (the order in which a backward finishes them), in buckets of one dtype."""
    buckets: list[Bucket] = []
    names: list[str] = []
    filled = 0
    previous: nn.Parameter | None = None
    for name, parameter in reversed(list(parameters.items())):
        if not parameter.requires_grad:
            continue
        size = parameter.numel() * parameter.element_size()
        if names and previous is not None and (filled + size > limit_bytes or parameter.dtype != previous.dtype):
            buckets.append(Bucket(tuple(names)))
            names, filled = [], 0
        names.append(name)
        filled += size
        previous = parameter
    return (*buckets, Bucket(tuple(names))) if names else tuple(buckets)


class GradientSync:
    """What a step does for the parameters of one rank.

    ``working``: the parameters that the stage's graph reads, by the user's names, local to this rank's stage and tensor
    coordinate. ``parameters``: those that the user's optimizer updates, under the same names, in float32 where they are
    masters of 16-bit ones (:mod:`autoplan.runtime.masters`). ``tied``: for a parameter
    that several pipeline ranks hold, those ranks. ``later``: parameters whose gradients come in a second part of each
    backward. ``summands``: parameters of whose gradient every tensor rank finds a summand (norms and late biases under
    sequence parallelism).
    """

    def __init__(
        self, working: Mapping[str, nn.Parameter], mesh: Mesh, tied: Mapping[str, tuple[int, ...]], *, every: bool
    ) -> None:
        self.working, self.mesh, self.tied = dict(working), mesh, tied
        self.summands: tuple[str, ...] = ()
        self.later: frozenset[str] = frozenset()
        self.parameters: dict[str, nn.Parameter] = self.working
        self._every = every  # synchronise in every backward, not in the last alone
        self._buckets = fill_buckets(self.working) if mesh.data is not None else ()
        self._hooks: list[Any] = []
        self._awaited: frozenset[str] = frozenset()  # names that the running backward settles
        self._settled: set[str] = set()  # names whose gradients may be sent
        self._queue: list[int] = []  # buckets to start, in order
        self._prior: dict[str, Tensor] = {}

    @property
    def read(self) -> Mapping[str, nn.Parameter]:
        """What the stage's graph reads under the parameters' names."""
        return self.working

    # ---------------------------------------------------------------------------------------------------- during a step

    def around_forward(self) -> AbstractContextManager[None]:
        """Entered around every forward of the stage's graph."""
        return nullcontext()

    def begin_step(self) -> None:
        """Set aside gradients of earlier steps that the user has not zeroed: they are synchronised already."""
        self._remove_hooks()
        self._awaited, self._settled = frozenset(), set()
        self._queue = [] if self._every else list(range(len(self._buckets)))
        self.refresh()
        self._prior = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        for parameter in (*self.parameters.values(), *self.working.values()):
            parameter.grad = None
        for name in (name for bucket in self._buckets for name in bucket.names):
            self._hooks.append(self.working[name].register_post_accumulate_grad_hook(self._on_gradient(name)))

    def refresh(self) -> None:
        """Bring what the stage's graph reads up to what the optimizer made of ``parameters`` (a collective over the
        data axis where they are slices)."""
        raise NotImplementedError

    def before_backward(self, adds: frozenset[str], last: frozenset[str]) -> None:
        """Called ahead of each action that adds gradients: to which names, and to which of them it is the last."""
        if not self._every:
            self._settle()
            self._awaited = last
            return
        self._flush()
        # Where a bucket's gradients come in two parts, it is sent with the second.
        self._queue = [index for index, bucket in enumerate(self._buckets) if adds.intersection(self._due_with(bucket))]
        self._settled = {name for index in self._queue for name in self._buckets[index].names} - adds
        self._awaited = adds

    def _due_with(self, bucket: Bucket) -> frozenset[str]:
        return self.later.intersection(bucket.names) or frozenset(bucket.names)

    def send_rest(self) -> None:
        """After the last backward: start the sums over the data axis that no backward started."""
        self._flush()
        if self._every:
            self._queue = [
                i for i, bucket in enumerate(self._buckets) if any(self._has_gradient(n) for n in bucket.names)
            ]
            self._flush()

    def finish_step(self) -> None:
        """Complete the sums; afterwards ``parameters`` hold their gradients of the whole global batch."""
        self.send_rest()
        self._remove_hooks()
        self._collect()
        self._sum_tied()
        self._sum_over_tensor()
        for name, earlier in self._prior.items():
            fresh = self.parameters[name].grad
            self.parameters[name].grad = earlier if fresh is None else earlier.add_(fresh)
        self._prior = {}

    def _on_gradient(self, name: str) -> Any:
        def hook(_: Tensor) -> None:
            if name in self._awaited:
                self._settled.add(name)
                self._start_settled()

        return hook

    def _start_settled(self) -> None:
        while self._queue and self._settled.issuperset(self._buckets[self._queue[0]].names):
            self._start(self._queue.pop(0))

    def _settle(self) -> None:
        """After a backward: what it should have settled and found no gradient for has none."""
        self._settled |= self._awaited
        self._awaited = frozenset()
        self._start_settled()

    def _flush(self) -> None:
        """Start what is left: buckets with parameters that got no gradient."""
        self._settle()
        for index in self._queue:
            self._start(index)
        self._queue = []

    def _has_gradient(self, name: str) -> bool:
        return self.working[name].grad is not None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _sum_tied(self) -> None:
        for name in sorted(self.tied):
            parameter = self.parameters[name]
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                with WAITS.during("pipeline"):
                    dist.all_reduce(gradient, group=self.mesh.tied[self.tied[name]])
                parameter.grad = gradient

    def _sum_over_tensor(self) -> None:
        """Gradients of which the tensor ranks hold summands, in one flat tensor a dtype; ranks have the same ones."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for name in sorted(self.summands):
            parameter = self.parameters[name]
            if parameter.grad is not None:
                by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
        for members in by_dtype.values():
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in members])  # type: ignore[union-attr]
            with WAITS.during("tensor"):
                dist.all_reduce(flat, group=self.mesh.tensor)
            for parameter, piece in zip(members, flat.split([p.numel() for p in members]), strict=True):
                parameter.grad = piece.view(parameter.shape)

    def _start(self, index: int) -> None:
        raise NotImplementedError

    def _collect(self) -> None:
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------- whole over the data axis

    def extent(self, name: str) -> range | None:
        """Which elements of the flattened working parameter ``parameters[name]`` begins with; None: it is all of it."""
        return None

    def whole(self, name: str) -> Tensor:
        """The parameter's values, whole over the data axis (a collective over it when sharded)."""
        return self.parameters[name].detach()

    def whole_gradient(self, name: str) -> Tensor:
        """Its gradient, likewise; zeros where it has none."""
        gradient = self.parameters[name].grad
        return torch.zeros_like(self.working[name]) if gradient is None else gradient.detach()

    def counts_here(self, name: str) -> bool:
        """Whether this rank is the one of its data axis that counts the parameter (or a slice of its own) in a norm."""
        assert self.mesh.at is not None
        return self.mesh.at.data == 0


class Replicated(GradientSync):
    """ZeRO 0: every data rank holds every parameter; also where there is no data axis."""

    def __init__(
        self,
        working: Mapping[str, nn.Parameter],
        mesh: Mesh,
        tied: Mapping[str, tuple[int, ...]],
        *,
        masters: bool = False,
    ) -> None:
        super().__init__(working, mesh, tied, every=False)
        self._sums: list[tuple[dist.Work, Tensor, list[nn.Parameter]]] = []
        self._masters = masters_of(self.working, masters)
        self.parameters = {**self.working, **self._masters}

    def refresh(self) -> None:
        round_into(self.working, self._masters)

    def _start(self, index: int) -> None:
        members = [self.working[name] for name in self._buckets[index].names]
        members = [parameter for parameter in members if parameter.grad is not None]
        if members:
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in members])  # type: ignore[union-attr]
            work = dist.all_reduce(flat, group=self.mesh.data, async_op=True)
            assert work is not None
            self._sums.append((work, flat, members))

    def _collect(self) -> None:
        for work, flat, members in self._sums:
            with WAITS.during("data"):
                work.wait()
            pieces = flat.split([parameter.numel() for parameter in members])
            for parameter, piece in zip(members, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape)
        self._sums = []
        for name, master in self._masters.items():
            gradient, self.working[name].grad = self.working[name].grad, None
            master.grad = None if gradient is None else gradient.float()


class Sharded(GradientSync):
    """ZeRO 1 (``every`` False) and 2 (True): see the module."""

    def __init__(
        self,
        working: Mapping[str, nn.Parameter],
        mesh: Mesh,
        tied: Mapping[str, tuple[int, ...]],
        *,
        every: bool,
        masters: bool = False,
    ) -> None:
        super().__init__(working, mesh, tied, every=every)
        assert mesh.at is not None and mesh.data is not None
        self._degree, self._index = mesh.strategy.data, mesh.at.data
        self.parameters = {
            name: nn.Parameter(widened(self._slice(parameter.detach()), parameter, masters))
            if parameter.requires_grad
            else parameter
            for name, parameter in self.working.items()
        }
        self._arriving: list[tuple[dist.Work, Tensor, int]] = []
        self._sums: dict[int, Tensor] = {}
        self._with_gradient: set[str] = set()

    def _start(self, index: int) -> None:
        """Send a bucket: row d of its matrix is what rank d keeps. The whole gradients are dropped at once."""
        names = self._buckets[index].names
        rows = []
        for name in names:
            gradient = self.working[name].grad
            if gradient is None:
                gradient = torch.zeros_like(self.working[name])
            else:
                self._with_gradient.add(name)
            rows.append(self._padded(gradient).view(self._degree, -1))
            self.working[name].grad = None
        matrix = torch.cat(rows, dim=1)
        mine = matrix.new_empty(matrix.shape[1])
        work = dist.reduce_scatter_tensor(mine, matrix.view(-1), group=self.mesh.data, async_op=True)
        assert work is not None
        self._receive(limit=1)
        self._arriving.append((work, mine, index))

    def _receive(self, *, limit: int) -> None:
        """Add up what has arrived, leaving at most ``limit`` buckets on their way."""
        while len(self._arriving) > limit:
            work, mine, index = self._arriving.pop(0)
            with WAITS.during("data"):
                work.wait()
            self._sums[index] = self._sums[index].add_(mine) if index in self._sums else mine

    def _collect(self) -> None:
        self._receive(limit=0)
        for index, total in self._sums.items():
            names = self._buckets[index].names
            pieces = total.split([self.parameters[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                parameter = self.parameters[name]
                parameter.grad = piece.to(parameter.dtype) if name in self._with_gradient else None
        self._sums, self._with_gradient = {}, set()

    @torch.no_grad()
    def refresh(self) -> None:
        """The working parameters from all ranks' slices, a bucket at a time."""
        for bucket in self._buckets:
            dtype = self.working[bucket.names[0]].dtype
            mine = torch.cat([self.parameters[name].detach().to(dtype) for name in bucket.names])
            matrix = mine.new_empty(self._degree, mine.numel())
            with WAITS.during("data"):
                dist.all_gather_into_tensor(matrix.view(-1), mine, group=self.mesh.data)
            columns = matrix.split([self.parameters[name].numel() for name in bucket.names], dim=1)
            for name, column in zip(bucket.names, columns, strict=True):
                self.working[name].copy_(self._unpadded(column.reshape(-1), name))

    def _padded(self, tensor: Tensor) -> Tensor:
        return functional.pad(tensor.reshape(-1), (0, -tensor.numel() % self._degree))

    def _unpadded(self, flat: Tensor, name: str) -> Tensor:
        parameter = self.working[name]
        return flat[: parameter.numel()].view(parameter.shape)

    def _slice(self, tensor: Tensor) -> Tensor:
        return self._padded(tensor).view(self._degree, -1)[self._index].clone()

    def _gathered(self, mine: Tensor, name: str) -> Tensor:
        flat = mine.new_empty(self._degree * mine.numel())
        dist.all_gather_into_tensor(flat, mine.contiguous(), group=self.mesh.data)
        return self._unpadded(flat, name)

    def extent(self, name: str) -> range | None:
        if not self._is_sharded(name):
            return None
        size, length = self.working[name].numel(), self.parameters[name].numel()
        return range(min(size, self._index * length), min(size, (self._index + 1) * length))

    def whole(self, name: str) -> Tensor:
        own = self.parameters[name].detach()
        return self._gathered(own, name) if self._is_sharded(name) else own

    def whole_gradient(self, name: str) -> Tensor:
        if not self._is_sharded(name):
            return super().whole_gradient(name)
        own = self.parameters[name]
        return self._gathered(torch.zeros_like(own) if own.grad is None else own.grad, name)

    def counts_here(self, name: str) -> bool:
        return self._is_sharded(name) or super().counts_here(name)

    def _is_sharded(self, name: str) -> bool:
        return self.parameters[name] is not self.working[name]


def norm_terms(sync: GradientSync, names: Iterable[str], norm_type: float) -> Tensor:
    """Sum of |g|^p (or the maximum, for p = inf) over the gradients of ``names``, 0-dim float64."""
    device = sync.mesh.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name in names:
        gradient = sync.parameters[name].grad
        if gradient is None or gradient.numel() == 0:
            continue
        if norm_type == float("inf"):
            total = torch.maximum(total, gradient.abs().max().double())
        else:
            total += torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64) ** norm_type
    return total
