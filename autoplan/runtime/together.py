"""Tensors that travel together: one collective for many small ones, whose latency would be their time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Size, Tensor

# Of neighbours that share a collective, and so of the memory beside them; a larger tensor travels alone, uncopied.
TOGETHER_BYTES = 16 * 2**20


def runs(names: Iterable[str], kind: Callable[[str], Hashable], size: Callable[[str], int]) -> Iterator[list[str]]:
    """``names`` in their order, cut where the kind changes or more than :data:`TOGETHER_BYTES` would be together."""
    run: list[str] = []
    held = 0
    for name in names:
        if run and (kind(name) != kind(run[0]) or held + size(name) > TOGETHER_BYTES):
            yield run
            run, held = [], 0
        run.append(name)
        held += size(name)
    if run:
        yield run


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in a row: the tensor itself where there is one, and it lies so."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def parted(row: Tensor, shapes: Sequence[Size]) -> list[Tensor]:
    """The inverse of :func:`joined`: views of the row."""
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(row.split(sizes), shapes, strict=True)]
