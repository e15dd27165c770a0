"""The fit: from the seconds that a known machine would take, back to that machine."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.calibration import write_cluster
from autoplan.calibration.probes import probes
from autoplan.cluster import Cluster
from autoplan.cost_models.calibration import OperatorSample, Sample, TransferSample, fit, predicted_s

SIZES = tuple(4**k for k in range(6, 13))


def samples_of(cluster: Cluster, device: str) -> list[Sample]:
    """What ``cluster`` would measure."""
    operators: list[Sample] = [
        OperatorSample(family=probe.family, operator=probe.operator, backward=backward, seconds=1.0)
        for probe in probes(device, quick=False)
        for backward in (False, True)
        if probe.backward or not backward
    ]
    transfers = [
        TransferSample(collective=name, ranks=cluster.gpus, bytes=float(size), seconds=1.0)
        for name in ("all_reduce", "all_gather", "reduce_scatter", "send")
        for size in SIZES
    ]
    return [dataclasses.replace(s, seconds=predicted_s(s, cluster)) for s in [*operators, *transfers]]


def changed(cluster: Cluster, *, slower: float, latency_s: float) -> Cluster:
    device = dataclasses.replace(
        cluster.device,
        gemm_efficiency=cluster.device.gemm_efficiency / slower,
        attention_forward_efficiency=0.3 / slower,
        attention_backward_efficiency=0.2 / slower,
        memory_efficiency=cluster.device.memory_efficiency / slower,
        launch_s=cluster.device.launch_s * slower,
    )
    intra = dataclasses.replace(cluster.intra, bytes_per_s=cluster.intra.bytes_per_s / slower, latency_s=latency_s)
    return dataclasses.replace(cluster, device=device, intra=intra)


@settings(max_examples=5, deadline=None)
@given(slower=st.floats(1.0, 3.0), latency_us=st.floats(20.0, 400.0))
def test_a_known_cpu_is_found_again(slower: float, latency_us: float) -> None:
    truth = changed(Cluster.parse("2xcpu"), slower=slower, latency_s=latency_us * 1e-6)
    found = fit(Cluster.parse("2xcpu"), samples_of(truth, "cpu"))
    assert found.errors()[1] < 0.03
    device = found.cluster.device
    rate = truth.device.peak_flops["fp32"] * truth.device.gemm_efficiency
    assert device.peak_flops["fp32"] * device.gemm_efficiency == pytest.approx(rate, rel=0.02)
    bandwidth = truth.device.memory_bytes_per_s * truth.device.memory_efficiency
    assert device.memory_bytes_per_s * device.memory_efficiency == pytest.approx(bandwidth, rel=0.02)
    assert found.cluster.intra.latency_s == pytest.approx(latency_us * 1e-6, rel=0.02)
    assert found.cluster.intra.bytes_per_s == pytest.approx(truth.intra.bytes_per_s, rel=0.02)


def test_a_fit_that_wants_no_latency_at_all_makes_a_file_that_can_be_read(tmp_path: Path) -> None:
    cluster = Cluster.parse("2xcpu")
    truth = changed(cluster, slower=1.0, latency_s=1e-4)
    hurried = [  # small ones took hardly any time, as on a machine that was busy while large ones were timed
        dataclasses.replace(s, seconds=s.seconds * 1e-9)
        if s.family in ("dispatch", "transfer") and getattr(s, "bytes", 0.0) < 1e6
        else s
        for s in samples_of(truth, "cpu")
    ]
    found = fit(cluster, hurried)
    write_cluster(found, tmp_path / "here.toml")
    read = Cluster.parse(tmp_path / "here.toml")
    assert read.device.launch_s == pytest.approx(found.cluster.device.launch_s, rel=1e-5)
    assert 0 < read.intra.latency_s < 1e-4
    assert read.device.peak_flops == pytest.approx(found.cluster.device.peak_flops, rel=1e-5)  # unmeasured ones too


def test_a_gpu_keeps_its_data_sheet_and_is_fitted_in_efficiencies() -> None:
    start = Cluster.parse("8xH100")
    truth = changed(start, slower=1.2, latency_s=5e-6)
    found = fit(start, samples_of(truth, "cuda")).cluster
    assert found.device.peak_flops == start.device.peak_flops
    assert found.device.memory_bytes_per_s == start.device.memory_bytes_per_s
    assert found.device.gemm_efficiency == pytest.approx(truth.device.gemm_efficiency, rel=0.02)
    assert found.device.attention_forward_efficiency == pytest.approx(0.25, rel=0.02)
    assert found.device.memory_efficiency == pytest.approx(truth.device.memory_efficiency, rel=0.02)
    assert found.intra.bytes_per_s == pytest.approx(truth.intra.bytes_per_s, rel=0.02)


def test_disturbed_samples_pull_little() -> None:
    """One sample in eight took three times as long: the rest is still predicted within a few percent."""
    truth = changed(Cluster.parse("2xcpu"), slower=2.0, latency_s=100e-6)
    clean = samples_of(truth, "cpu")
    disturbed = set(random.Random(0).sample(range(len(clean)), len(clean) // 8))
    noisy = [
        dataclasses.replace(s, seconds=s.seconds * (3.0 if index in disturbed else 1.0))
        for index, s in enumerate(clean)
    ]
    found = fit(Cluster.parse("2xcpu"), noisy)
    assert found.errors()[0] < 0.06


def test_what_is_not_measured_keeps_its_value() -> None:
    start = Cluster.parse("2xcpu")
    products = [s for s in samples_of(start, "cpu") if s.family == "gemm"]
    found = fit(start, products).cluster
    assert found.intra == start.intra
    for name in ("attention_forward_efficiency", "memory_efficiency", "memory_bytes_per_s", "launch_s"):
        assert getattr(found.device, name) == pytest.approx(getattr(start.device, name), rel=0.01)


def test_a_sample_without_a_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="no time"):
        fit(Cluster.parse("2xcpu"), [TransferSample(collective="send", ranks=2, bytes=8.0, seconds=0.0)])
