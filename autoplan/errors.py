"""The one family of errors that reaches a user.

Every message says what failed, where (the user's file and line, or the field), what is legal instead and one
thing to try. The command line prints it and exits with ``exit_code``: 1 the answer is no, 2 bad input, 3 fault.
"""

from __future__ import annotations


class AutoplanError(Exception):
    """Base of the family: ``what`` failed, ``where``, what is ``legal`` and what to ``attempt`` next."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", legal: str = "", attempt: str = "") -> None:
        self.what = what
        self.where = where
        self.legal = legal
        self.attempt = attempt
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  at:    {self.where}")
        if self.legal:
            lines.append(f"  legal: {self.legal}")
        if self.attempt:
            lines.append(f"  try:   {self.attempt}")
        return "\n".join(lines)


class ModelError(AutoplanError):
    """MODEL names nothing that can be built: unknown preset, malformed config, factory that fails."""


class CaptureError(AutoplanError):
    """The model cannot be traced, or tracing it would lose numbers."""


class ClusterError(AutoplanError):
    """The cluster's description is not one: unknown kind, zero GPUs, malformed file."""


class StrategyError(AutoplanError):
    """What was forced is not legal for this model, batch or cluster."""


class PlanFileError(AutoplanError):
    """A plan file is malformed, too new, or made for another model or cluster."""


class InfeasibleError(AutoplanError):
    """The input is right and nothing fits. ``short_by_bytes`` on the worst GPU; ``term`` is the largest."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        short_by_bytes: float = 0.0,
        term: str = "",
        suggestions: tuple[str, ...] = (),
        where: str = "",
        legal: str = "",
        attempt: str = "",
    ) -> None:
        super().__init__(what, where=where, legal=legal, attempt=attempt)
        self.short_by_bytes = short_by_bytes
        self.term = term
        self.suggestions = suggestions


class VerifyError(AutoplanError):
    """The planned program does not compute the original's numbers."""

    exit_code = 1


class RuntimeFault(AutoplanError):
    """A rank failed while training; the message names rank, step, stage and micro-batch."""

    exit_code = 3
