"""What verification found, as plain data: a line a check, a line a layer, and the first difference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from autoplan.errors import VerifyError
from autoplan.plan import Strategy

SCHEMA_VERSION = 1

Status = Literal["equal", "differs", "not executable here", "not run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing proven (or refuted) from the emitted graphs alone. ``detail`` says what was looked at, or what is
    wrong; ``where`` is the user's file and line, ``layer`` the layer of the model."""

    name: str
    ok: bool
    detail: str
    layer: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that differs. ``quantity``: "value" (of an operator's result), "gradient of a value", "gradient",
    "weight", "buffer", "loss" or "gradient norm"; ``error`` and ``allowed`` are norms of the difference."""

    layer: str
    quantity: str
    name: str
    error: float
    allowed: float
    step: int
    rank: int
    where: str = ""

    def describe(self) -> str:
        place = f" of `{self.name}`" if self.name else ""
        layer = f", layer {self.layer}" if self.layer else ""
        return (
            f"the {self.quantity}{place}{layer}: differs by {self.error:.2e}, allowed {self.allowed:.2e} "
            f"(step {self.step}, rank {self.rank})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNumbers:
    """The worst of one layer's tensors. ``compared``: how many; ``worst``: the largest error as a share of what is
    allowed, so that above 1 is different; ``tensor``: which."""

    layer: str
    compared: int
    worst: float
    tensor: str

    @property
    def equal(self) -> bool:
        return self.worst <= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Numeric:
    """The comparison by running. ``strategy`` is what was run, ``reductions`` what was made smaller for it, one
    sentence each; ``reason`` says why nothing was run where nothing was."""

    status: Status
    strategy: Strategy | None = None
    reductions: tuple[str, ...] = ()
    reason: str = ""
    ranks: int = 0
    steps: int = 0
    tolerance: float = 0.0
    layers: tuple[LayerNumbers, ...] = ()
    first: Difference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """``static`` holds of any number of ranks; ``numeric`` of the shrunken model. See :attr:`equal`."""

    model: str
    strategy: Strategy
    gpus: int
    static: tuple[Check, ...]
    numeric: Numeric
    seconds: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def static_ok(self) -> bool:
        return all(check.ok for check in self.static)

    @property
    def equal(self) -> bool:
        """Whether everything that was asked for was shown to be the same; what could not be run was not."""
        return self.static_ok and self.numeric.status in ("equal", "not run")

    @property
    def exit_code(self) -> int:
        """0 the same numbers, 1 not, or not shown."""
        return 0 if self.equal else 1

    def raise_if_different(self) -> None:
        """Raise :class:`VerifyError` with the first difference."""
        failed = next((check for check in self.static if not check.ok), None)
        if failed is not None:
            raise VerifyError(f"{failed.name}: {failed.detail}", where=failed.where or failed.layer)
        if self.numeric.first is not None:
            raise VerifyError(self.numeric.first.describe(), where=self.numeric.first.where)
        if not self.equal:
            raise VerifyError(self.numeric.reason)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data = dataclasses.asdict(self)
        return {
            "schema": SCHEMA_VERSION,
            "equal": self.equal,
            **data,
            "static": [dataclasses.asdict(check) for check in self.static],
        }
