"""Buffers with values of a model whose parameters have none.

A model on meta plans as well as a real one, but a program needs its buffers: rotary frequencies, masks, position ids.
They are computed when the model is built, from settings. So the model is built once more, and only what torch makes
*empty* (as layers make their weights, before they fill them) goes to meta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoplan.models import factory, huggingface
from autoplan.models.catalog import is_factory
from autoplan.models.resolution import config_of
from autoplan.models.types import DEFAULT_PRECISION, trace_dtype

_UNFILLED = (torch.empty, torch.empty_strided, torch.rand, torch.randn)


class _UnfilledOnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if func in _UNFILLED:
            given["device"] = "meta"
        return func(*args, **given)


def real_buffers(model: str, *, precision: str | None) -> dict[str, Tensor]:
    """The buffers of MODEL by name, those without values left out. Raises :class:`ModelError` as :func:`resolve`."""
    if is_factory(model):
        built = _from_factory(model)
    else:
        config, where = config_of(model)
        dtype = trace_dtype(precision or DEFAULT_PRECISION)
        built = huggingface.build(config, dtype=dtype, where=where, within=_UnfilledOnMeta())
    return {name: value for name, value in built.named_buffers() if not value.is_meta}


def _from_factory(reference: str) -> nn.Module:
    make = factory.load_factory(reference)
    try:
        with _UnfilledOnMeta():
            made = make()
    except Exception:  # a factory that looks at weights
        made = make()
    return made[0] if isinstance(made, tuple) else made
