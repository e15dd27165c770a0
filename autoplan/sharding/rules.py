"""Factor rules: one line an operator says which dimensions are one and the same factor.

``linear: x[*b, i], w[o, i], +bias[o] -> y[*b, o]``. Splitting a factor over the tensor axis places every operand: the
dimension present = Shard; absent = Copied (its gradient sums over the axis); absent from the result = the result is
Partial. ``*b`` is any number of dimensions, aligned from the right and broadcast. ``c!`` must stay whole (a norm's
dimension). ``+bias`` is added once the sum over a split factor is complete.

A rule answers one question: which options agree with *this* placement of *that* operand (or of the result)?
Everything else (which placements a value may have at all, which is cheapest, what the pass writes) follows from it.
Rearranging operators have rules in :mod:`autoplan.sharding.rearrange`; a few with a mind of their own in
:mod:`autoplan.sharding.special`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoplan.errors import AutoplanError
from autoplan.sharding.operation import Operation, Shape
from autoplan.sharding.placements import COPIED, PARTIAL, REPLICATE, Placement, Shard

RESULT = -1  # the slot of the result
# Operators that can run without their bias, so that it is added once the sum over ranks is complete.
ADDS_LATE = frozenset(("linear", "addmm", *(f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3))))
Factors = dict[Hashable, dict[int, int]]  # factor -> slot -> dimension


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run an operator: a placement for each operand and one for its result (of a tuple: of each element).

    ``form`` names what the pass writes: "plain" the operator itself with local literals. ``gemm``: which of m, n, k,
    groups the split divides, for pricing. ``gemm``/``form`` say nothing about legality: ``inputs`` do.
    """

    inputs: tuple[Placement, ...]
    output: Placement
    form: str = "plain"
    gemm: str = ""

    @property
    def split(self) -> bool:
        """Whether every rank does its share of the work only."""
        return any(isinstance(state, Shard) for state in (*self.inputs, self.output))

    @property
    def keeps_share(self) -> bool:
        """Whether what is kept for the backward is a share."""
        return isinstance(self.output, Shard) or self.form == "vocabulary_cross_entropy"

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {self.output}"


class Rule:
    """What is known of one operator. The base knows nothing: the operator runs whole on every rank."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterable[Option]:
        """The options in which operand ``slot`` (or the result, :data:`RESULT`) is placed as ``state``."""
        return ()

    def passes_partial(self, operation: Operation) -> bool:
        """Whether summands in give summands out."""
        return False

    def local_arguments(self, operation: Operation, option: Option) -> dict[str, Any]:
        """The literals that change on a rank, by argument name; sizes may be fx nodes, see :func:`local_size`."""
        return {}


def absent(operation: Operation, slot: int) -> Placement:
    """The placement of an operand that lacks the split factor."""
    return COPIED if operation.operands[slot].differentiable else REPLICATE


@dataclass(frozen=True, slots=True)
class LocalSize:
    """A size that is divided by the degree on each rank. ``size`` is an int or the fx node of a symbolic one."""

    size: Any


def local_size(size: Any, degree: int) -> Any:
    """``size`` divided by the degree; -1 (infer) stays; a node is divided when the graph is written."""
    if isinstance(size, int):
        return size if size == -1 else size // degree
    return LocalSize(size)


@dataclass(frozen=True, slots=True)
class _Operand:
    name: str
    dims: tuple[str, ...]
    additive: bool


_OPERAND = re.compile(r"\s*(\+?)(\w+)\[([^\]]*)\]\s*")


def _parse_operand(text: str, line: str) -> _Operand:
    match = _OPERAND.fullmatch(text)
    if not match:
        raise AutoplanError(
            f"not an operand of a factor rule: {text.strip()!r}",
            where=line,
            legal="name[dim, dim, ...], with *dims for any number, dim! for one that stays whole",
            attempt='for example "mylib.scale: x[*b, c], w[c] -> y[*b, c]"',
        )
    dims = tuple(dim.strip() for dim in match[3].split(",") if dim.strip())
    return _Operand(match[2], dims, bool(match[1]))


class FactorRule(Rule):
    """A rule written as one line. Operands stand in the order of the operator's tensor arguments."""

    def __init__(self, line: str) -> None:
        head, _, body = line.partition(":")
        left, arrow, right = body.partition("->")
        self.line, self.name = line, head.strip()
        operands = re.findall(r"[^,\[\]]+\[[^\]]*\]", left)
        if not arrow or not operands or not self.name:
            raise AutoplanError(
                "not a factor rule",
                where=line,
                legal="operator: operand[dims], ... -> result[dims]",
                attempt='for example "mylib.scale: x[*b, c], w[c] -> y[*b, c]"',
            )
        self.operands = tuple(_parse_operand(text, line) for text in operands)
        self.result = _parse_operand(right, line)
        named = [dim for operand in (*self.operands, self.result) for dim in operand.dims]
        self.whole = frozenset(dim.strip("*!") for dim in named if dim.endswith("!"))

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        table = self.factors(operation)
        if table is None:
            return
        for factor, places in table.items():
            if places.get(slot) == state.dim and not self._stays_whole(factor):
                option = self._split(operation, places, state)
                if option is not None:
                    yield option

    def factors(self, operation: Operation) -> Factors | None:
        """Factor -> slot -> dimension; None where the operator's shapes do not fit the line."""
        by_argument = self._aligned(operation)
        if by_argument is None or len(operation.shapes) != 1:
            return None
        table: Factors = {}
        result = _bind_dims(self.result.dims, operation.shape)
        if result is None:
            return None
        for factor, dim in result.items():
            table.setdefault(factor, {})[RESULT] = dim
        for slot, operand in by_argument.items():
            dims = _bind_dims(operand.dims, operation.operands[slot].shape)
            if dims is None:
                return None
            for factor, dim in dims.items():
                places = table.setdefault(factor, {})
                if RESULT in places and operation.operands[slot].shape[dim] != operation.shape[places[RESULT]]:
                    continue  # broadcast: the operand lacks the factor
                places[slot] = dim
        return table

    def _aligned(self, operation: Operation) -> dict[int, _Operand] | None:
        """The line's operands by slot; those left out of the call are skipped."""
        tensors = _tensor_arguments(operation)
        found: dict[int, _Operand] = {}
        for name, operand in zip(tensors, self.operands, strict=False):
            for slot in operation.slots.get(name, ()):
                found[slot] = operand
        return found if len(found) == len(operation.operands) else None

    def _stays_whole(self, factor: Hashable) -> bool:
        name = factor[0] if isinstance(factor, tuple) else factor
        return name in self.whole

    def _split(self, operation: Operation, places: dict[int, int], state: Shard) -> Option | None:
        additive = self.additive_slots(operation)
        contracted = RESULT not in places
        late = bool(additive) and contracted
        if late and operation.key not in ADDS_LATE:
            return None
        inputs: list[Placement] = []
        for slot in range(len(operation.operands)):
            if slot in places:
                inputs.append(state.at(places[slot]))
            elif slot in additive and late:
                inputs.append(REPLICATE)
            else:
                inputs.append(absent(operation, slot))
        output: Placement = REPLICATE if late else PARTIAL if contracted else state.at(places[RESULT])
        return Option(tuple(inputs), output, "add_after_reduce" if late else "plain", _gemm_dimension(places, additive))

    def additive_slots(self, operation: Operation) -> set[int]:
        """The operands marked ``+``."""
        aligned = self._aligned(operation) or {}
        return {slot for slot, operand in aligned.items() if operand.additive}


