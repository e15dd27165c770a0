"""Bytes that torch's CPU allocator holds, by its own count, whatever else the process does. The same in every run but
where collectives run beside the computation: their buffers live as long as they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_STEPS = "the steps"


def peak_bytes(build: Callable[[], Callable[[], Any]], *, steps: int) -> int:
    """The most that was allocated at once during ``steps`` calls of what ``build()`` returns, all that ``build``
    allocated and kept included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step = build()
        with record_function(_STEPS):
            for _ in range(steps):
                step()
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    began, held, peak = False, 0, 0
    for event in events:
        began = began or event.name() == _STEPS
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held) if began else held
    return peak
