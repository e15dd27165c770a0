"""Layer kinds of the two dense families by hand, from their shape: what a trace of them would give.

Everything is one tensor rank's and for one sample, in 16-bit activations. ``gpt``: 4h MLP with biases, LayerNorm,
tied head; ``llama``: gated MLP, RMSNorm, rotary positions, untied head. Attention is *unfused* (products, softmax and
dropout as Megatron ran them to 2022) or *flash*. Norm and rotary positions are one kernel each (*fused*), or the chain
of eager operators that torchtitan's model is: casts to fp32, square, mean, product, cast back, weight; and rotation of
complex fp32. Saved bytes follow Korthikanti et al. 2022, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.layers.types import Attention, Collective, Gemm, LayerKind, Operator, Parameter

HALF = 2.0  # bytes of an activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One model under a tensor degree."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    family: str = "gpt"
    head_dim: int = 0
    flash: bool = False
    dropout: bool = True
    fused: bool = True
    tensor: int = 1
    sequence_parallel: bool = False
    dtype: str = "bf16"

    @property
    def half(self) -> str:
        """The 16-bit dtype of everything but the linears: 8-bit training quantises only those."""
        return "fp16" if self.dtype == "fp16" else "bf16"

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def spread(self) -> int:
        """By how much sequence parallelism divides what tensor parallelism leaves whole."""
        return self.tensor if self.sequence_parallel else 1


def linear(shape: Shape, name: str, n: int, k: int, *, saved: float = 0.0, dtype: str = "") -> Operator:
    s = shape.seq
    flops = 2.0 * s * n * k
    return Operator(
        name=name,
        target="aten::linear",
        kind="gemm",
        dtype=dtype or shape.dtype,
        flops=flops,
        backward_flops=2 * flops,
        read_bytes=HALF * s * k,
        written_bytes=HALF * s * n,
        parameter_bytes=HALF * n * k,
        saved_bytes=saved,
        gemm=Gemm(m=s, n=n, k=k),
    )


def moving(
    shape: Shape, name: str, read: float, written: float, *, saved: float = 0.0, kind: str = "elementwise", **more: bool
) -> Operator:
    """An operator that is priced by what it moves; ``read`` and ``written`` in bytes."""
    return Operator(
        name=name,
        target=f"aten::{name}",
        kind=kind,  # type: ignore[arg-type]
        dtype=shape.half,
        read_bytes=read,
        written_bytes=written,
        saved_bytes=saved,
        **more,
    )


def norm(shape: Shape, row: float) -> Operator:
    """Eager RMSNorm reads 2 + 4 + 4 + 4 + 4 + 2 and writes 4 + 4 + 4 + 2 + 2 bytes for an element of 2."""
    read, written = (1, 1) if shape.fused else (10, 8)
    return moving(shape, "norm", read * row, written * row, saved=row, kind="normalization")


def _unfused_core(shape: Shape) -> tuple[Operator, ...]:
    s, heads, d = shape.seq, shape.heads // shape.tensor, shape.width
    scores = float(heads * s * s)
    flops = 2.0 * scores * d
    product = {
        "target": "aten::bmm",
        "kind": "gemm",
        "dtype": shape.half,
        "flops": flops,
        "backward_flops": 2 * flops,
        "core": True,
    }
    whole = HALF * s * heads * d
    return (
        Operator(
            name="scores",
            read_bytes=2 * whole,
            written_bytes=HALF * scores,
            gemm=Gemm(m=s, n=s, k=d, groups=heads, batch_in_groups=True),
            **product,  # type: ignore[arg-type]
        ),
        moving(shape, "softmax", HALF * scores, HALF * scores, saved=HALF * scores, kind="softmax", core=True),
        moving(shape, "dropout", HALF * scores, 3 * scores, saved=3 * scores, core=True),
        Operator(
            name="context",
            read_bytes=HALF * scores + whole,
            written_bytes=whole,
            gemm=Gemm(m=s, n=d, k=s, groups=heads, batch_in_groups=True),
            **product,  # type: ignore[arg-type]
        ),
        moving(shape, "transpose", whole, whole, saved=whole, kind="copy"),
    )


def flash_core(shape: Shape) -> tuple[Operator, ...]:
    s, heads, d = shape.seq, shape.heads // shape.tensor, shape.width
    attention = Attention(
        heads=heads,
        key_value_heads=max(1, shape.kv_heads // shape.tensor),
        query_length=s,
        key_length=s,
        head_dim=d,
        value_dim=d,
        causal=True,
        masked=False,
    )
    whole = HALF * s * heads * d
    return (
        Operator(
            name="attention",
            target="aten::scaled_dot_product_attention",
            kind="attention",
            dtype=shape.half,
            flops=2.0 * heads * s * s * d,
            backward_flops=5.0 * heads * s * s * d,
            read_bytes=3 * whole,
            written_bytes=whole,
            saved_bytes=whole + 4.0 * heads * s,  # the output, which the projection reads, and the row sums in fp32
            attention=attention,
        ),
    )


def block(shape: Shape) -> LayerKind:
    """One transformer layer."""
    s, h, t = shape.seq, shape.hidden, shape.tensor
    row = HALF * s * h / shape.spread  # bytes of one residual-stream tensor
    heads, kv, d = shape.heads // t, max(1, shape.kv_heads // t), shape.width
    qkv = (heads + 2 * kv) * d
    core = flash_core(shape) if shape.flash else _unfused_core(shape)
    operators = (
        norm(shape, row),
        linear(shape, "qkv", qkv, h, saved=HALF * s * qkv),
        *rotary(shape, heads + kv, d),
        *core,
        linear(shape, "projection", h, heads * d),
        residual(shape, row),
        norm(shape, row),
        *_mlp(shape),
        residual(shape, row),
    )
    return LayerKind(
        operators=operators,
        parameters=tuple(Parameter(role=role, elements=n, element_bytes=2) for role, n in _block_parameters(shape)),
        collectives=block_collectives(shape),
        input_bytes=row,
    )


def rotary(shape: Shape, heads: int, d: int) -> tuple[Operator, ...]:
    if shape.family != "llama":
        return ()
    turned = HALF * shape.seq * heads * d
    passes = 1 if shape.fused else 5  # 2 + 4 + 4 read, 4 + 4 + 2 written
    return (moving(shape, "rotary", passes * turned, passes * turned),)


def residual(shape: Shape, row: float) -> Operator:
    """Bias, dropout and the sum, in one kernel; the mask is a byte an element."""
    mask = row / HALF if shape.dropout else 0.0
    name = "bias_dropout_add" if shape.dropout else "add"
    return moving(shape, name, 2 * row, row + mask, saved=row + mask)


def _mlp(shape: Shape) -> tuple[Operator, ...]:
    s, h, f = shape.seq, shape.hidden, shape.ffn // shape.tensor
    inner = HALF * s * f
    if shape.family == "llama":
        return (
            linear(shape, "gate", f, h, saved=inner),
            linear(shape, "up", f, h, saved=inner),
            moving(shape, "silu", inner, inner, saved=inner),
            moving(shape, "mul", 2 * inner, inner, saved=inner),
            linear(shape, "down", h, f),
        )
    return (
        linear(shape, "fc1", f, h, saved=inner),
        moving(shape, "gelu", inner, inner, saved=inner),
        linear(shape, "fc2", h, f),
    )


def _block_parameters(shape: Shape) -> tuple[tuple[str, int], ...]:
    h, t, d = shape.hidden, shape.tensor, shape.width
    q, kv = shape.heads * d // t, max(1, shape.kv_heads // t) * d
    matrices = 3 if shape.family == "llama" else 2
    biases = 0 if shape.family == "llama" else q + 2 * kv + shape.ffn // t + 2 * h
    norms = 2 * h if shape.family == "llama" else 4 * h
    return (
        ("attention", h * (q + 2 * kv) + q * h),
        ("mlp", matrices * h * shape.ffn // t),
        ("vectors", biases + norms),
    )


def block_collectives(shape: Shape) -> tuple[Collective, ...]:
    """Megatron: two all-reduces forward and two backward; with sequence parallelism each is a reduce-scatter and an
    all-gather, and the backward gathers the inputs of the column products once more."""
    if shape.tensor == 1:
        return ()
    full = HALF * shape.seq * shape.hidden
    if not shape.sequence_parallel:
        return tuple(
            Collective(name="all_reduce", phase=phase, bytes_per_sample=full)  # type: ignore[arg-type]
            for phase in ("forward", "forward", "backward", "backward")
        )
    names = (("all_gather", "forward"), ("reduce_scatter", "forward"), ("all_gather", "backward"))
    names = (*names, ("reduce_scatter", "backward"), ("all_gather", "backward"))
    return tuple(
        Collective(name=name, phase=phase, bytes_per_sample=full)  # type: ignore[arg-type]
        for name, phase in (*names, *names)
    )


def embedding(shape: Shape) -> LayerKind:
    """The embedding: a lookup, positions added (gpt), dropout."""
    row = HALF * shape.seq * shape.hidden / shape.spread
    mask = row / HALF if shape.dropout else 0.0
    elements = shape.vocab * shape.hidden // shape.tensor
    positions = shape.seq * shape.hidden if shape.family == "gpt" else 0
    lookup = Operator(
        name="embedding",
        target="aten::embedding",
        kind="embedding",
        dtype=shape.dtype,
        read_bytes=row,
        written_bytes=row,
        saved_bytes=row + mask,
    )
    return LayerKind(
        operators=(lookup, moving(shape, "add", 2 * row, row)) if positions else (lookup,),
        parameters=(
            Parameter(
                role="table", elements=elements, element_bytes=2, shared="" if shape.family == "llama" else "tied"
            ),
            *((Parameter(role="positions", elements=positions, element_bytes=2),) if positions else ()),
        ),
        input_bytes=8.0 * shape.seq,
    )


def head(shape: Shape) -> LayerKind:
    """Final norm, logits and their cross entropy in fp32."""
    row = HALF * shape.seq * shape.hidden / shape.spread
    vocab = shape.vocab // shape.tensor
    logits = float(shape.seq * vocab)
    loss = moving(shape, "cross_entropy", 4 * logits, 4 * logits, saved=4 * logits, kind="cross_entropy")
    return LayerKind(
        operators=(
            norm(shape, row),
            linear(shape, "logits", vocab, shape.hidden, saved=0.0, dtype=shape.half),
            moving(shape, "float", HALF * logits, 4 * logits, saved=4 * logits, kind="copy"),
            loss,
        ),
        parameters=(
            Parameter(
                role="head",
                elements=vocab * shape.hidden,
                element_bytes=2,
                shared="" if shape.family == "llama" else "tied",
            ),
            Parameter(role="norm", elements=shape.hidden, element_bytes=2),
        ),
        input_bytes=row,
    )
