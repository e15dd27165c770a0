"""Shapes of a captured graph at any batch size.

A dynamic capture writes the batch as one sympy symbol (torch names it, e.g. ``s17``), and every size is an expression
in it: ``[s17, 16, 32]``, ``[16*s17, 96]``. A size that depends on *values* (``nonzero``, boolean indexing) is an
unbacked symbol (``u0``): it has no exact size before the program runs, only an upper bound. torch gives that bound at
the largest batch it traced for, B = :data:`MAX_BATCH`, a prime that no model's own sizes hold as a factor. So a bound
c x batch^k is read back exactly: k is how often B divides it. A sum of such terms is read digit by digit in base B
(Kronecker substitution), right for coefficients below B.
"""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule

from autoplan.errors import CaptureError

MAX_BATCH = 1_000_003


def batch_symbol(graph_module: GraphModule) -> sympy.Symbol | None:
    """The symbol of the batch dimension, or None where the graph only runs at the example's batch size."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], SymInt):
            expression = value.shape[0].node.expr
            if isinstance(expression, sympy.Symbol):
                return expression
    return None


def is_data_dependent(value: Any) -> bool:
    """Whether a node's value (a tensor, or a tuple of them) has a size that only its data decides."""
    if isinstance(value, Tensor):
        return any(is_data_dependent(size) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return any(is_data_dependent(item) for item in value)
    if isinstance(value, SymInt):
        environment = value.node.shape_env
        return any(environment.is_unbacked_symint(symbol) for symbol in value.node.expr.free_symbols)
    return False


def size_at(size: int | SymInt, batch: int) -> int:
    """A size at ``batch`` samples; a data-dependent one at its upper bound.

    Raises CaptureError where a data-dependent size has no bound.
    """
    if not isinstance(size, SymInt):
        return int(size)
    expression, environment = size.node.expr, size.node.shape_env
    values = {}
    for symbol in expression.free_symbols:
        values[symbol] = _bound_at(symbol, environment, batch) if environment.is_unbacked_symint(symbol) else batch
    return int(expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()}))


def shape_at(value: Tensor, batch: int) -> tuple[int, ...]:
    """The shape of a node's ``meta["val"]`` at ``batch`` samples.

    Of a static capture the shape is the traced one, whatever ``batch`` says: divide by ``Capture.batch_size`` instead.
    """
    return tuple(size_at(size, batch) for size in value.shape)


def elements_at(value: Tensor, batch: int) -> int:
    """How many elements ``meta["val"]`` has at ``batch`` samples."""
    count = 1
    for size in value.shape:
        count *= size_at(size, batch)
    return count


def bytes_at(value: Tensor, batch: int) -> int:
    """The bytes of ``meta["val"]`` at ``batch`` samples, as if contiguous."""
    return elements_at(value, batch) * torch.empty(0, dtype=value.dtype, device="meta").element_size()


def _bound_at(symbol: sympy.Symbol, environment: Any, batch: int) -> int:
    upper = environment.var_to_range[symbol].upper
    if not upper.is_Integer or int(upper) >= torch.iinfo(torch.int64).max - 1:
        raise CaptureError(
            f"a tensor's size ({symbol}) depends on its data and has no upper bound",
            legal="sizes that follow from the shapes of the inputs, or are bounded by them as nonzero's are",
            attempt="use a mask (torch.where with three arguments, masked_fill) instead of selecting by value",
        )
    return _at_batch(int(upper), batch)


def _at_batch(bound: int, batch: int) -> int:
    """A polynomial in the batch at ``batch``, given its value ``bound`` at MAX_BATCH."""
    coefficient, power = bound, 0
    while coefficient and coefficient % MAX_BATCH == 0:
        coefficient, power = coefficient // MAX_BATCH, power + 1
    if power:
        return coefficient * batch**power
    digits = []
    while bound:
        bound, digit = divmod(bound, MAX_BATCH)
        digits.append(digit)
    return sum(digit * batch**power for power, digit in enumerate(digits))
