"""Float64 all the way.

Models of transformers round to float32 on the way whatever their dtype: norms and rotary tables by
``.to(torch.float32)``, the loss's logits by ``.float()``, a router's softmax by ``dtype=``. Sums in another order then
differ by 1e-8, which would hide what a comparison at 1e-10 is for.

torch's grouped product (experts) takes no float64: there, transformers' experts use the operator that transformers
itself has for where torch's can't be used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations import moe

_WITH_DTYPE = ("softmax", "log_softmax")


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, casts to float32 widen to float64, in traces and in forked processes too."""
    kept: list[tuple[Any, str, Any]] = [(Tensor, "to", Tensor.to), (Tensor, "float", Tensor.float)]
    kept.append((Tensor, "type", Tensor.type))
    kept += [(functional, name, getattr(functional, name)) for name in _WITH_DTYPE]
    Tensor.to, Tensor.float = _widening(Tensor.to), Tensor.double  # type: ignore[method-assign]
    Tensor.type = _widening(Tensor.type)  # type: ignore[method-assign]
    for name in _WITH_DTYPE:
        setattr(functional, name, _widening(getattr(functional, name)))
    kept.append((moe, "_can_use_grouped_mm", moe._can_use_grouped_mm))
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)


def _widening(function: Callable[..., Any]) -> Callable[..., Any]:
    def widened(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch._"):  # torch's own type promotion
            return function(*args, **kwargs)
        return function(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})

    return widened


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
