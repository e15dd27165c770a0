"""The process groups of one rank, and what stage graphs and schedules call on them.

Groups are named after the mesh of :class:`autoplan.plan.Strategy`: *tensor* and *context* groups hold the ranks that
differ in that coordinate alone; a *data* group those that hold the same weights, which are all of the data and context
axes together (:attr:`Strategy.over_replicas`, the strategy that a :class:`Mesh` has); an *edge* group holds the two
ranks of one directed edge between stages, forward or backward, because NCCL runs the operations of a communicator in
order and 1F1B with a skip edge deadlocks on fewer; a *tied* group holds the pipeline ranks that share a parameter.
Every rank creates every group in one fixed order, as torch demands of groups whose members did not all create the same
number before.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.passes.split_stages import Value
from autoplan.plan import Coordinates, Strategy
from autoplan.runtime.launch import group_timeout
from autoplan.runtime.waits import WAITS
from autoplan.schedules import rank_of_stage

# torch 2.13 renames its flat collectives and warns on each call; the names that 2.13 keeps for older releases are used.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor).*")

Edge = tuple[int, int]  # source stage, destination stage


class Mesh:
    """Where this rank stands, and its groups; a group of one rank is None and needs no communication.

    ``edges`` are the directed pairs of stages between which values go (those of one rank need no group); ``tied`` the
    sets of pipeline ranks that share parameters. A rank beyond the strategy's GPUs has no coordinates and belongs to
    the whole world only. ``timeout``: how long a rank waits for another, :func:`group_timeout` where not given.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        edges: Iterable[Edge],
        tied: Iterable[tuple[int, ...]],
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        self.strategy = strategy.over_replicas
        self.context_degree, self.expert_degree = strategy.context, strategy.expert
        self.device = device
        self._timeout = timeout or group_timeout(device.type)
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.at: Coordinates | None = self.strategy.coordinates(self.rank) if self.rank < strategy.gpus else None
        self.tensor: dist.ProcessGroup | None = None
        self.context: dist.ProcessGroup | None = None
        self.expert: dist.ProcessGroup | None = None
        self.copies: dist.ProcessGroup | None = None  # of this rank's experts
        self.data: dist.ProcessGroup | None = None
        self.edge: dict[tuple[str, Edge], dist.ProcessGroup] = {}
        self.tied: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if self.world > 1:
            self._create(sorted(set(edges)), sorted(set(tied)))

    def _create(self, edges: list[Edge], tied: list[tuple[int, ...]]) -> None:
        degrees = self.strategy
        pipeline, data, tensor = range(degrees.pipeline), range(degrees.data), range(degrees.tensor)
        for p, d in itertools.product(pipeline, data):
            self.tensor = self._group([Coordinates(p, d, t) for t in tensor]) or self.tensor
        for p, t in itertools.product(pipeline, tensor):
            self.data = self._group([Coordinates(p, d, t) for d in data]) or self.data
        if self.context_degree > 1:
            for p, first, t in itertools.product(pipeline, data[:: self.context_degree], tensor):
                members = [Coordinates(p, first + c, t) for c in range(self.context_degree)]
                self.context = self._group(members) or self.context
        if self.expert_degree > 1:
            for p, first, t in itertools.product(pipeline, data[:: self.expert_degree], tensor):
                members = [Coordinates(p, first + e, t) for e in range(self.expert_degree)]
                self.expert = self._group(members) or self.expert
            for p, e, t in itertools.product(pipeline, range(self.expert_degree), tensor):
                members = [Coordinates(p, d, t) for d in data[e :: self.expert_degree]]
                self.copies = self._group(members) or self.copies
        for d, t in itertools.product(data, tensor):
            for edge in edges:
                ends = [rank_of_stage(stage, ranks=degrees.pipeline) for stage in edge]
                for direction in ("forward", "backward") if ends[0] != ends[1] else ():
                    group = self._group([Coordinates(p, d, t) for p in ends])
                    if group is not None:
                        self.edge[direction, edge] = group
            for holders in tied:
                group = self._group([Coordinates(p, d, t) for p in holders])
                if group is not None:
                    self.tied[holders] = group

    def _group(self, members: Sequence[Coordinates]) -> dist.ProcessGroup | None:
        """A new group, or None where this rank is not in it or is alone in it."""
        ranks = [self.strategy.rank(at) for at in members]
        if len(ranks) == 1:
            return None
        group = dist.new_group(ranks, timeout=self._timeout)
        if self.rank not in ranks:
            return None
        if self.device.type == "cuda":
            # NCCL connects a communicator at first use, and blocks until the peer does: do it here, in one order.
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group

    @property
    def data_index(self) -> int:
        """Which rows of a batch this rank works on; ranks of one context group share them."""
        assert self.at is not None
        return self.at.data // self.context_degree

    @property
    def expert_index(self) -> int:
        """Which run of each layer's experts this rank holds."""
        assert self.at is not None
        return self.at.data % self.expert_degree

    def of_experts(self) -> Mesh:
        """This mesh with the ranks that hold the same experts for its data axis."""
        assert self.at is not None
        found = copy.copy(self)
        found.strategy = dataclasses.replace(self.strategy, data=self.strategy.data // self.expert_degree, expert=1)
        found.at = self.at._replace(data=self.at.data // self.expert_degree)
        found.data = self.copies
        return found

    def rank_of(self, stage: int) -> int:
        """The rank of ``stage`` that has this rank's data and tensor coordinates."""
        assert self.at is not None
        return self.strategy.rank(self.at._replace(pipeline=rank_of_stage(stage, ranks=self.strategy.pipeline)))

    # --------------------------------------------------------------------------------------------- over the whole world

    def sum_over_world(self, tensor: Tensor) -> Tensor:
        """In place: the sum over every rank, idle ones included."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def begin_sum_over_world(self, tensor: Tensor) -> dist.Work | None:
        """As :meth:`sum_over_world`, begun; None where there is nothing to wait for."""
        return dist.all_reduce(tensor, async_op=True) if self.world > 1 else None

    @property
    def all_alike(self) -> bool:
        """Whether all ranks are neighbours on the tensor axis: what they compute whole, they all have."""
        return self.world == self.strategy.tensor

    def max_over_world(self, tensor: Tensor) -> Tensor:
        """In place: the maximum over every rank."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def broadcast(self, tensor: Tensor, *, source: int) -> Tensor:
        """In place: the tensor of rank ``source``, on every rank."""
        if self.world > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """In place: the sum over the data axis."""
        if self.data is not None:
            with WAITS.during("data"):
                dist.all_reduce(tensor, group=self.data)
        return tensor


class AxisCommunicator:
    """The :class:`autoplan.passes.operators.Communicator` of stage graphs: torch.distributed on a mesh's groups."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def rank(self, axis: str) -> int:
        at = self._mesh.at
        if at is None:
            return 0
        inside_data = {"context": self._mesh.context_degree, "expert": self._mesh.expert_degree}
        return at.data % inside_data[axis] if axis in inside_data else int(getattr(at, axis))

    def size(self, axis: str) -> int:
        return self._mesh.context_degree if axis == "context" else int(getattr(self._mesh.strategy, axis))

    def all_reduce(self, tensor: Tensor, axis: str, operation: str = "sum") -> None:
        group = self._group(axis)
        if group is None:
            return
        _require_contiguous(tensor)
        with WAITS.during(axis):
            dist.all_reduce(tensor, op=_OPERATIONS[operation], group=group)

    def all_gather(self, tensor: Tensor, axis: str) -> list[Tensor]:
        group = self._group(axis)
        if group is None:
            return [tensor]
        _require_contiguous(tensor)
        parts = [torch.empty_like(tensor) for _ in range(self.size(axis))]
        with WAITS.during(axis):
            dist.all_gather(parts, tensor, group=group)
        return parts

    def reduce_scatter(self, parts: list[Tensor], axis: str) -> Tensor:
        """The sum over ranks of each rank's ``parts[own rank]``."""
        group = self._group(axis)
        if group is None:
            return parts[0]
        result = torch.empty_like(parts[0])
        with WAITS.during(axis):
            dist.reduce_scatter(result, parts, group=group)
        return result

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], axis: str) -> Tensor:
        """``sent[r]`` rows go to rank r, one rank's after the other; of ``received[r]`` from it the result is made."""
        group = self._group(axis)
        if group is None:
            return rows
        _require_contiguous(rows)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        with WAITS.during(axis):
            dist.all_to_all_single(result, rows, received, sent, group=group)
        return result

    def _group(self, axis: str) -> dist.ProcessGroup | None:
        mesh = self._mesh
        groups = {"tensor": mesh.tensor, "data": mesh.data, "context": mesh.context, "expert": mesh.expert}
        return groups[axis]