def _gemm_dimension(places: dict[int, int], additive: set[int]) -> str:
    """Which dimension of the underlying product is divided; its factors are the operands that are not added."""
    if RESULT not in places:
        return "k"
    core = [slot for slot in places if slot != RESULT and slot not in additive]
    first = 1 if 0 in additive else 0
    return "groups" if len(core) > 1 else "m" if core == [first] else "n"


class Pointwise(Rule):
    """Element-wise with broadcasting: every dimension of the result is a factor."""

    def __init__(self, *, linear: bool = False) -> None:
        self.linear = linear

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        shape = operation.shape
        source = shape if slot == RESULT else operation.operands[slot].shape
        dim = state.dim + len(shape) - len(source)
        if source[state.dim] != shape[dim]:
            return
        inputs = []
        for index, operand in enumerate(operation.operands):
            own = dim - (len(shape) - len(operand.shape))
            present = own >= 0 and operand.shape[own] == shape[dim]
            inputs.append(state.at(own) if present else absent(operation, index))
        if any(isinstance(state, Shard) for state in inputs) or operation.key in ("expand", "expand_as"):
            yield Option(tuple(inputs), state.at(dim))

    def passes_partial(self, operation: Operation) -> bool:
        if operation.key in ("add", "sub"):  # a number added on every rank would be added once too often
            return len(operation.operands) == 2
        if operation.key in ("mul", "div"):
            return set(operation.slots) == {"self"}
        if operation.key in ("to", "type_as"):  # a narrower type would round the summands
            return operation.operands[0].node.meta["val"].dtype == operation.node.meta["val"].dtype
        return self.linear

    def local_arguments(self, operation: Operation, option: Option) -> dict[str, Any]:
        if operation.key != "expand" or not isinstance(option.output, Shard):
            return {}
        sizes = list(operation.arguments["size"])
        sizes[option.output.dim] = local_size(sizes[option.output.dim], operation.degree)
        return {"size": sizes}


def _tensor_arguments(operation: Operation) -> tuple[str, ...]:
    """The names of the operator's tensor arguments in the order of its schema."""
    target = operation.node.target
    if not isinstance(target, torch._ops.OpOverload):
        return tuple(operation.slots)
    return tuple(argument.name for argument in target._schema.arguments if "Tensor" in str(argument.type))


def _bind_dims(names: tuple[str, ...], shape: Shape) -> dict[Hashable, int] | None:
    """Dimension of each factor; starred ones become (name, distance from the right)."""
    star = next((index for index, name in enumerate(names) if name.startswith("*")), None)
    if star is None:
        return {name.strip("!"): dim for dim, name in enumerate(names)} if len(names) == len(shape) else None
    count = len(shape) - len(names) + 1
    if count < 0:
        return None
    bound: dict[Hashable, int] = {name.strip("!"): dim for dim, name in enumerate(names[:star])}
    for offset in range(count):
        bound[(names[star].strip("*!"), count - offset)] = star + offset
    for index, name in enumerate(names[star + 1 :]):
        bound[name.strip("!")] = star + count + index
    return bound
