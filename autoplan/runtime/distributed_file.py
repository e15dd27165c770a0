"""Whole tensors in torch's distributed checkpoints, written and read rectangle by rectangle.

Such a checkpoint knows a tensor by name, whole shape and the offsets of what each rank wrote, so another plan reads
other rectangles of it; rectangles that several ranks hold are written once, by the rank that has least to write.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autoplan.runtime.faults import CheckpointError
from autoplan.runtime.pieces import Piece
from autoplan.runtime.stored import Part


def write(directory: Path, parts: Mapping[str, Part], group: dist.ProcessGroup | None) -> None:
    """Write every rank's ``parts`` (a collective over ``group``, of CPU tensors; None: this process is alone).

    Raises CheckpointError on every rank where any cannot write.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(
                dict(parts),
                storage_writer=dcp.FileSystemWriter(directory),
                planner=_SavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:  # no Exception, but a BaseException of torch's
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"rank {rank} cannot write the checkpoint: {type(cause).__name__}: {cause}", where=str(directory)
        ) from None


class DistributedFile:
    """A directory that :func:`write` wrote; ``shapes`` and ``dtypes`` of its tensors, by name."""

    def __init__(self, directory: Path) -> None:
        self._reader = dcp.FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        known = {n: m for n, m in self._metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        self.shapes = {name: tuple(known[name].size) for name in known}
        self.dtypes = {name: known[name].properties.dtype for name in known}

    def read(self, parts: Mapping[str, Part]) -> None:
        """Fill the pieces of ``parts`` (no collective)."""
        try:
            with warnings.catch_warnings(action="ignore"):
                dcp.load(dict(parts), storage_reader=self._reader, planner=_LoadPlanner(), no_dist=True)
        except CheckpointException as error:
            _, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{self._reader.path} cannot be read: {type(cause).__name__}: {cause}") from None


class _SavePlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [_write_item(n, part.shape, p) for n, part in self.state_dict.items() for p in part.pieces]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        offset = tuple(index.offset or ())
        return next(p.view for p in self.state_dict[index.fqn].pieces if p.offset == offset)


def _write_item(name: str, shape: Sequence[int], piece: Piece) -> WriteItem:
    offset = torch.Size(piece.offset)
    return WriteItem(
        index=MetadataIndex(name, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offset, piece.view.shape),
            properties=TensorProperties.create_from_tensor(piece.view),
            size=torch.Size(shape),
        ),
    )


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offset), p.view.shape) for p in part.pieces]
            saved = cast(TensorStorageMetadata, cast(Metadata, self.metadata).state_dict_metadata[name])
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offset = tuple(read_item.dest_index.offset or ())
        view = next(p.view for p in self.state_dict[read_item.dest_index.fqn].pieces if p.offset == offset)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view
