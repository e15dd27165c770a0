"""MODEL: presets, Hugging Face configs and factories, built on meta with a training batch.

Names load on first use, so that listing presets imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.models.catalog import Preset, preset, presets

if TYPE_CHECKING:
    from autoplan.models.huggingface import example_inputs_for
    from autoplan.models.resolution import from_module, resolve
    from autoplan.models.types import ResolvedModel, trace_dtype

_HEAVY = {
    "ResolvedModel": "types",
    "example_inputs_for": "huggingface",
    "from_module": "resolution",
    "resolve": "resolution",
    "trace_dtype": "types",
}
__all__ = [
    "Preset",
    "ResolvedModel",
    "example_inputs_for",
    "from_module",
    "preset",
    "presets",
    "resolve",
    "trace_dtype",
]


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"autoplan.models.{_HEAVY[name]}"), name)
