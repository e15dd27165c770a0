"""Parameters that are different objects on the same memory (``b.weight.data = a.weight.data``).

In one process an optimizer updates that memory once for each of them. Ranks that hold them apart, or cut, would not:
only one Parameter under several names is a tie that a program can keep.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from autoplan.capture.errors import forward_line
from autoplan.errors import CaptureError

# Bytes of a storage, from the first to behind the last that a tensor reads, with its name and the tensor.
_Extent = tuple[int, int, str, Tensor]


def check_memory(model: nn.Module) -> None:
    """Raise CaptureError for a parameter whose memory another parameter, or a buffer, has too."""
    extents = sorted(_extents([*model.named_parameters(), *model.named_buffers()]), key=lambda extent: extent[:2])
    reaching: list[_Extent] = []  # those that begin before and end behind where the next one begins
    for extent in extents:
        reaching = [before for before in reaching if before[1] > extent[0]]
        for before in reaching:
            if _certainly_shared(before, extent):
                raise _refusal(model, before[2], extent[2])
        reaching.append(extent)


def _extents(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[_Extent]:
    for name, tensor in tensors:
        if tensor.is_meta or not tensor.numel() or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        yield start, start + (last + 1) * tensor.element_size(), name, tensor


def _certainly_shared(one: _Extent, other: _Extent) -> bool:
    """Whether an element is in both: two columns of one matrix interleave without."""
    if not any(isinstance(extent[3], nn.Parameter) for extent in (one, other)):
        return False
    whole = all(extent[3].is_contiguous() for extent in (one, other))
    return one[3].device == other[3].device and (whole or one[0] == other[0])


def _refusal(model: nn.Module, one: str, other: str) -> CaptureError:
    return CaptureError(
        f"{one} and {other} share memory and are not one Parameter: ranks that hold them apart would train them apart",
        where=forward_line(model),
        legal="one Parameter under both names, or memory of their own",
        attempt="tie them as b.weight = a.weight, without .data; or give each its own with .clone()",
    )
