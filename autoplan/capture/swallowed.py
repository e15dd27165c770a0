"""Tracing errors that the forward's own ``try`` caught: its except path would be traced, and training takes the other.

A branch on values cannot be traced and raises. Inside ``try: ... except Exception:`` nobody would hear of it. So what
tracing raises is kept, and if the forward returns all the same, whether it had reached a line of the user's by then is
told by its traceback; torch catches some of its own.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import nn

from autoplan.capture.errors import data_dependent_kinds, trace_failure, user_frame
from autoplan.errors import CaptureError


class Raised:
    """The tracing errors of one call of the forward, in order."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def add(self, error: BaseException) -> None:
        self._errors.append(error)

    def clear(self) -> None:
        self._errors.clear()  # they hold frames, and what those hold

    def swallowed(self, model: nn.Module) -> CaptureError | None:
        """The error to raise of a forward that returned; None where it caught nothing of these."""
        for error in self._errors:
            if user_frame(traceback.extract_tb(error.__traceback__)) is not None:
                return trace_failure(error, model)
        return None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """While inside, every tracing error is kept as it is made."""
        with contextlib.ExitStack() as stack:
            for kind in data_dependent_kinds():
                stack.enter_context(mock.patch.object(kind, "__init__", self._noting(kind)))
            yield

    def _noting(self, kind: type) -> Any:
        plain = kind.__init__  # type: ignore[misc]

        def init(error: BaseException, *args: Any, **kwargs: Any) -> None:
            plain(error, *args, **kwargs)
            self.add(error)

        return init
