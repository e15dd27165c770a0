"""Programs and plans for tools that people trust already."""

from autoplan.export.folder import emit
from autoplan.export.model import emit_model

__all__ = ["emit", "emit_model"]
