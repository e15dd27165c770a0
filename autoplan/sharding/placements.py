"""How one tensor lies over the ranks of the tensor axis.

``Replicate``: every rank holds all of it. ``Shard(dim)``: rank r holds the r-th of equal slices of ``dim``; with
``parts`` the dimension is a concatenation (a packed qkv) and every part is sliced by itself, so rank r holds the r-th
slice of q, of k and of v. ``Partial``: every rank holds a summand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Replicate:
    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Shard:
    """``parts``: sizes of the concatenated parts along ``dim``; empty for one part."""

    dim: int
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        inner = f"{self.dim}; {'+'.join(map(str, self.parts))}" if self.parts else str(self.dim)
        return f"S({inner})"


Placement = Replicate | Partial | Shard


def take_shard(tensor: Tensor, placement: Placement, *, index: int, degree: int) -> Tensor:
    """The part of the full ``tensor`` that rank ``index`` of ``degree`` holds, contiguous, in storage of its own."""
    if not isinstance(placement, Shard):
        return tensor.detach().clone()
    parts = tensor.detach().split(placement.parts or (tensor.shape[placement.dim],), dim=placement.dim)
    slices = [part.chunk(degree, dim=placement.dim)[index] for part in parts]
    return torch.cat(slices, dim=placement.dim).clone(memory_format=torch.contiguous_format)


def assemble(shards: list[Tensor], placement: Placement) -> Tensor:
    """The full tensor from all ranks' parts; inverse of :func:`take_shard`."""
    if not isinstance(placement, Shard):
        return shards[0]
    degree = len(shards)
    if not placement.parts:
        return torch.cat(shards, dim=placement.dim)
    local = [size // degree for size in placement.parts]
    split = [shard.split(local, dim=placement.dim) for shard in shards]
    whole = [torch.cat([rank[i] for rank in split], dim=placement.dim) for i in range(len(local))]
    return torch.cat(whole, dim=placement.dim)
