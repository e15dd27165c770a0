"""einsum: its equation is a factor rule already."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator

from autoplan.sharding.operation import Operation
from autoplan.sharding.placements import Shard
from autoplan.sharding.rules import FactorRule, Option, Rule, _Operand


class Einsum(Rule):
    """Letters are factors: those of the result split, the others contract; diagonals keep the operator whole."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        rule = _rule_of(str(operation.arguments["equation"]).replace(" ", ""))
        if rule is not None:
            yield from rule.options(operation, slot, state)


class _Equation(FactorRule):
    """The operands stand in one list instead of in an argument each."""

    def _aligned(self, operation: Operation) -> dict[int, _Operand] | None:
        return dict(enumerate(self.operands)) if len(self.operands) == len(operation.operands) else None


@functools.lru_cache(maxsize=256)
def _rule_of(equation: str) -> _Equation | None:
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    counts = Counter(left.replace(",", "").replace("...", ""))
    if not arrow:
        right = ("..." if "..." in left else "") + "".join(sorted(x for x, count in counts.items() if count == 1))
    if any(count > 1 for operand in operands for count in Counter(operand.replace("...", "")).values()):
        return None
    listed = ", ".join(f"x{index}[{_dims(operand)}]" for index, operand in enumerate(operands))
    return _Equation(f"einsum: {listed} -> y[{_dims(right)}]")


def _dims(letters: str) -> str:
    return ", ".join("*rest" if letter == "." else letter for letter in letters.replace("...", "."))
