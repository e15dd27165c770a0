"""Rules of operators over channels: convolutions and the norms that go with them.

Groups tie input to output channels: a grouped convolution, or a norm over groups of channels, splits between groups and
runs with a share of them on each rank. Statistics of a batch norm are buffers that training writes to, and a buffer is
whole on every rank; without them, or once they only are read, a channel knows nothing of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoplan.sharding.operation import Operation
from autoplan.sharding.placements import Shard
from autoplan.sharding.rules import FactorRule, Factors, Option

_GROUPED = "x[b, c, *s!], w[c, i!, *k!], bias[c] -> y[b, c, *r!]"


class Convolution(FactorRule):
    """Input channels contract, output channels split; with groups, channels by groups: w[c, i!, *k!]."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.grouped = None if "transpose" in self.name else ByGroups(f"{self.name}: {_GROUPED}", "groups")

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if operation.arguments.get("groups", 1) == 1:
            yield from super().options(operation, slot, state)
        elif self.grouped is not None and operation.operands[0].shape[1] == operation.shape[1]:
            yield from self.grouped.options(operation, slot, state)

    def local_arguments(self, operation: Operation, option: Option) -> dict[str, Any]:
        if operation.arguments.get("groups", 1) == 1 or self.grouped is None:
            return {}
        return self.grouped.local_arguments(operation, option)


class ByGroups(FactorRule):
    """Channels split between groups; ``argument`` holds their number."""

    def __init__(self, line: str, argument: str) -> None:
        super().__init__(line)
        self.argument = argument

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if operation.arguments[self.argument] % operation.degree == 0 and not (state.parts or state.block):
            yield from super().options(operation, slot, state)

    def local_arguments(self, operation: Operation, option: Option) -> dict[str, Any]:
        split = isinstance(option.output, Shard) and option.output.dim == 1
        return {self.argument: operation.arguments[self.argument] // operation.degree} if split else {}


class BatchNorm(FactorRule):
    """Statistics that training writes keep it whole."""

    def factors(self, operation: Operation) -> Factors | None:
        keeps = operation.operand("running_mean") is not None
        return None if keeps and operation.arguments.get("training") else super().factors(operation)
