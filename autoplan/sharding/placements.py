"""How one tensor lies over the ranks of the tensor axis, forward and backward.

==============  =====================================  =====================================
placement       forward                                gradient
==============  =====================================  =====================================
``Replicate``   every rank holds all of it             alike on all ranks
``Copied``      every rank holds all of it             every rank holds a summand
``Shard(dim)``  rank r holds the r-th slice            rank r holds the r-th slice
``Partial``     every rank holds a summand             alike on all ranks
==============  =====================================  =====================================

``Copied`` and ``Partial`` are each other's transpose: a split operator gives ``Copied`` to the operands that lack the
split factor, and ``Partial`` to a result from which the factor was summed away.

With ``parts`` the sharded dimension is a concatenation (a packed qkv) and every part is sliced by itself, so rank r
holds the r-th slice of q, of k and of v. With ``block`` it is a run of equal blocks, as many as the tensor has (batch
and heads merged into one dimension), each sliced by itself.
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
class Copied:
    def __str__(self) -> str:
        return "C"


@dataclass(frozen=True, slots=True)
class Partial:
    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Shard:
    """``parts``: sizes of the concatenated parts along ``dim``; empty for one part. ``block``: size of the equal
    blocks that ``dim`` consists of, 0 for none. At most one of the two is given."""

    dim: int
    parts: tuple[int, ...] = ()
    block: int = 0

    def __str__(self) -> str:
        if self.block:
            return f"S({self.dim}; blocks of {self.block})"
        inner = f"{self.dim}; {'+'.join(map(str, self.parts))}" if self.parts else str(self.dim)
        return f"S({inner})"

    def at(self, dim: int) -> Shard:
        """The same layout along another dimension (of the same size)."""
        return self if dim == self.dim else Shard(dim, self.parts, self.block)

    def sizes(self, size: int) -> tuple[int, ...]:
        """The runs that are sliced one by one, of a dimension with ``size`` elements."""
        return self.parts or ((self.block,) * (size // self.block) if self.block else (size,))

    def divides(self, size: int, degree: int) -> bool:
        """Whether ``degree`` ranks can each hold an equal slice of every run."""
        if self.block:
            return size % self.block == 0 and self.block % degree == 0
        return all(run > 0 and run % degree == 0 for run in self.sizes(size)) and sum(self.sizes(size)) == size


Placement = Replicate | Copied | Partial | Shard

REPLICATE = Replicate()
COPIED = Copied()
PARTIAL = Partial()


def take_shard(tensor: Tensor, placement: Placement, *, index: int, degree: int) -> Tensor:
    """The part of the full ``tensor`` that rank ``index`` of ``degree`` holds, contiguous, in storage of its own."""
    if not isinstance(placement, Shard):
        return tensor.detach().clone()
    runs = tensor.detach().split(placement.sizes(tensor.shape[placement.dim]), dim=placement.dim)
    slices = [run.chunk(degree, dim=placement.dim)[index] for run in runs]
    return torch.cat(slices, dim=placement.dim).clone(memory_format=torch.contiguous_format)


def assemble(shards: list[Tensor], placement: Placement) -> Tensor:
    """The full tensor from all ranks' parts; inverse of :func:`take_shard`."""
    if not isinstance(placement, Shard):
        return shards[0]
    degree, dim = len(shards), placement.dim
    runs = placement.sizes(shards[0].shape[dim] * degree)
    if len(runs) == 1:
        return torch.cat(shards, dim=dim)
    split = [shard.split([size // degree for size in runs], dim=dim) for shard in shards]
    return torch.cat([piece for run in zip(*split, strict=True) for piece in run], dim=dim)
