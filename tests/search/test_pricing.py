"""Many kinds of layers priced at once cost what each of them costs alone, to the last bit."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster
from autoplan.cost_models import communication, compute
from autoplan.cost_models.memory import RECOMPUTE, layer_saved_bytes
from autoplan.cost_models.software import COMPILED
from autoplan.layers.types import Attention, Collective, Gemm, LayerKind, Operator, Parameter
from autoplan.search.pricing import Kinds

sizes = st.integers(1, 40).map(lambda n: 24 * n)


def product(rows: int, columns: int, inner: int, groups: int, in_groups: bool, dtype: str) -> Operator:
    return Operator(
        name="product",
        target="aten::linear",
        kind="gemm",
        dtype=dtype,
        flops=2.0 * rows * columns * inner * groups,
        backward_flops=4.0 * rows * columns * inner * groups,
        read_bytes=2.0 * rows * inner,
        written_bytes=2.0 * rows * columns,
        parameter_bytes=2.0 * columns * inner,
        saved_bytes=2.0 * rows * columns,
        gemm=Gemm(m=rows, n=columns, k=inner, groups=groups, batch_in_groups=in_groups),
    )


def wise(elements: float, kind: str, core: bool, flops: bool) -> Operator:
    return Operator(
        name="wise",
        target="aten::add" if kind == "elementwise" else f"aten::{kind}",
        kind=kind,  # type: ignore[arg-type]
        dtype="bf16",
        core=core,
        flops=elements if flops else 0.0,
        backward_flops=2 * elements if flops else 0.0,
        read_bytes=4 * elements,
        written_bytes=2 * elements,
        saved_bytes=2 * elements,
    )


def attention(tokens: int) -> Operator:
    shape = Attention(
        heads=8,
        key_value_heads=8,
        query_length=tokens,
        key_length=tokens,
        head_dim=64,
        value_dim=64,
        causal=True,
        masked=False,
    )
    return Operator(name="core", target="aten::sdpa", kind="attention", dtype="bf16", core=True, attention=shape)


operators = st.one_of(
    st.builds(product, sizes, sizes, sizes, st.integers(1, 3), st.booleans(), st.sampled_from(["bf16", "fp8", "fp32"])),
    st.builds(
        wise,
        sizes.map(float),
        st.sampled_from(["elementwise", "normalization", "convolution", "embedding", "view", "copy"]),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(attention, st.sampled_from([128, 512])),
)


def resized(op: Operator, times: int) -> Operator:
    """The same operator with other sizes."""
    gemm = op.gemm and dataclasses.replace(op.gemm, n=op.gemm.n * times)
    return dataclasses.replace(op, gemm=gemm, flops=op.flops * times, written_bytes=op.written_bytes * times)


kinds = st.lists(operators, min_size=1, max_size=3).flatmap(
    lambda row: st.lists(st.integers(1, 30), min_size=1, max_size=20).map(
        lambda several: tuple(
            LayerKind(
                operators=tuple(resized(op, times) for op in row),
                parameters=(Parameter(role="w", elements=1000 * times, element_bytes=2, trainable=times % 3 > 0),),
                collectives=(Collective(name="all_reduce", phase="forward", bytes_per_sample=1e6 * (times % 2 + 1)),),
                input_bytes=100.0 * times,
            )
            for times in several
        )
    )
)


@settings(max_examples=40, deadline=None)
@given(kinds, st.integers(1, 5), st.sampled_from(["8xH100", "8xA100-40GB", "4xcpu"]))
def test_at_once_and_one_by_one(kinds: tuple[LayerKind, ...], micro_batch: int, spec: str) -> None:
    cluster = Cluster.parse(spec)
    priced = Kinds(kinds=kinds, cluster=cluster, tensor=2)
    seconds, kept = priced.seconds(micro_batch), priced.kept(micro_batch)
    for position, kind in enumerate(kinds):
        time = compute.layer_time(kind, cluster.device, micro_batch=micro_batch)
        assert (seconds.forward_s[position], seconds.backward_s[position]) == (time.forward_s, time.backward_s)
        again_s = compute.recompute_s(kind, cluster.device, micro_batch=micro_batch, policy="selective")
        assert seconds.extra_s["selective"][position] == again_s
        transfers = communication.tensor_time(kind, cluster, degree=2, micro_batch=micro_batch)
        assert seconds.tensor_forward_s[position] == transfers.forward_s
        for policy in RECOMPUTE:
            bytes_ = layer_saved_bytes(kind, policy=policy, samples=micro_batch)
            np.testing.assert_allclose(kept.saved_bytes[policy][position], bytes_, rtol=1e-12)
        assert kept.elements[position] == kind.parameter_elements


@settings(max_examples=40, deadline=None)
@given(kinds, st.integers(1, 5), st.sampled_from(["8xH100", "8xA100-40GB", "4xcpu"]))
def test_compiled_is_never_slower(kinds: tuple[LayerKind, ...], micro_batch: int, spec: str) -> None:
    eager = Kinds(kinds=kinds, cluster=Cluster.parse(spec), tensor=2)
    compiled = dataclasses.replace(eager, software=COMPILED)
    slow, fast = eager.seconds(micro_batch), compiled.seconds(micro_batch)
    assert (fast.period_s <= slow.period_s).all()
    for policy in RECOMPUTE:
        assert (fast.extra_s[policy] <= slow.extra_s[policy]).all()
    put_off = compiled.weight_gradients_s(micro_batch)
    assert (put_off <= np.minimum(fast.backward_s, eager.weight_gradients_s(micro_batch)) * (1 + 1e-12)).all()