_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _require_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():  # gloo would reduce the wrong elements without a word
        raise ValueError(f"a collective was given a non-contiguous tensor of shape {tuple(tensor.shape)}")


class Channels:
    """Sends and receives of values between stages. Tags tell messages apart on gloo; on NCCL their order does, which is
    that of the schedule on both sides."""

    def __init__(self, mesh: Mesh, values: Sequence[Value]) -> None:
        self._mesh = mesh
        self._index = {value.name: index for index, value in enumerate(values)}
        self._values = len(values)

    def send(self, tensor: Tensor, value: Value, *, destination: int, micro_batch: int) -> dist.Work:
        """``tensor`` from this stage, ``value.source``, to stage ``destination``."""
        return self._post(dist.isend, tensor, "forward", (value.source, destination), destination, value, micro_batch)

    def receive(self, tensor: Tensor, value: Value, *, at: int, micro_batch: int) -> dist.Work:
        """``value`` into ``tensor``, on stage ``at``."""
        return self._post(dist.irecv, tensor, "forward", (value.source, at), value.source, value, micro_batch)

    def send_gradient(self, tensor: Tensor, value: Value, *, at: int, micro_batch: int) -> dist.Work:
        """``value``'s gradient from stage ``at``, which read it, back to its source."""
        return self._post(dist.isend, tensor, "backward", (value.source, at), value.source, value, micro_batch)

    def receive_gradient(self, tensor: Tensor, value: Value, *, destination: int, micro_batch: int) -> dist.Work:
        """``value``'s gradient from ``destination`` into ``tensor``."""
        edge = (value.source, destination)
        return self._post(dist.irecv, tensor, "backward", edge, destination, value, micro_batch)

    def _post(
        self, operation: object, tensor: Tensor, direction: str, edge: Edge, peer: int, value: Value, micro_batch: int
    ) -> dist.Work:
        assert callable(operation)
        tag = micro_batch * self._values + self._index[value.name]
        work = operation(tensor, self._mesh.rank_of(peer), group=self._mesh.edge[direction, edge], tag=tag)
        assert work is not None
        return work
