"""Layer kinds of the mixtures of experts by hand, as :mod:`.transformer` has the dense ones.

Attention is grouped-query, or *latent* (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries and keys-values go through
narrow projections, a head has 128 + 64 rotary dimensions of keys and 128 of values. A token goes to ``topk`` of
``experts``; a rank holds experts / ``parallel`` of them and gets, where the load is even, as many rows as it sends.
Experts are gated, one grouped product up (gate and up as one) and one down; a shared expert sees every token.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.layers.types import Attention, Gemm, LayerKind, Operator, Parameter
from tests.regression.transformer import (
    HALF,
    Shape,
    block_collectives,
    flash_core,
    linear,
    moving,
    norm,
    residual,
    rotary,
)

# DeepSeek-V3's latent widths (arXiv 2412.19437, section 4.2), Kimi K2's too: queries, keys-values, head parts.
QUERY_RANK, VALUE_RANK, NOPE, ROPE = 1536, 512, 128, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model, and over how many ranks they are spread. ``dense_ffn`` is the gated width of the first
    ``dense_layers`` layers; ``window``: every second layer attends to that many keys (0: none)."""

    experts: int
    topk: int
    ffn: int
    parallel: int
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: bool = False
    window: int = 0
    biases: bool = False

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.experts // self.parallel


def mixture_block(shape: Shape, mixture: Mixture) -> LayerKind:
    """One layer with experts. The expert axis's dispatch and combine are not in it."""
    row = HALF * shape.seq * shape.hidden / shape.spread
    operators = (
        norm(shape, row),
        *_attention(shape, mixture),
        residual(shape, row),
        norm(shape, row),
        *_experts(shape, mixture, row),
        residual(shape, row),
    )
    return LayerKind(
        operators=operators,
        parameters=(
            Parameter(role="attention", elements=_attention_elements(shape, mixture), element_bytes=2),
            Parameter(role="shared", elements=3 * shape.hidden * mixture.shared_ffn, element_bytes=2),
            Parameter(role="experts", elements=3 * shape.hidden * mixture.ffn * mixture.local, element_bytes=2),
        ),
        collectives=block_collectives(shape),
        input_bytes=row,
    )


def _attention(shape: Shape, mixture: Mixture) -> tuple[Operator, ...]:
    heads, kv, d = shape.heads // shape.tensor, max(1, shape.kv_heads // shape.tensor), shape.width
    h = shape.hidden
    if not mixture.latent:
        core = flash_core(shape)
        if mixture.window:
            core = (_windowed(shape, mixture, core[0]),)
        width = (heads + 2 * kv) * d
        return (
            linear(shape, "qkv", width, h),
            *rotary(shape, heads + kv, d),
            *core,
            linear(shape, "projection", h, heads * d),
        )
    keys = NOPE + ROPE
    attention = Attention(
        heads=heads,
        key_value_heads=heads,
        query_length=shape.seq,
        key_length=shape.seq,
        head_dim=keys,
        value_dim=NOPE,
        causal=True,
        masked=False,
    )
    core = (_core(shape, attention),)
    return (
        linear(shape, "query_down", QUERY_RANK, h),
        norm(shape, HALF * shape.seq * QUERY_RANK),
        linear(shape, "query_up", heads * keys, QUERY_RANK),
        linear(shape, "value_down", VALUE_RANK + ROPE, h),
        norm(shape, HALF * shape.seq * VALUE_RANK),
        linear(shape, "value_up", heads * 2 * NOPE, VALUE_RANK),
        *rotary(shape, 2 * heads, keys),
        *core,
        linear(shape, "projection", h, heads * NOPE),
    )


def _core(shape: Shape, attention: Attention) -> Operator:
    return Operator(
        name="attention",
        target="aten::scaled_dot_product_attention",
        kind="attention",
        dtype=shape.half,
        attention=attention,
    )


def _windowed(shape: Shape, mixture: Mixture, core: Operator) -> Operator:
    """Half of the layers see a window: the mean of both, as one core of as many keys. A learned sink enters the
    softmax's sum: as with an explicit mask the fastest kernels don't take it."""
    keys = (shape.seq + 2 * mixture.window) // 2
    assert core.attention is not None
    attention = Attention(
        heads=core.attention.heads,
        key_value_heads=core.attention.key_value_heads,
        query_length=shape.seq,
        key_length=keys,
        head_dim=core.attention.head_dim,
        value_dim=core.attention.value_dim,
        causal=True,
        masked=True,
    )
    return _core(shape, attention)


def _experts(shape: Shape, mixture: Mixture, row: float) -> tuple[Operator, ...]:
    f, k, h = mixture.ffn, mixture.topk, shape.hidden
    routed = k * row
    inner = routed * f / h
    shared = HALF * shape.seq * mixture.shared_ffn
    # A kernel an expert, of fp32 values: a bias is weighted by the router's fp32 probabilities, then cast and joined.
    added = (moving(shape, "add_bias", 8 * inner, 8 * inner), moving(shape, "clamp", 2 * inner, 2 * inner))
    operators = (
        linear(shape, "router", mixture.experts, h, dtype=shape.half),
        moving(shape, "permute", routed, routed, kind="copy"),
        _grouped(shape, mixture, "experts_up", 2 * f, h),
        *(added if mixture.biases else ()),
        moving(shape, "swiglu", 2 * inner, inner),
        _grouped(shape, mixture, "experts_down", h, f),
        *((moving(shape, "add_bias", 6 * routed, 6 * routed),) if mixture.biases else ()),
        moving(shape, "unpermute", routed, row, kind="copy"),
    )
    if not mixture.shared_ffn:
        return operators
    return (
        *operators,
        linear(shape, "shared_up", 2 * mixture.shared_ffn, h),
        moving(shape, "swiglu", 2 * shared, shared),
        linear(shape, "shared_down", h, mixture.shared_ffn),
    )


def _grouped(shape: Shape, mixture: Mixture, name: str, n: int, k: int) -> Operator:
    rows = shape.seq * mixture.topk / shape.spread
    flops = 2.0 * rows * n * k
    return Operator(
        name=name,
        target="aten::_grouped_mm",
        kind="grouped_gemm",
        dtype=shape.dtype,
        flops=flops,
        backward_flops=2 * flops,
        read_bytes=HALF * rows * k,
        written_bytes=HALF * rows * n,
        parameter_bytes=HALF * n * k * mixture.local,
        gemm=Gemm(m=max(1, round(rows / mixture.local)), n=n, k=k, groups=mixture.local),
    )


def _attention_elements(shape: Shape, mixture: Mixture) -> int:
    h, t = shape.hidden, shape.tensor
    if not mixture.latent:
        return 2 * h * shape.width * (shape.heads + max(1, shape.kv_heads)) // t
    wide = QUERY_RANK * shape.heads * (NOPE + ROPE) + VALUE_RANK * shape.heads * 2 * NOPE + h * shape.heads * NOPE
    return h * (QUERY_RANK + VALUE_RANK + ROPE) + wide // t
