"""What differs on a CPU: gloo's messages and passes, whole blocks of causal attention, arithmetic of exponentials."""

from __future__ import annotations

import pytest

from autoplan.cluster import Cluster
from autoplan.cost_models import compute
from autoplan.cost_models.attention import attention_time_s
from autoplan.cost_models.communication import Group, all_gather_s, all_reduce_s, reduce_scatter_s, send_s
from autoplan.cost_models.gemm import gemm_time_s
from autoplan.layers.types import Attention, Gemm, Operator

CPU = Cluster.parse("4xcpu")
ALPHA, BETA = CPU.intra.latency_s, 1 / CPU.intra.bytes_per_s
PAIR = Group(size=2, stride=1)


def test_gloo_pays_messages_and_passes() -> None:
    assert send_s(CPU, 1e6, 1, source=0) == pytest.approx(ALPHA + 1e6 * BETA)
    assert all_reduce_s(CPU, PAIR, 1e6) == pytest.approx(3 * ALPHA + 2 * 1e6 * BETA)
    assert all_gather_s(CPU, PAIR, 1e6) == pytest.approx(2 * ALPHA + 2 * 1e6 * BETA)
    assert reduce_scatter_s(CPU, PAIR, 1e6) == pytest.approx(6 * ALPHA + 3 * 1e6 * BETA)
    four = Group(size=4, stride=1)
    assert all_reduce_s(CPU, four, 1e6) == pytest.approx(9 * ALPHA + 2.5 * 1e6 * BETA)


def test_processes_of_several_hosts_pay_the_slower_link() -> None:
    hosts = Cluster.parse("2x2xcpu")
    across = all_reduce_s(hosts, Group(size=2, stride=2), 1e6)
    assert across == pytest.approx(3 * hosts.inter.latency_s + 2e6 / hosts.inter.bytes_per_s)


def test_small_products_pay_a_start_up_on_every_size() -> None:
    """64 of 64 + 8 elements are useful on each of three sizes; the order of the sizes does not matter."""
    rate = CPU.device.flops("fp32") * CPU.device.gemm_efficiency
    cube = gemm_time_s(Gemm(m=64, n=64, k=64), CPU.device, dtype="fp32", samples=1)
    assert cube == pytest.approx(2 * (64 + 8) ** 3 / rate)
    long = Gemm(m=64, n=256, k=1024)
    seconds = [
        gemm_time_s(long, CPU.device, dtype="fp32", samples=1, product=p) for p in ("forward", "input", "weight")
    ]
    assert seconds == pytest.approx([seconds[0]] * 3)


@pytest.mark.parametrize(("length", "saved"), [(64, 0.0), (512, 0.0), (1024, 0.25), (2048, 0.375)])
def test_causal_attention_saves_whole_blocks_of_512_keys(length: int, saved: float) -> None:
    def taken(causal: bool) -> float:
        shape = Attention(
            heads=4,
            key_value_heads=4,
            query_length=length,
            key_length=length,
            head_dim=64,
            value_dim=64,
            causal=causal,
            masked=False,
        )
        return attention_time_s(shape, CPU.device, dtype="fp32", samples=1, backward=False)

    assert taken(True) == pytest.approx((1 - saved) * taken(False))


def test_an_optimizer_without_a_fused_kernel_passes_over_memory_more_often() -> None:
    """AdamW operator by operator: 20 values of 4 bytes an element; a fused step moves the 28 bytes of its recipe."""
    cpu, gpu = CPU.device, Cluster.parse("1xH100").device
    bandwidth = cpu.memory_bytes_per_s * cpu.memory_efficiency
    taken = compute.optimizer_step_s(1e6, cpu, bytes_per_element=28.0)
    assert taken == pytest.approx(80e6 / bandwidth + cpu.launch_s)
    fused = 28e6 / (gpu.memory_bytes_per_s * gpu.memory_efficiency) + gpu.launch_s
    assert compute.optimizer_step_s(1e6, gpu, bytes_per_element=28.0) == pytest.approx(fused)


def test_exponentials_take_longer_than_their_bytes() -> None:
    def forward(target: str, device: str) -> float:
        op = Operator(
            name=target,
            target=f"aten.{target}.default",
            kind="elementwise",
            dtype="fp32",
            read_bytes=4e6,
            written_bytes=4e6,
        )
        return compute.operator_time(op, Cluster.parse(f"1x{device}").device, micro_batch=1).forward_s

    rate = CPU.device.flops("fp32") * CPU.device.gemm_efficiency
    assert forward("gelu", "cpu") >= 30 * 1e6 / rate
    assert forward("gelu", "H100") == forward("neg", "H100")
