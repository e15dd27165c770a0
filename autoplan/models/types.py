"""What MODEL resolves to, and the precisions a model may be traced in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.errors import ModelError

# fp8, mxfp8 and nvfp4 quantise inside the matrix products; parameters and activations between them stay bf16.
TRACE_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "mxfp8": torch.bfloat16,
    "nvfp4": torch.bfloat16,
}
DEFAULT_PRECISION = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model ready for capture.

    ``model`` is in train mode, its parameters on ``meta`` wherever it could be built there. ``example_inputs`` is a
    dict of keyword arguments, a tuple or one tensor. ``loss_fn`` is None where the model returns its own loss.
    ``assumptions``: what was filled in for the user, one sentence each.
    """

    model: nn.Module
    example_inputs: Any
    name: str
    assumptions: tuple[str, ...] = ()
    loss_fn: Callable[..., Any] | None = None


def trace_dtype(precision: str) -> torch.dtype:
    """The dtype that parameters have under ``precision``; raises :class:`ModelError` on an unknown one."""
    try:
        return TRACE_DTYPES[precision]
    except KeyError:
        raise ModelError(
            f"unknown precision {precision!r}", legal=", ".join(TRACE_DTYPES), attempt="--precision bf16"
        ) from None
