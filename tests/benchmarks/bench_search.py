"""Seconds of the search, after capture, on layer graphs typed by hand in the shapes of known models.

Run: ``OMP_NUM_THREADS=1 pytest -m benchmark tests/benchmarks/bench_search.py -s``. Prints a line a case, medians of
processor seconds and of wall seconds, and the largest resident memory of the process so far (torch's libraries and the
cases before included); asserts that plans are proven, no clock. Searches of models that are traced: ``bench_plan.py``.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
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

    return _decoder(spec, batch, kinds, [0, *[1] * layers, 2], hidden=hidden, tokens=tokens)


def mixture(
    spec: str,
    batch: int,
    *,
    dense: int,
    layers: int,
    hidden: int,
    inner: int,
    experts: int,
    expert_inner: int,
    chosen: int,
    heads: int,
    tokens: int,
    vocabulary: int,
) -> Problem:
    """A decoder of ``dense`` plain blocks and ``layers`` with ``experts`` experts, ``chosen`` of them a token."""

    def kinds(tensor: int) -> tuple[LayerKind, ...]:
        embedding, head = _ends(hidden, vocabulary, tokens, tensor)
        plain = _block(hidden, inner, heads, tokens, tensor)
        attention = _block(hidden, chosen * expert_inner, heads, tokens, tensor)
        routed = Parameter(
            role="experts", elements=experts * 3 * hidden * expert_inner // tensor, element_bytes=2, expert=True
        )
        shared = Parameter(role="attention", elements=4 * hidden * hidden // tensor, element_bytes=2)
        return embedding, plain, dataclasses.replace(attention, parameters=(shared, routed)), head

    order = [0, *[1] * dense, *[2] * layers, 3]
    return _decoder(spec, batch, kinds, order, hidden=hidden, tokens=tokens)


def uneven(spec: str, batch: int, *, layers: int, hidden: int, tokens: int) -> Problem:
    """A chain of ``layers`` no two of which are alike: widths 10% around a mean, in no order."""
    random = np.random.default_rng(7)
    inners = [int(width) for width in random.integers(3.6 * hidden, 4.4 * hidden, layers)]

    def kinds(tensor: int) -> tuple[LayerKind, ...]:
        return tuple(
            LayerKind(
                operators=(
                    _wise("rms_norm", "normalization", tokens * hidden),
                    _product("up", tokens, inner // tensor, hidden),
                    dataclasses.replace(_wise("gelu", "elementwise", tokens * inner / tensor), core=True),
                    _product("down", tokens, hidden, inner // tensor),
                ),
                parameters=(Parameter(role="weights", elements=2 * hidden * inner // tensor, element_bytes=2),),
                collectives=tuple(
                    Collective(name="all_reduce", phase=phase, bytes_per_sample=2.0 * tokens * hidden)  # type: ignore[arg-type]
                    for phase in (("forward", "backward") if tensor > 1 else ())
                ),
                input_bytes=2.0 * tokens * hidden,
            )
            for inner in inners
        )

    return _decoder(spec, batch, kinds, list(range(layers)), hidden=hidden, tokens=tokens)


def _decoder(
    spec: str,
    batch: int,
    kinds: Callable[[int], tuple[LayerKind, ...]],
    order: list[int],
    *,
    hidden: int,
    tokens: int,
) -> Problem:
    """A chain of layers of the given kinds that hand over ``hidden`` values a token."""
    graph = LayerGraph(
        name="decoder",
        layers=tuple(Layer(name=f"layers.{i}", kind=kind, nodes=()) for i, kind in enumerate(order)),
        kinds=kinds(1),
        edges=tuple(
            Edge(value=f"x{i}", source=i, targets=(i + 1,), bytes_per_sample=2.0 * tokens * hidden)
            for i in range(len(order) - 1)
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
LLAMA_8B = {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "tokens": 8192, "vocabulary": 128256}
LLAMA_70B = {"layers": 80, "hidden": 8192, "inner": 28672, "heads": 64, "tokens": 8192, "vocabulary": 128256}
LLAMA_405B = {"layers": 126, "hidden": 16384, "inner": 53248, "heads": 128, "tokens": 8192, "vocabulary": 128256}
MIXTURE = {
    "dense": 3,
    "layers": 58,
    "hidden": 7168,
    "inner": 18432,
    "experts": 256,
    "expert_inner": 2048,
    "chosen": 9,
    "heads": 128,
    "tokens": 4096,
    "vocabulary": 129280,
}
UNEVEN = {"layers": 512, "hidden": 4096, "tokens": 4096}

CASES = [
    ("GPT-2, 8 GPUs", transformer, "8xA100-80GB", 64, GPT2),
    ("Llama 70B, 64 GPUs", transformer, "8x8xH100", 512, LLAMA_70B),
    ("Llama 70B, 512 GPUs", transformer, "64x8xH100", 1024, LLAMA_70B),
    ("Llama 405B, 512 GPUs", transformer, "64x8xH100", 2048, LLAMA_405B),
    ("Llama 405B, 16,384 GPUs", transformer, "2048x8xH100", 2048, LLAMA_405B),
    ("256 experts, 16,384 GPUs", mixture, "2048x8xH100", 4096, MIXTURE),
    ("512 uneven layers, 64 GPUs", uneven, "8x8xH100", 512, UNEVEN),
    # One model and batch, from 8 GPUs to 16,384: how the time grows.
    *(
        (f"Llama 8B, {8 * nodes:,} GPUs", transformer, f"{nodes}x8xH100", 2048, LLAMA_8B)
        for nodes in (1, 16, 256, 2048)
    ),
]


@pytest.mark.benchmark
@pytest.mark.parametrize(("name", "make", "spec", "batch", "shape"), CASES, ids=[case[0] for case in CASES])
def test_search_seconds(
    name: str,
    make: Callable[..., Problem],
    spec: str,
    batch: int,
    shape: dict[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    wall, processor = [], []
    for _ in range(RUNS):
        question = make(spec, batch, **shape)
        started = time.perf_counter(), time.process_time()
        plan = search(question)
        wall.append(time.perf_counter() - started[0])
        processor.append(time.process_time() - started[1])
    proof = plan.certificate
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    with capsys.disabled():
        print(
            f"\n{name:<28} {statistics.median(processor):6.2f} s processor {statistics.median(wall):6.2f} s "
            f"{memory:5.2f} GiB  "
            f"{plan.strategy.describe():<36} {proof.considered:>6,} considered, {proof.solved:>4} solved"
        )
    assert proof.status == "optimal"
