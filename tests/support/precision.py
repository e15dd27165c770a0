"""Float64 all the way.

Models of transformers round to float32 on the way whatever their dtype: norms and rotary tables by
``.to(torch.float32)``, the loss's logits by ``.float()``. Sums in another order then differ by 1e-8, which hides what
a test at 1e-10 is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, ``.float()`` and ``.to(torch.float32)`` widen to float64, in traces and in forked processes too."""
    plain_to, plain_float = Tensor.to, Tensor.float

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return plain_to(self, *map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})

    Tensor.to, Tensor.float = to, Tensor.double  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.to, Tensor.float = plain_to, plain_float  # type: ignore[method-assign]


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
