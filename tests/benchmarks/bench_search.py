"""Seconds of the search, after capture, on layer graphs typed by hand in the shapes of known models.

Run: ``pytest -m benchmark tests/benchmarks/bench_search.py -s``. Prints a line a case; asserts that plans are proven,
no clock.
"""

from __future__ import annotations

import statistics
import time

import pytest

from autoplan.cluster import Cluster
from autoplan.layers.types import (
    Attention,
    Collective,
    Edge,
    Gemm,
    Layer,
    LayerGraph,
    LayerKind,
    Operator,
    Parameter,
)
from autoplan.search import Problem, search

RUNS = 3


def _product(name: str, rows: int, columns: int, inner: int) -> Operator:
    return Operator(
        name=name,
        target="aten::linear",
        kind="gemm",
        dtype="bf16",
        flops=2.0 * rows * columns * inner,
        backward_flops=4.0 * rows * columns * inner,
        read_bytes=2.0 * rows * inner,
        written_bytes=2.0 * rows * columns,
        parameter_bytes=2.0 * columns * inner,
        saved_bytes=2.0 * rows * columns,
        gemm=Gemm(m=rows, n=columns, k=inner),
    )


def _wise(name: str, kind: str, elements: float) -> Operator:
    return Operator(
        name=name,
        target=f"aten::{name}",
        kind=kind,  # type: ignore[arg-type]
        dtype="bf16",
        flops=4 * elements,
        backward_flops=6 * elements,
        read_bytes=2 * elements,
        written_bytes=2 * elements,
        saved_bytes=2 * elements,
    )


def _attention(hidden: int, heads: int, tokens: int, tensor: int) -> Operator:
    width = hidden // tensor
    return Operator(
        name="attention",
        target="aten::scaled_dot_product_attention",
        kind="attention",
        dtype="bf16",
        core=True,
        flops=2.0 * tokens * tokens * width,
        backward_flops=5.0 * tokens * tokens * width,
        read_bytes=6.0 * tokens * width,
        written_bytes=2.0 * tokens * width,
        saved_bytes=2.0 * tokens * width,
        attention=Attention(
            heads=heads // tensor,
            key_value_heads=heads // tensor,
            query_length=tokens,
            key_length=tokens,
            head_dim=hidden // heads,
            value_dim=hidden // heads,
            causal=True,
            masked=False,
        ),
    )


def _block(hidden: int, inner: int, heads: int, tokens: int, tensor: int) -> LayerKind:
    operators = (
        _wise("rms_norm", "normalization", tokens * hidden),
        *(_product(name, tokens, hidden // tensor, hidden) for name in ("query", "key", "value")),
        _attention(hidden, heads, tokens, tensor),
        _product("output", tokens, hidden, hidden // tensor),
        *(_product(name, tokens, inner // tensor, hidden) for name in ("gate", "up")),
        _wise("silu", "elementwise", tokens * inner / tensor),
        _product("down", tokens, hidden, inner // tensor),
    )
    phases = ("forward", "forward", "backward", "backward") if tensor > 1 else ()
    elements = (4 * hidden * hidden + 3 * hidden * inner) // tensor
    return LayerKind(
        operators=operators,
        parameters=(Parameter(role="weights", elements=elements, element_bytes=2),),
        collectives=tuple(
            Collective(name="all_reduce", phase=phase, bytes_per_sample=2.0 * tokens * hidden)  # type: ignore[arg-type]
            for phase in phases
        ),
        input_bytes=2.0 * tokens * hidden,
    )


def _ends(hidden: int, vocabulary: int, tokens: int, tensor: int) -> tuple[LayerKind, LayerKind]:
    table = (Parameter(role="table", elements=vocabulary * hidden // tensor, element_bytes=2),)
    embedding = LayerKind(operators=(_wise("embedding", "embedding", tokens * hidden),), parameters=table)
    head = LayerKind(
        operators=(
            _product("head", tokens, vocabulary // tensor, hidden),
            _wise("cross_entropy", "cross_entropy", 2.0 * tokens * vocabulary / tensor),
        ),
        parameters=table,
        input_bytes=2.0 * tokens * hidden,
    )
    return embedding, head


def transformer(
    spec: str, batch: int, *, layers: int, hidden: int, inner: int, heads: int, tokens: int, vocabulary: int
) -> Problem:
    """A decoder of ``layers`` equal blocks on ``spec``."""

    def kinds(tensor: int) -> tuple[LayerKind, ...]:
        embedding, head = _ends(hidden, vocabulary, tokens, tensor)
        return embedding, _block(hidden, inner, heads, tokens, tensor), head

    order = [0, *[1] * layers, 2]
    graph = LayerGraph(
        name="decoder",
        layers=tuple(Layer(name=f"layers.{i}", kind=kind, nodes=()) for i, kind in enumerate(order)),
        kinds=kinds(1),
        edges=tuple(
            Edge(value=f"x{i}", source=i, targets=(i + 1,), bytes_per_sample=2.0 * tokens * hidden)
            for i in range(layers + 1)
        ),
        tokens_per_sample=tokens,
        dtype="bf16",
        fingerprint="benchmark",
    )
    return Problem(
        layers=graph,
        tensor_kinds=kinds,
        cluster=Cluster.parse(spec),
        global_batch=batch,
        precision="bf16",
    )


GPT2 = {"layers": 12, "hidden": 768, "inner": 2048, "heads": 12, "tokens": 1024, "vocabulary": 50304}
LLAMA_70B = {"layers": 80, "hidden": 8192, "inner": 28672, "heads": 64, "tokens": 8192, "vocabulary": 128256}
LLAMA_405B = {"layers": 126, "hidden": 16384, "inner": 53248, "heads": 128, "tokens": 8192, "vocabulary": 128256}

CASES = [
    ("GPT-2, 8 GPUs", "8xA100-80GB", 64, GPT2),
    ("Llama 70B, 64 GPUs", "8x8xH100", 512, LLAMA_70B),
    ("Llama 70B, 512 GPUs", "64x8xH100", 1024, LLAMA_70B),
    ("Llama 405B, 512 GPUs", "64x8xH100", 2048, LLAMA_405B),
    ("Llama 405B, 16,384 GPUs", "2048x8xH100", 2048, LLAMA_405B),
]


@pytest.mark.benchmark
@pytest.mark.parametrize(("name", "spec", "batch", "shape"), CASES, ids=[case[0] for case in CASES])
def test_search_seconds(
    name: str, spec: str, batch: int, shape: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    taken = []
    for _ in range(RUNS):
        question = transformer(spec, batch, **shape)
        started = time.perf_counter()
        plan = search(question)
        taken.append(time.perf_counter() - started)
    proof = plan.certificate
    with capsys.disabled():
        print(
            f"\n{name:<26} {statistics.median(taken):6.2f} s  {plan.strategy.describe():<36} "
            f"{proof.considered:>6,} considered, {proof.solved:>4} solved"
        )
    assert proof.status == "optimal"
