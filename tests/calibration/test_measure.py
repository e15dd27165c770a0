"""Measuring this machine: a few seconds of it, on two processes; and the file that comes out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autoplan.calibration import calibrate, cluster_toml, default_ranks, write_cluster
from autoplan.cluster import Cluster
from autoplan.cost_models.calibration import Fit
from autoplan.errors import ClusterError


@pytest.fixture(scope="module")
def measured() -> Fit:
    return calibrate(device="cpu", gpus=2, quick=True)


def test_every_family_is_measured_and_every_figure_makes_sense(measured: Fit) -> None:
    assert measured.families == ("gemm", "attention", "memory", "dispatch", "transfer")
    assert all(r.measured_s > 0 and r.predicted_s > 0 for r in measured.residuals)
    device, link = measured.cluster.device, measured.cluster.intra
    assert device.is_cpu
    rate = device.peak_flops["fp32"] * device.gemm_efficiency
    assert 1e8 < rate < 1e13
    assert 1e8 < device.memory_bytes_per_s * device.memory_efficiency < 1e12
    assert device.launch_s < 1e-3 and 1e-7 < link.latency_s < 1 and link.bytes_per_s > 1e6
    assert device.gemm_efficiency <= 1 and device.memory_efficiency <= 1


def test_the_file_is_the_fitted_cluster(measured: Fit, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    write_cluster(measured, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["here.toml"]  # nothing left beside it
    read = Cluster.parse(path)
    assert (read.nodes, read.gpus_per_node, read.assumptions) == (1, 2, ())
    for field in dataclasses.fields(measured.cluster.device):
        expected = getattr(measured.cluster.device, field.name)
        assert getattr(read.device, field.name) == (
            expected if isinstance(expected, str) else pytest.approx(expected, rel=1e-5)
        )
    assert read.intra.bytes_per_s == pytest.approx(measured.cluster.intra.bytes_per_s, rel=1e-5)
    assert read.intra.latency_s == pytest.approx(measured.cluster.intra.latency_s, rel=1e-5)
    assert 'source = "measured"' in path.read_text()


def test_figures_that_were_not_measured_do_not_claim_to_be(measured: Fit) -> None:
    text = cluster_toml(measured)
    assert "fp32" in text and "fp64" in text
    assert "fp16" not in text and "bf16" not in text  # no product was run in them on a CPU
    on_gpus = cluster_toml(dataclasses.replace(measured, cluster=Cluster.parse("8xH100"), dtypes=("bf16",)))
    assert "gemm_efficiency" in on_gpus and "peak_flops" not in on_gpus and "memory_bytes_per_s" not in on_gpus


def test_a_folder_that_cannot_be_written_is_refused(measured: Fit, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot write the cluster file"):
        write_cluster(measured, tmp_path / "missing" / "here.toml")


def test_ranks_that_this_machine_cannot_have() -> None:
    assert 1 <= default_ranks("cpu") <= 8
    with pytest.raises(ClusterError, match="number of GPUs: 0"):
        calibrate(device="cpu", gpus=0)
    with pytest.raises(ClusterError, match="unknown device 'tpu'"):
        calibrate(device="tpu")
    with pytest.raises(ClusterError, match="GPUs were asked for and this machine has"):
        calibrate(device="cuda", gpus=1000)
