"""Rooflines: closed forms, what shapes do to them, and that more hardware never costs more time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cluster import Cluster, Device, device_kinds
from autoplan.cost_models.attention import attention_flops, attention_time_s
from autoplan.cost_models.compute import (
    gradient_accumulation_s,
    layer_time,
    operator_time,
    optimizer_step_s,
    recompute_s,
)
from autoplan.cost_models.gemm import gemm_time_s, shape_efficiency
from autoplan.cost_models.software import COMPILED, EAGER, EAGER_FLASH_1
from autoplan.layers.types import Attention, Collective, Gemm, LayerKind, Operator

A100 = Cluster.parse("1xA100-80GB").device
H100 = Cluster.parse("1xH100").device


def linear(m: int, n: int, k: int, **more: object) -> Operator:
    fields: dict = {
        "name": "linear",
        "target": "aten::linear",
        "kind": "gemm",
        "dtype": "bf16",
        "flops": 2.0 * m * n * k,
        "backward_flops": 4.0 * m * n * k,
        "read_bytes": 2.0 * m * k,
        "written_bytes": 2.0 * m * n,
        "parameter_bytes": 2.0 * n * k,
        "gemm": Gemm(m=m, n=n, k=k),
    }
    return Operator(**(fields | more))


def element_wise(bytes_: float, **more: object) -> Operator:
    fields: dict = {"name": "gelu", "target": "aten::gelu", "kind": "elementwise", "dtype": "bf16"}
    return Operator(**(fields | {"read_bytes": bytes_, "written_bytes": bytes_} | more))


def core(length: int = 2048, **more: object) -> Attention:
    fields: dict = {"heads": 16, "key_value_heads": 16, "query_length": length, "key_length": length}
    fields |= {"head_dim": 128, "value_dim": 128, "causal": True, "masked": False}
    return Attention(**(fields | more))


class TestGemm:
    def test_a_whole_number_of_waves_of_a_deep_product_is_nearly_the_best_rate(self) -> None:
        # 108 SMs, tiles of 128 x 256: 12 x 9 x 4 tiles fill four waves exactly; only k0 = 96 of 16384 is lost.
        assert shape_efficiency(128 * 12 * 2, 256 * 9 * 2, 16384, groups=1, sms=108, dtype="bf16") == pytest.approx(
            16384 / (16384 + 96)
        )

    def test_the_last_wave_runs_partly_empty(self) -> None:
        full = shape_efficiency(128 * 108, 256, 8192, groups=1, sms=108, dtype="bf16")
        spilled = shape_efficiency(128 * 109, 256, 8192, groups=1, sms=108, dtype="bf16")
        assert spilled < 0.9 * full

    def test_hidden_14400_runs_worse_than_13824_as_measured_on_the_bloom_grid(self) -> None:
        # Tensor parallel 4 of a 4h MLP, 2048 x micro-batch 1: 15 to 50% were published.
        def rate(hidden: int) -> float:
            return shape_efficiency(2048, hidden, hidden, groups=1, sms=108, dtype="bf16")

        assert rate(14400) <= rate(13824)

    def test_rows_that_are_not_16_bytes_lose_the_tensor_cores_speed(self) -> None:
        assert shape_efficiency(8192, 50257, 768, groups=1, sms=108, dtype="bf16") < 0.6 * shape_efficiency(
            8192, 50264, 768, groups=1, sms=108, dtype="bf16"
        )

    def test_how_many_tokens_an_expert_got_never_misaligns(self) -> None:
        def seconds(rows: int, product: str) -> float:
            experts = Gemm(m=rows, n=4096, k=7168, groups=8)
            return gemm_time_s(experts, H100, dtype="bf16", samples=1, product=product)  # type: ignore[arg-type]

        for product in ("forward", "input", "weight"):
            assert seconds(1023, product) <= seconds(1024, product) * (1 + 1e-9)

    def test_a_batched_product_grows_in_groups(self) -> None:
        one = gemm_time_s(Gemm(m=512, n=512, k=64, groups=16), A100, dtype="bf16", samples=1)
        in_groups = Gemm(m=512, n=512, k=64, groups=4, batch_in_groups=True)
        assert gemm_time_s(in_groups, A100, dtype="bf16", samples=4) == pytest.approx(one)

    @given(m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(1, 9000), groups=st.integers(1, 64))
    def test_efficiency_is_a_share(self, m: int, n: int, k: int, groups: int) -> None:
        assert 0 < shape_efficiency(m, n, k, groups=groups, sms=108, dtype="bf16") <= 1

    @given(m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(1, 9000), more=st.integers(1, 3000))
    def test_more_rows_or_depth_never_take_less_time(self, m: int, n: int, k: int, more: int) -> None:
        def seconds(rows: int, depth: int) -> float:
            return rows * n * depth / shape_efficiency(rows, n, depth, groups=1, sms=108, dtype="fp32")

        assert seconds(m + more, k) >= seconds(m, k) * (1 - 1e-9)


class TestAttention:
    def test_causal_halves_the_work(self) -> None:
        assert attention_flops(core()) == 0.5 * attention_flops(core(causal=False))
        assert attention_flops(core(causal=False)) == 4 * 16 * 2048 * 2048 * 128

    # TFLOPS of FlashAttention-2 on A100 at 16k tokens a batch (paper, figures 4 to 6), head dimension 128.
    @pytest.mark.parametrize(
        ("length", "causal", "backward", "published"),
        [
            (2048, False, False, 220),
            (16384, False, False, 224),
            (2048, True, False, 163),
            (16384, True, False, 203),
            (2048, False, True, 188),
            (16384, True, True, 181),
        ],
    )
    def test_published_rates(self, length: int, causal: bool, backward: bool, published: float) -> None:
        samples = 16384 // length
        attention = core(length, causal=causal)
        seconds = attention_time_s(attention, A100, dtype="bf16", samples=samples, backward=backward)
        flops = attention_flops(attention) * samples * (2.5 if backward else 1.0)
        assert flops / seconds / 1e12 == pytest.approx(published, rel=0.2)

    def test_narrow_heads_run_slower(self) -> None:
        def rate(head_dim: int) -> float:
            attention = core(head_dim=head_dim, value_dim=head_dim)
            return attention_flops(attention) / attention_time_s(
                attention, A100, dtype="bf16", samples=4, backward=False
            )

        assert rate(64) < rate(128)
        assert rate(72) < rate(96)  # padded to 96


class TestOperator:
    def test_an_element_wise_operator_is_bandwidth_bound(self) -> None:
        op = element_wise(1e8)
        expected = 2e8 * 3 / (2039e9 * A100.memory_efficiency) + EAGER.gap_s
        assert operator_time(op, A100, micro_batch=3).forward_s == pytest.approx(expected)

    def test_a_view_is_free(self) -> None:
        op = element_wise(0.0, kind="view", target="aten::view")
        assert operator_time(op, A100, micro_batch=8).total_s == 0

    def test_a_thin_product_is_bandwidth_bound(self) -> None:
        op = linear(1, 8192, 8192)
        weight_s = 2.0 * 8192 * 8192 / (2039e9 * A100.memory_efficiency)
        assert operator_time(op, A100, micro_batch=1).forward_s == pytest.approx(weight_s, rel=0.1)

    def test_only_batched_operators_grow_with_the_micro_batch(self) -> None:
        op = element_wise(1e7, batched=False)
        assert operator_time(op, A100, micro_batch=8) == operator_time(op, A100, micro_batch=1)

    def test_the_backward_of_a_linear_is_two_products_and_half_when_the_weight_is_frozen(self) -> None:
        whole = operator_time(linear(8192, 4096, 4096), A100, micro_batch=1)
        frozen = operator_time(linear(8192, 4096, 4096, backward_flops=2.0 * 8192 * 4096 * 4096), A100, micro_batch=1)
        assert whole.backward_s == pytest.approx(2 * whole.forward_s, rel=0.1)
        assert frozen.backward_s == pytest.approx(whole.backward_s / 2, rel=0.1)
        none = operator_time(linear(8192, 4096, 4096, needs_backward=False), A100, micro_batch=1)
        assert none.backward_s == 0

    @given(
        m=st.integers(1, 4096),
        n=st.integers(1, 4096),
        k=st.integers(1, 4096),
        micro_batch=st.integers(1, 8),
        faster=st.floats(1, 4),
    )
    def test_a_better_device_is_never_slower(self, m: int, n: int, k: int, micro_batch: int, faster: float) -> None:
        op = linear(m, n, k)
        better = dataclasses.replace(
            A100,
            peak_flops={dtype: flops * faster for dtype, flops in A100.peak_flops.items()},
            memory_bytes_per_s=A100.memory_bytes_per_s * faster,
        )
        before, after = (operator_time(op, device, micro_batch=micro_batch) for device in (A100, better))
        assert after.forward_s <= before.forward_s * (1 + 1e-12)
        assert after.backward_s <= before.backward_s * (1 + 1e-12)


class TestLayer:
    small = LayerKind(operators=tuple(element_wise(1e3) for _ in range(10)))
    large = LayerKind(operators=(linear(8192, 4096, 4096), element_wise(6.7e7), element_wise(6.7e7, core=True)))

    def test_tiny_kernels_wait_for_the_host(self) -> None:
        assert layer_time(self.small, A100, micro_batch=1).forward_s == pytest.approx(10 * A100.launch_s)

    def test_compiled_moves_fewer_bytes_and_dispatches_less(self) -> None:
        for kind in (self.small, self.large):
            eager = layer_time(kind, A100, micro_batch=1, software=EAGER)
            assert layer_time(kind, A100, micro_batch=1, software=COMPILED).forward_s < eager.forward_s

    def test_recompute_adds_the_core_or_the_whole_forward(self) -> None:
        forward = layer_time(self.large, A100, micro_batch=2).forward_s
        core_s = operator_time(self.large.operators[2], A100, micro_batch=2).forward_s
        policies = {p: recompute_s(self.large, A100, micro_batch=2, policy=p) for p in ("none", "selective", "full")}
        assert policies == pytest.approx({"none": 0.0, "selective": core_s, "full": forward})

    def test_a_checkpoint_that_stops_early_leaves_the_last_product_out(self) -> None:
        up, down = linear(4096, 4096, 1024, name="up"), linear(4096, 1024, 4096, name="down")
        kind = LayerKind(operators=(up, element_wise(2.0**25), down, element_wise(2.0**23)))
        early = recompute_s(kind, A100, micro_batch=1, policy="full", software=EAGER_FLASH_1)
        until = LayerKind(operators=kind.operators[:2])
        assert early == pytest.approx(layer_time(until, A100, micro_batch=1, software=EAGER_FLASH_1).forward_s)
        assert early < recompute_s(kind, A100, micro_batch=1, policy="full")

    def test_a_cpu_adds_its_dispatch(self) -> None:
        cpu = Cluster.parse("1xcpu").device
        op = dataclasses.replace(linear(64, 64, 64), dtype="fp32")
        alone = operator_time(op, cpu, micro_batch=1)
        product = LayerKind(operators=(op,))
        time = layer_time(product, cpu, micro_batch=1)
        assert time.forward_s == pytest.approx(alone.forward_s + 2 * cpu.launch_s)  # a view of the weight, the product
        assert time.backward_s == pytest.approx(alone.backward_s + 4 * cpu.launch_s)  # 2 products, 2 sums
        view = Operator(name="view", target="aten.view.default", kind="view", dtype="fp32")
        assert layer_time(LayerKind(operators=(view,)), cpu, micro_batch=1).forward_s == cpu.launch_s

    def test_on_a_cpu_a_collective_works_on_a_copy(self) -> None:
        cpu = Cluster.parse("1xcpu").device
        op = dataclasses.replace(linear(64, 64, 64), dtype="fp32", name="linear")
        summed = Collective(name="all_reduce", phase="forward", bytes_per_sample=1e6, operator="linear")
        layer = LayerKind(operators=(op,), collectives=(summed,))
        alone = layer_time(dataclasses.replace(layer, collectives=()), cpu, micro_batch=3)
        copied_s = 3 * 2 * 1e6 / (cpu.memory_bytes_per_s * cpu.memory_efficiency)  # read and written, three samples
        assert layer_time(layer, cpu, micro_batch=3).forward_s == pytest.approx(alone.forward_s + copied_s)
        biased = dataclasses.replace(op, parameter_bytes=4.0 * (64 * 64 + 64))  # added to the sum, by an add
        both = layer_time(dataclasses.replace(layer, operators=(biased,)), cpu, micro_batch=3)
        assert both.forward_s == pytest.approx(alone.forward_s + 2 * copied_s)

    @pytest.mark.parametrize("name", device_kinds())
    def test_every_device_prices_a_layer(self, name: str) -> None:
        device: Device = Cluster.parse(f"1x{name}").device
        seconds = layer_time(self.large, device, micro_batch=1)
        assert 0 < seconds.forward_s < seconds.backward_s < 60


def test_gradients_are_added_with_two_reads_and_a_write() -> None:
    seconds = gradient_accumulation_s(1e9, H100, bytes_per_element=2.0)
    assert seconds == pytest.approx(6e9 / (3352e9 * H100.memory_efficiency))


def test_the_optimizer_step_is_bandwidth() -> None:
    seconds = optimizer_step_s(1e9, H100, bytes_per_element=30.0)
    assert seconds == pytest.approx(30e9 / (3352e9 * H100.memory_efficiency) + H100.launch_s)
