"""What a forward does beside computing, while it is under trace: what it changes, and what it asks for that a trace
would keep as the one answer that it saw. Afterwards all is as it was: every trace starts from the same state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from autoplan.capture.holders import Holder
from autoplan.capture.reach import Reach, Snapshot
from autoplan.capture.sources import UNWATCHED, Sources
from autoplan.capture.tracked import is_reading, tracked


class Noticed:
    """``changed``: holders of what was changed, by the user's names; ``sources``: clocks and entropy asked for."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.reach = Reach({"self": model, "loss_fn": loss_fn})
        self.sources = Sources()
        self.changed: dict[str, Holder] = {}
        self.now: Snapshot | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around all traces."""
        with self.sources.watched(self.reach.named):
            yield

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around the model's call, or its calls."""
        self.now = snapshot = self.reach.snapshot()
        if is_reading():
            self._track()
        self.sources.of_clock = tracked if is_reading() else lambda value: value
        self.sources.counting = True
        try:
            yield
        finally:
            self.sources.counting = False
            if not is_reading():
                self.changed |= dict(snapshot.changes())
            self.now = None
            snapshot.restore()

    def _track(self) -> None:
        """Numbers that forward changes tell from here on what is made of them."""
        for name, holder in self.changed.items():
            content = holder.read()
            if isinstance(content, dict) and holder.label is not None:
                holder.put({key: tracked(v) if holder.label(key) == name else v for key, v in content.items()})
            elif isinstance(content, list) and not holder.draws:
                holder.put(tracked(content))

    @property
    def draws(self) -> list[str]:
        """The generators of random numbers and the iterators that it advanced."""
        return [name for name, holder in self.changed.items() if holder.draws]

    @property
    def state(self) -> list[str]:
        """What else it changed."""
        return [name for name, holder in self.changed.items() if not holder.draws]

    @property
    def may_differ(self) -> bool:
        """Whether a second call may compute something else, as far as can be told by now."""
        return bool(self.state or self.sources.clocks or self.reach.words & UNWATCHED)

    def has_changed(self, names: frozenset[str]) -> bool:
        """Whether forward, which is running, has changed one of ``names`` by now."""
        return self.now is not None and next(self.now.changes(names), None) is not None
