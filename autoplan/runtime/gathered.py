"""ZeRO-3: parameters live as flat slices and are whole only while a layer runs (Rajbhandari et al. 2020).

The stage's graph asks for a layer's parameters before it uses them (:mod:`autoplan.passes.gather_parameters`), and
drops them after. What autograd saves for the backward would keep them, transposed or not: a hook on saved tensors
recognises their storages, keeps in their place which layer they are of, and gathers that layer again when the backward
first asks; it is dropped as soon as its gradients are there. At most :data:`WINDOW` layers are whole in the backward.
Gradients are reduce-scattered layer by layer, in the backward of every micro-batch, while it goes on.

Every data rank runs one graph on equally many micro-batches, so all of them gather and scatter in one order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from autoplan.passes.operators import gathering
from autoplan.runtime.collectives import Mesh
from autoplan.runtime.data_parallel import GradientSync, Replicated, Sharded
from autoplan.runtime.masters import masters_of, round_into
from autoplan.runtime.waits import WAITS

WINDOW = 2  # layers whole at once in the backward: where one layer's backward runs into the next one's
_ON_THEIR_WAY = 2  # reduce-scatters whose gradients have not arrived


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parameters that are gathered together: their slices and whole shapes."""

    shapes: tuple[tuple[int, ...], ...]
    slices: tuple[Tensor, ...]

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(map(id, self.slices))


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd saved: a view of the ``index``-th parameter of a layer."""

    layer: _Layer
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Known:
    """The storage of a whole parameter, the ``index``-th of a layer."""

    storage: StorageWeakRef
    size_bytes: int
    layer: _Layer
    index: int


class Gathered(Sharded):
    """ZeRO 3: see the module. ``working`` holds shapes alone, on meta. ``peak_whole_bytes`` is the most that whole
    parameters took at once in the latest step, ``gathers`` how many layers it made whole."""

    def __init__(
        self,
        working: Mapping[str, nn.Parameter],
        mesh: Mesh,
        tied: Mapping[str, tuple[int, ...]],
        *,
        masters: bool = False,
    ) -> None:
        shapes = {
            name: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for name, p in working.items()
        }
        super().__init__(shapes, mesh, tied, every=True)
        self._buckets = ()
        self._slices = {
            name: nn.Parameter(self._own_slice(p.detach()), requires_grad=p.requires_grad)
            for name, p in working.items()
        }
        self._masters = masters_of(self._slices, masters)
        self.parameters = {**self._slices, **self._masters}
        self._names = {id(own): name for name, own in self._slices.items()}
        self.peak_whole_bytes = self.gathers = 0
        self._storages: dict[int, _Known] = {}
        self._whole: OrderedDict[tuple[int, ...], list[Tensor]] = OrderedDict()
        self._scattered: list[tuple[dist.Work, Tensor, list[str], list[int]]] = []
        self._gradients: dict[str, Tensor] = {}

    def _own_slice(self, whole: Tensor) -> Tensor:
        """This rank's, on the mesh's device; memory for it alone, where the whole is on meta and has no values yet."""
        own = self._slice(whole)
        return torch.zeros_like(own, device=self.mesh.device) if own.is_meta else own.to(self.mesh.device)

    @property
    def read(self) -> Mapping[str, nn.Parameter]:
        return self._slices

    # ---------------------------------------------------------------------------------------------------- during a step

    def begin_step(self) -> None:
        super().begin_step()
        self._whole.clear()
        self.peak_whole_bytes = self.gathers = 0

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        with gathering(self), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def gather(self, shapes: Sequence[Sequence[int]], slices: Sequence[Tensor]) -> list[Tensor]:
        """The whole parameters of a layer, each in storage of its own."""
        return self._all_gather(_Layer(tuple(tuple(shape) for shape in shapes), tuple(slices)))

    def scatter(self, slices: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Start to sum a layer's whole gradients; this rank's slices of the sums are kept."""
        self._whole.pop(tuple(map(id, slices)), None)
        names, rows = [], []
        for own, gradient in zip(slices, gradients, strict=True):
            if gradient is not None and own.requires_grad:
                names.append(self._names[id(own)])
                rows.append(self._padded(gradient).view(self._degree, -1))
        if not names:
            return
        matrix = torch.cat(rows, dim=1)
        mine = matrix.new_empty(matrix.shape[1])
        work = dist.reduce_scatter_tensor(mine, matrix.view(-1), group=self.mesh.data, async_op=True)
        assert work is not None
        self._scattered.append((work, mine, names, [row.shape[1] for row in rows]))
        self._keep_arrived(limit=_ON_THEIR_WAY)

    def _keep_arrived(self, *, limit: int) -> None:
        while len(self._scattered) > limit:
            work, mine, names, sizes = self._scattered.pop(0)
            with WAITS.during("data"):
                work.wait()
            for name, piece in zip(names, mine.split(sizes), strict=True):
                known = self._gradients.get(name)
                self._gradients[name] = piece if known is None else known.add_(piece)

    def _collect(self) -> None:
        self._keep_arrived(limit=0)
        for name, gradient in self._gradients.items():
            self.parameters[name].grad = gradient.to(self.parameters[name].dtype)
        self._gradients = {}
        self._whole.clear()

    def refresh(self) -> None:
        """This rank's slices alone: nothing is whole when a step begins."""
        round_into(self._slices, self._masters)

    # ---------------------------------------------------------------------------------------------------- saved tensors

    def _pack(self, tensor: Tensor) -> Any:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        if known is None or known.storage.expired():
            return tensor
        if tensor.dtype != known.layer.slices[known.index].dtype:  # the same bytes read as another dtype
            return tensor
        return _Saved(known.layer, known.index, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        if saved.layer.key not in self._whole:
            self._whole[saved.layer.key] = self._all_gather(saved.layer)
            while len(self._whole) > WINDOW:
                self._whole.popitem(last=False)
        whole = self._whole[saved.layer.key][saved.index]
        return whole.as_strided(saved.size, saved.stride, saved.offset)

    @torch.no_grad()
    def _all_gather(self, layer: _Layer) -> list[Tensor]:
        mine = torch.cat([own.detach() for own in layer.slices])
        matrix = mine.new_empty(self._degree, mine.numel())
        with WAITS.during("data"):
            dist.all_gather_into_tensor(matrix.view(-1), mine, group=self.mesh.data)
        columns = matrix.split([own.numel() for own in layer.slices], dim=1)
        wholes = [
            column.flatten()[: torch.Size(shape).numel()].view(shape)
            for column, shape in zip(columns, layer.shapes, strict=True)
        ]
        self._know(layer, wholes)
        return wholes

    def _know(self, layer: _Layer, wholes: list[Tensor]) -> None:
        """Recognise these storages for as long as somebody has them."""
        self._storages = {key: known for key, known in self._storages.items() if not known.storage.expired()}
        for index, whole in enumerate(wholes):
            storage = whole.untyped_storage()
            reference = StorageWeakRef(storage)  # while it is held, no other storage has its number
            self._storages[reference.cdata] = _Known(reference, storage.nbytes(), layer, index)
        self.gathers += 1
        whole_bytes = sum(known.size_bytes for known in self._storages.values())
        self.peak_whole_bytes = max(self.peak_whole_bytes, whole_bytes)


def gradient_sync(
    working: Mapping[str, nn.Parameter],
    mesh: Mesh,
    tied: Mapping[str, tuple[int, ...]],
    summands: Iterable[str] = (),
    *,
    masters: bool = False,
) -> GradientSync:
    """The data axis of ``mesh.strategy``: replicated, or sharded by its ZeRO stage. ``summands``: see GradientSync;
    ``masters``: whether float32 copies of 16-bit parameters are what the optimizer updates."""
    stage = mesh.strategy.zero_stage
    sync: GradientSync
    if mesh.data is None or stage == 0:
        sync = Replicated(working, mesh, tied, masters=masters)
    elif stage == 3:
        sync = Gathered(working, mesh, tied, masters=masters)
    else:
        sync = Sharded(working, mesh, tied, every=stage == 2, masters=masters)
    sync.summands = tuple(summands)
    return sync
