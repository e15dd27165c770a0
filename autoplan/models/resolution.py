"""MODEL, as the command line and ``autoplan.plan`` take it: a preset, a config.json, or file.py:factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from autoplan.errors import ModelError
from autoplan.models import factory, huggingface
from autoplan.models.catalog import config_text, is_factory
from autoplan.models.types import DEFAULT_PRECISION, ResolvedModel, trace_dtype


def resolve(model: str, *, sequence: int | None = None, precision: str | None = None, batch: int) -> ResolvedModel:
    """Build MODEL for a trace of ``batch`` samples.

    ``precision`` None: bf16, or a factory's own dtype; fp8, mxfp8 and nvfp4 are traced in bf16. ``sequence`` None: the
    config's maximum, at most 4096. Raises :class:`ModelError` for everything a user can get wrong.
    """
    dtype = trace_dtype(precision or DEFAULT_PRECISION)
    if is_factory(model):
        return _from_factory(model, sequence=sequence, precision=precision, batch=batch)
    text, where, name = config_text(model)
    config = huggingface.parse_config(text, where=where)
    built = huggingface.build_on_meta(config, dtype=dtype, where=where)
    inputs, assumptions = huggingface.example_inputs_for(built, batch=batch, sequence=sequence)
    if precision is None:
        assumptions = (*assumptions, f"precision {DEFAULT_PRECISION} (none was given)")
    return ResolvedModel(model=built, example_inputs=inputs, name=name, assumptions=assumptions)


def from_module(
    model: Any, example_inputs: Any, *, loss_fn: Callable[..., Any] | None = None, sequence: int | None = None
) -> ResolvedModel:
    """A module that the user passes: as it is, with a batch of two made from its config where none came with it.

    ``name`` is the class's. Raises :class:`ModelError` for what is no module, and where a batch is needed.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"not a model: {type(model).__name__}",
            legal="a torch.nn.Module, a preset's name, a Hugging Face config.json, or file.py:factory",
        )
    name = type(model).__name__
    if example_inputs is not None:
        if sequence is not None:
            raise ModelError("a sequence length was given beside example inputs, whose shape says it already")
        return ResolvedModel(model=model, example_inputs=example_inputs, name=name, loss_fn=loss_fn)
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{name} comes without example inputs",
            legal="a tuple of positional arguments, a dict of keyword arguments, or one tensor",
            attempt="example_inputs=batch",
        )
    device = next(model.parameters()).device
    inputs, assumptions = huggingface.example_inputs_for(model, batch=2, sequence=sequence, device=device)
    return ResolvedModel(model=model, example_inputs=inputs, name=name, assumptions=assumptions, loss_fn=loss_fn)


def config_of(model: str) -> tuple[Any, str]:
    """The config that a preset's name or a config.json means, and where it stands; raises :class:`ModelError`."""
    text, where, _ = config_text(model)
    return huggingface.parse_config(text, where=where), where


def _from_factory(reference: str, *, sequence: int | None, precision: str | None, batch: int) -> ResolvedModel:
    model, inputs, loss_fn, assumptions = factory.build(reference)
    if precision is not None:
        model = model.to(trace_dtype(precision))
        inputs = _cast_floating(inputs, trace_dtype(precision))
    if inputs is None:
        if not isinstance(model, PreTrainedModel):
            raise ModelError(
                "the factory returned a model and no example inputs",
                where=reference,
                legal="(model, example inputs), or a Hugging Face model, whose batch is known",
            )
        device = next(model.parameters()).device
        inputs, more = huggingface.example_inputs_for(model, batch=batch, sequence=sequence, device=device)
        assumptions = (*assumptions, *more)
    elif sequence is not None:
        raise ModelError(
            "a sequence length was given, but the factory makes its own example inputs",
            where=reference,
            attempt="leave --seq out, or let the factory make inputs of that length",
        )
    name = reference.rpartition(":")[2]
    return ResolvedModel(model=model, example_inputs=inputs, name=name, assumptions=assumptions, loss_fn=loss_fn)


def _cast_floating(inputs: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return torch.utils._pytree.tree_map_only(torch.Tensor, cast, inputs)
