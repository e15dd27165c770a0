"""No garbage collection where many objects are made and none is thrown away."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While inside, nothing looks for cycles: a sixth of the time of imports and of a large trace.

    Each pass would go through all live objects, and of a graph that grows, all are live.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
