"""Types for tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Invoke = Callable[..., Any]
