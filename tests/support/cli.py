"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Invoke = Callable[..., Any]


def too_wide(text: str, columns: int = 80) -> list[str]:
    """Lines of more than ``columns``, but for commands to be copied: those hold a user's path, which is not broken."""
    return [line for line in text.splitlines() if len(line) > columns and not line.startswith("  autoplan ")]
