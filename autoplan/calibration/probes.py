"""What is measured: operators in the shapes that training has, each with the description that plans price.

As in a forward, every output is kept, 48 MiB of them, so that results go to memory that is in no cache. A *chained*
probe runs one operator over and over on its own output: operands come from the operator before. Products and attention
instead take other operands at every call, because in training weights and saved activations come from memory (on a Zen
5 core hot operands flatter a product by 5 to 10%). Sizes are chosen so that a call takes from microseconds (dispatch)
to tens of milliseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoplan.cost_models.precision import dtype_bytes
from autoplan.layers.types import Attention, Gemm, Operator, OperatorKind

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
_KEPT_BYTES = 48 * 2**20
_DISPATCHED = 16  # rows and columns: far too few elements to take time of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """``operator`` describes one call of ``function(*operands)``; ``calls`` in a row make one timing, each on operands
    of its own, or where ``chained`` with the output before as first operand. ``swept``: what the caches held is gone
    before each call."""

    family: str
    operator: Operator
    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    backward: bool
    chained: bool = False
    swept: bool = False
    calls: int = 1

    def operands(self, device: torch.device, *, gradients: bool) -> list[list[Tensor]]:
        """Random operands on ``device``: of every call, or of the first of a chain."""
        dtype = _DTYPES[self.operator.dtype]
        return [
            [torch.randn(shape, dtype=dtype, device=device).requires_grad_(gradients) for shape in self.shapes]
            for _ in range(1 if self.chained else self.calls)
        ]


def probes(device_type: str, *, quick: bool) -> tuple[Probe, ...]:
    """What to measure on ``device_type`` (cpu or cuda); ``quick``: a small part of it."""
    sizes = _CUDA if device_type == "cuda" else _CPU
    made = [
        *(_linear(dtype, *mkn, sizes.calls) for dtype, shapes in sizes.products.items() for mkn in shapes),
        *(_attention(sizes.attention_dtype, *shape, sizes.calls) for shape in sizes.attentions),
        *(wise(sizes.attention_dtype, rows, sizes.width) for rows in sizes.rows for wise in (_copy, _add, _norm)),
        *(_gelu(sizes.attention_dtype, rows, sizes.width) for rows in sizes.rows),
    ]
    small = [
        _dispatch("add", torch.add, operands=2),
        _dispatch("linear", F.linear, operands=2, gemm=True),
        _dispatch("gelu", F.gelu, operands=1),
        _dispatch("layer_norm", _norm_of_last, operands=1),
    ]
    if device_type == "cpu":
        small = [
            _met_once("add.Tensor", operands=2),
            _met_once("linear.default", operands=2, gemm=True),
            _met_once("layer_norm.default", operands=1, arguments=([_DISPATCHED],)),
            _met_once("view.default", operands=1, arguments=([_DISPATCHED**2],)),
            _met_once("transpose.int", operands=1, arguments=(0, 1)),
        ]
    return (*(made[::2] if quick else made), *small)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """``products``: (m, k, n) by dtype; ``attentions``: (samples, heads, length, head dimension, causal); ``calls``:
    sets of operands of both, enough to leave the caches."""

    products: dict[str, tuple[tuple[int, int, int], ...]]
    attentions: tuple[tuple[int, int, int, int, bool], ...]
    attention_dtype: str
    rows: tuple[int, ...]
    width: int
    calls: int


_CPU = _Sizes(
    products={
        "fp32": ((64, 256, 768), (512, 256, 256), (512, 256, 1024), (1024, 1024, 256), (1024, 256, 1024)),
        "fp64": ((256, 256, 512), (512, 256, 512)),
    },
    attentions=(
        (8, 4, 64, 64, True),
        (4, 4, 128, 64, True),
        (2, 4, 256, 64, False),
        (1, 4, 512, 64, True),
        (1, 4, 512, 64, False),
    ),
    attention_dtype="fp32",
    rows=(1024, 2048, 8192),
    width=256,
    calls=8,
)
_CUDA = _Sizes(
    products={
        "bf16": (
            (2048, 2048, 2048),
            (4096, 4096, 4096),
            (8192, 4096, 4096),
            (8192, 4096, 14336),
            (8192, 8192, 8192),
            (16384, 4096, 1024),
        ),
        "fp16": ((4096, 4096, 4096), (8192, 8192, 8192)),
        "fp32": ((4096, 4096, 4096),),
    },
    attentions=((4, 16, 1024, 64, True), (2, 32, 2048, 128, True), (2, 32, 2048, 128, False), (1, 32, 8192, 128, True)),
    attention_dtype="bf16",
    rows=(4096, 16384, 65536),
    width=4096,
    calls=1,
)


def _linear(dtype: str, m: int, k: int, n: int, calls: int) -> Probe:
    size, flops = dtype_bytes(dtype), 2.0 * m * k * n
    operator = Operator(
        name=f"linear {dtype} [{m}, {k}] x [{k}, {n}]",
        target="aten.linear.default",
        kind="gemm",
        dtype=dtype,
        flops=flops,
        backward_flops=2 * flops,
        read_bytes=size * m * k,
        written_bytes=size * m * n,
        parameter_bytes=size * (k + 1) * n,
        gemm=Gemm(m=m, n=n, k=k),
    )
    shapes = ((m, k), (n, k), (n,))
    return Probe(family="gemm", operator=operator, function=F.linear, shapes=shapes, backward=True, calls=calls)


def _attention(dtype: str, samples: int, heads: int, length: int, width: int, causal: bool, calls: int) -> Probe:
    flops = 4.0 * samples * heads * length * length * width
    operator = Operator(
        name=f"attention {dtype} {samples} x {heads} heads, {length} x {width}{', causal' if causal else ''}",
        target="aten.scaled_dot_product_attention.default",
        kind="attention",
        dtype=dtype,
        flops=flops,
        backward_flops=2.5 * flops,
        attention=Attention(
            heads=samples * heads,
            key_value_heads=samples * heads,
            query_length=length,
            key_length=length,
            head_dim=width,
            value_dim=width,
            causal=causal,
            masked=False,
        ),
    )

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    shape = (samples, heads, length, width)
    return Probe(
        family="attention", operator=operator, function=function, shapes=(shape,) * 3, backward=True, calls=calls
    )


def _copy(dtype: str, rows: int, width: int) -> Probe:
    return _memory("clone", "copy", dtype, rows, width, torch.clone, operands=1, backward=False)


def _add(dtype: str, rows: int, width: int) -> Probe:
    return _memory("add", "elementwise", dtype, rows, width, torch.add, operands=2, backward=False)


def _gelu(dtype: str, rows: int, width: int) -> Probe:
    return _memory("gelu", "elementwise", dtype, rows, width, F.gelu, operands=1, backward=True)


def _norm(dtype: str, rows: int, width: int) -> Probe:
    return _memory("layer_norm", "normalization", dtype, rows, width, _norm_of_last, operands=1, backward=True)


def _norm_of_last(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _memory(
    name: str,
    kind: OperatorKind,
    dtype: str,
    rows: int,
    width: int,
    function: Callable[..., Any],
    *,
    operands: int,
    backward: bool,
) -> Probe:
    moved = dtype_bytes(dtype) * rows * width
    operator = Operator(
        name=f"{name} {dtype} [{rows}, {width}]",
        target=f"aten.{name}.default",
        kind=kind,
        dtype=dtype,
        read_bytes=operands * moved,
        written_bytes=moved,
        needs_backward=backward,
    )
    shapes = ((rows, width),) * operands
    return Probe(
        family="memory",
        operator=operator,
        function=function,
        shapes=shapes,
        backward=backward,
        chained=True,
        calls=max(1, round(_KEPT_BYTES / moved)),
    )


def _met_once(target: str, *, operands: int, arguments: tuple[object, ...] = (), gemm: bool = False) -> Probe:
    """A small operator as a graph calls it, in the forward: what a CPU's backward costs is taken to be alike, because
    one call's would be entering autograd."""
    name, _, overload = target.partition(".")
    operator = getattr(getattr(torch.ops.aten, name), overload)
    small = _dispatch(name, lambda *tensors: operator(*tensors, *arguments), operands=operands, gemm=gemm)
    return dataclasses.replace(small, backward=False, chained=False, swept=True, calls=1)


def _dispatch(name: str, function: Callable[..., Tensor], *, operands: int, gemm: bool = False) -> Probe:
    size = 4.0 * _DISPATCHED**2
    flops = 2.0 * _DISPATCHED**3 if gemm else 0.0
    operator = Operator(
        name=f"small {name}",
        target=f"aten.{name}.default",
        kind="gemm" if gemm else "elementwise",
        dtype="fp32",
        flops=flops,
        backward_flops=2 * flops,
        read_bytes=size * operands,
        written_bytes=size,
        gemm=Gemm(m=_DISPATCHED, n=_DISPATCHED, k=_DISPATCHED) if gemm else None,
    )
    return Probe(
        family="dispatch",
        operator=operator,
        function=function,
        shapes=((_DISPATCHED, _DISPATCHED),) * operands,
        backward=True,
        chained=True,
        calls=100,
    )
