"""Of every kind of operator and of collective: a better machine or less work never costs more time."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster, Device
from autoplan.cost_models.attention import BACKWARD_FLOPS, attention_flops
from autoplan.cost_models.communication import boundary_send_s, send_s, tensor_time
from autoplan.cost_models.compute import OperatorTime, layer_time, recompute_s
from autoplan.cost_models.software import BRIDGE, COMPILED, EAGER, Software
from autoplan.layers.types import Attention, Collective, CollectiveName, Gemm, LayerKind, Operator, OperatorKind

KINDS = get_args(OperatorKind)
NAMES = get_args(CollectiveName)
DEVICES = [Cluster.parse(f"1x{name}").device for name in ("A100-80GB", "H100", "T4", "RTX4090", "MI300X", "cpu")]
CLUSTERS = [Cluster.parse(spec) for spec in ("4x8xH100", "2x8xV100-32GB", "2x4xL40S")]
SOFTWARE = [EAGER, COMPILED, BRIDGE]

sizes = st.integers(1, 4096)
bytes_moved = st.floats(0, 1e10)


@st.composite
def operators(draw: st.DrawFn, kind: OperatorKind) -> Operator:
    """An operator of ``kind`` as captures describe them."""
    fields: dict[str, object] = {
        "read_bytes": draw(bytes_moved),
        "written_bytes": draw(bytes_moved),
        "parameter_bytes": draw(bytes_moved),
        "batched": draw(st.booleans()),
        "needs_backward": draw(st.booleans()),
        "core": draw(st.booleans()),
    }
    if kind in ("gemm", "grouped_gemm"):
        m, n, k = draw(sizes), draw(sizes), draw(sizes)
        groups = draw(st.integers(1, 16)) if kind == "grouped_gemm" else 1
        each = 2.0 * m * n * k * groups
        fields |= {"flops": each, "backward_flops": draw(st.sampled_from([1, 2])) * each}
        fields["gemm"] = Gemm(m=m, n=n, k=k, groups=groups, batch_in_groups=groups > 1 and draw(st.booleans()))
    elif kind == "attention":
        heads, length, width = draw(st.integers(1, 64)), draw(sizes), draw(st.integers(1, 256))
        core = Attention(
            heads=heads,
            key_value_heads=heads,
            query_length=length,
            key_length=draw(sizes),
            head_dim=width,
            value_dim=draw(st.integers(1, 256)),
            causal=draw(st.booleans()),
            masked=draw(st.booleans()),
        )
        fields |= {
            "flops": attention_flops(core),
            "backward_flops": BACKWARD_FLOPS * attention_flops(core),
            "attention": core,
        }
    elif kind != "view":
        fields["flops"] = draw(st.floats(0, 1e12))
        fields["backward_flops"] = draw(st.floats(0, 1e12))
    target = draw(st.sampled_from(["aten.gelu.default", "aten.add.Tensor", "aten.mul.Tensor"]))
    dtype = draw(st.sampled_from(["fp16", "fp32"]))
    return Operator(name=kind, target=target, kind=kind, dtype=dtype, **fields)  # type: ignore[arg-type]


def better(device: Device, part: str, by: float) -> Device:
    """``device`` with one of its figures ``by`` times as good."""
    if part == "peak_flops":
        return dataclasses.replace(device, peak_flops={name: by * peak for name, peak in device.peak_flops.items()})
    if part == "launch_s":
        return dataclasses.replace(device, launch_s=device.launch_s / by)
    if part == "memory_bytes_per_s":
        return dataclasses.replace(device, memory_bytes_per_s=by * device.memory_bytes_per_s)
    return dataclasses.replace(device, **{part: min(1.0, by * getattr(device, part))})


PARTS = (
    "peak_flops",
    "memory_bytes_per_s",
    "launch_s",
    "gemm_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "memory_efficiency",
)


def no_longer(one: OperatorTime, other: OperatorTime) -> bool:
    return one.forward_s <= other.forward_s * (1 + 1e-9) and one.backward_s <= other.backward_s * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(
    data=st.data(),
    device=st.sampled_from(DEVICES),
    software=st.sampled_from(SOFTWARE),
    micro_batch=st.integers(1, 8),
    more=st.integers(1, 8),
    by=st.floats(1, 10),
)
def test_an_operator_takes_no_longer_on_a_better_device_or_with_fewer_samples(
    kind: OperatorKind, data: st.DataObject, device: Device, software: Software, micro_batch: int, more: int, by: float
) -> None:
    op = data.draw(operators(kind))
    layer = LayerKind(operators=(op,))

    def time(device: Device, samples: int) -> OperatorTime:
        return layer_time(layer, device, micro_batch=samples, software=software)

    found = time(device, micro_batch)
    assert found.forward_s >= 0 and found.backward_s >= 0
    assert op.needs_backward or found.backward_s == 0
    for part in PARTS:
        assert no_longer(time(better(device, part, by), micro_batch), found), part
    assert no_longer(found, time(device, micro_batch + more))


@settings(deadline=None, max_examples=30)
@given(data=st.data(), device=st.sampled_from(DEVICES), software=st.sampled_from(SOFTWARE))
def test_a_layer_takes_no_longer_without_one_of_its_operators_and_recompute_adds_no_more_than_a_forward(
    data: st.DataObject, device: Device, software: Software
) -> None:
    found = tuple(
        data.draw(operators(kind)) for kind in data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    )
    whole = layer_time(LayerKind(operators=found), device, micro_batch=2, software=software)
    assert no_longer(layer_time(LayerKind(operators=found[1:]), device, micro_batch=2, software=software), whole)
    alone = [layer_time(LayerKind(operators=(op,)), device, micro_batch=2, software=software) for op in found]
    assert whole.forward_s <= sum(time.forward_s for time in alone) * (1 + 1e-9)
    added = [
        recompute_s(LayerKind(operators=found), device, micro_batch=2, policy=policy, software=software)
        for policy in ("none", "selective", "full")
    ]
    assert added[0] == 0 and max(added) <= whole.forward_s * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(
    cluster=st.sampled_from(CLUSTERS),
    phase=st.sampled_from(["forward", "backward"]),
    ranks=st.sampled_from([0, 2, 4, 8]),
    stride=st.sampled_from([1, 2, 8]),
    amount=st.floats(1, 1e9),
    batched=st.booleans(),
    micro_batch=st.integers(1, 8),
    by=st.floats(1, 10),
    software=st.sampled_from(SOFTWARE),
)
def test_a_layers_collective_takes_no_longer_on_better_links_or_with_fewer_samples(
    name: CollectiveName, cluster, phase, ranks, stride, amount, batched, micro_batch, by, software
) -> None:
    one = Collective(
        name=name, phase=phase, bytes_per_sample=amount, batched=batched, ranks=ranks, stride=stride if ranks else 1
    )
    layer = LayerKind(operators=(), collectives=(one,))

    def time(cluster: Cluster, samples: int) -> OperatorTime:
        return tensor_time(layer, cluster, degree=4, micro_batch=samples, software=software)

    found = time(cluster, micro_batch)
    assert (found.backward_s if phase == "forward" else found.forward_s) == 0
    assert no_longer(found, time(cluster, micro_batch + 1))
    for link in ("intra", "inter"):
        was = getattr(cluster, link)
        for faster in (
            dataclasses.replace(was, bytes_per_s=was.bytes_per_s * by),
            dataclasses.replace(was, latency_s=was.latency_s / by),
        ):
            assert no_longer(time(dataclasses.replace(cluster, **{link: faster}), micro_batch), found)


@given(
    cluster=st.sampled_from(CLUSTERS),
    amount=st.floats(1, 1e11),
    more=st.floats(1, 10),
    distance=st.sampled_from([1, 2, 3, 4, 6, 8]),
    stage=st.integers(0, 3),
)
def test_a_send_takes_no_longer_with_fewer_bytes_or_on_better_links(
    cluster: Cluster, amount: float, more: float, distance: int, stage: int
) -> None:
    whole = boundary_send_s(cluster, amount, stage=stage, distance=distance)
    assert whole <= boundary_send_s(cluster, amount * more, stage=stage, distance=distance)
    assert whole <= max(send_s(cluster, amount, 1, source=0), send_s(cluster, amount, cluster.gpus_per_node))
    for link in ("intra", "inter"):
        was = getattr(cluster, link)
        faster = dataclasses.replace(cluster, **{link: dataclasses.replace(was, bytes_per_s=was.bytes_per_s * more)})
        assert boundary_send_s(faster, amount, stage=stage, distance=distance) <= whole
