"""Programs and plans for tools that people trust already. Names are loaded on first use: settings of other tools need
no torch, and programs do."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoplan.export.folder import emit
    from autoplan.export.model import emit_model

__all__ = ["emit", "emit_model"]
_HOMES = {"emit": "autoplan.export.folder", "emit_model": "autoplan.export.model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found
