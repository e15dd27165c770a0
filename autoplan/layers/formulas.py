"""FLOPs and matrix shapes of one operator, from the shapes of its operands.

A product [m, k] x [k, n] is 2mnk FLOPs. Attention is 2·T·S·(D + Dv) a head, of the *full* square: what a causal kernel
skips is the compute model's business (``Attention.causal``), as is the efficiency of any kernel. Only matrix products
count; all else is priced by bytes. The backward of a product is one product of the same size for each operand
that needs a gradient; of a flash-like attention 2.5 times its forward (five products for two: Dao 2023, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autoplan.layers.operators import ATTENTIONS, CONVOLUTIONS, GROUPED_GEMMS, RECURRENT
from autoplan.layers.types import Attention, Gemm


class Operand(NamedTuple):
    """A tensor operand: its sizes as numbers, and whether a gradient flows to it."""

    shape: tuple[int, ...]
    needs_gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call computes."""

    flops: float = 0.0
    backward_flops: float = 0.0
    gemm: Gemm | None = None
    attention: Attention | None = None


_NOTHING = Work()


def work_of(name: str, operands: Sequence[Any], output: Operand) -> Work:
    """The work of operator ``name``: ``operands`` are its arguments in the schema's order, tensors as Operand."""
    try:
        if name in ATTENTIONS:
            return _attention(operands)
        if name in CONVOLUTIONS:
            return _convolution(operands, output, transposed=_is_transposed(name, operands))
        if name in GROUPED_GEMMS:
            return _grouped(operands[0], operands[1])
        if name in RECURRENT:
            return _recurrent(operands)
        formula = _PRODUCTS.get(name)
        return formula(operands) if formula is not None else _NOTHING
    except (IndexError, AttributeError, TypeError):
        return _NOTHING  # an overload with operands we do not know: priced by its bytes


def _product(gemm: Gemm, *factors: Operand) -> Work:
    flops = 2.0 * gemm.m * gemm.n * gemm.k * gemm.groups
    return Work(flops=flops, backward_flops=flops * sum(factor.needs_gradient for factor in factors), gemm=gemm)


def _linear(operands: Sequence[Any]) -> Work:
    x, weight = operands[:2]
    columns = weight.shape[0] if len(weight.shape) > 1 else 1
    return _product(Gemm(m=math.prod(x.shape[:-1]), n=columns, k=x.shape[-1]), x, weight)


def _matmul(operands: Sequence[Any]) -> Work:
    left, right = operands[:2]
    a = left.shape if len(left.shape) > 1 else (1, *left.shape)
    b = right.shape if len(right.shape) > 1 else (*right.shape, 1)
    if len(b) == 2:
        return _product(Gemm(m=math.prod(a[:-1]), n=b[-1], k=a[-1]), left, right)
    return _product(Gemm(m=a[-2], n=b[-1], k=a[-1], groups=_broadcast(a[:-2], b[:-2])), left, right)


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    length = max(len(a), len(b))
    padded = zip((1,) * (length - len(a)) + a, (1,) * (length - len(b)) + b, strict=True)
    return math.prod(max(sizes) for sizes in padded)


def _added_matmul(operands: Sequence[Any]) -> Work:
    return _matmul(operands[1:])


def _einsum(operands: Sequence[Any]) -> Work:
    equation, factors = operands[0].replace(" ", ""), operands[1]
    if len(factors) != 2 or "..." in equation:
        return _NOTHING
    left, right = equation.partition("->")[0].split(",")
    kept = equation.partition("->")[2]
    size = dict(zip(left, factors[0].shape, strict=True)) | dict(zip(right, factors[1].shape, strict=True))

    def over(wanted: Any) -> int:
        return math.prod(size[letter] for letter in size if wanted(letter))

    gemm = Gemm(
        m=over(lambda d: d in left and d not in right and d in kept),
        n=over(lambda d: d in right and d not in left and d in kept),
        k=over(lambda d: d not in kept),
        groups=over(lambda d: d in left and d in right and d in kept),
    )
    return _product(gemm, *factors)


def _grouped(x: Operand, weight: Operand) -> Work:
    """Rows of ``x`` [rows, k] sorted by expert, times ``weight`` [experts, k, n]; experts alike in load."""
    experts, n = weight.shape[0], weight.shape[-1] if weight.shape[-2] == x.shape[-1] else weight.shape[-2]
    rows, k = math.prod(x.shape[:-1]), x.shape[-1]
    flops = 2.0 * rows * k * n
    gemm = Gemm(m=max(1, math.ceil(rows / experts)), n=n, k=k, groups=experts)
    return Work(flops=flops, backward_flops=flops * (x.needs_gradient + weight.needs_gradient), gemm=gemm)


def _is_transposed(name: str, operands: Sequence[Any]) -> bool:
    if "transpose" in name:
        return True
    return name in ("convolution", "_convolution") and len(operands) > 6 and operands[6] is True


def _convolution(operands: Sequence[Any], output: Operand, *, transposed: bool) -> Work:
    """As a product over unfolded windows: m output (transposed: input) places, k the window, n channels."""
    x, weight = operands[:2]
    places = x if transposed else output
    spatial = len(weight.shape) - 2
    channels = places.shape[-spatial - 1]
    if transposed:
        groups = max(1, output.shape[-spatial - 1] // weight.shape[1])
    else:
        groups = max(1, x.shape[-spatial - 1] // weight.shape[1])
    flops = 2.0 * math.prod(places.shape) * math.prod(weight.shape[1:])
    gemm = Gemm(
        m=math.prod(places.shape) // channels,
        n=channels // groups,
        k=math.prod(weight.shape[1:]),
        groups=groups,
    )
    return Work(flops=flops, backward_flops=flops * (x.needs_gradient + weight.needs_gradient), gemm=gemm)


def _attention(operands: Sequence[Any]) -> Work:
    """``operands``: query [*, H, T, D], key [*, Hk, S, D], value [*, Hk, S, Dv], mask, dropout, causal."""
    query, key, value, mask, _, causal = (*operands, *(None,) * 6)[:6]
    heads, length, head_dim = query.shape[-3:]
    other_length, value_dim = key.shape[-2], value.shape[-1]
    flops = 2.0 * math.prod(query.shape[:-1]) * other_length * (head_dim + value_dim)
    needs = query.needs_gradient or key.needs_gradient or value.needs_gradient
    return Work(
        flops=flops,
        backward_flops=2.5 * flops if needs else 0.0,
        attention=Attention(
            heads=heads,
            key_value_heads=key.shape[-3],
            query_length=length,
            key_length=other_length,
            head_dim=head_dim,
            value_dim=value_dim,
            causal=bool(causal),
            masked=mask is not None,
        ),
    )


def _recurrent(operands: Sequence[Any]) -> Work:
    """Every step multiplies every weight matrix once: 2 · steps · samples · weights."""
    x = operands[0]
    weights = [w for item in operands if isinstance(item, (list, tuple)) for w in item if isinstance(w, Operand)]
    matrices = [w for w in weights if len(w.shape) == 2]
    flops = 2.0 * math.prod(x.shape[:-1]) * sum(math.prod(w.shape) for w in matrices)
    needs = x.needs_gradient + any(w.needs_gradient for w in matrices)
    return Work(flops=flops, backward_flops=flops * needs)


_PRODUCTS = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "mv": _matmul,
    "dot": _matmul,
    "vdot": _matmul,
    "inner": _linear,
    "addmm": _added_matmul,
    "baddbmm": _added_matmul,
    "addmv": _added_matmul,
    "einsum": _einsum,
}
