"""``autoplan calibrate``: tables or one JSON object on stdout, a cluster file that other commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoplan.cluster import Cluster
from autoplan.cost_models.calibration import Fit, TransferSample, fit
from tests.support.cli import Invoke


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Nothing is measured: two transfers are given; what was asked for is noted."""
    asked: list[dict[str, object]] = []

    def calibrate(**arguments: object) -> Fit:
        asked.append(arguments)
        sizes = (2.0**12, 2.0**24)
        samples = [TransferSample(collective="send", ranks=2, bytes=n, seconds=1e-4 + n / 1e9) for n in sizes]
        return fit(Cluster.parse("2xcpu"), samples)

    monkeypatch.setattr("autoplan.calibration.calibrate", calibrate)
    return asked


def test_tables(invoke: Invoke, fitted: list[dict[str, object]]) -> None:
    done = invoke("calibrate", "--device", "cpu", "--gpus", "2", "--quick")
    assert done.exit_code == 0, done.stderr
    assert (fitted[0]["device"], fitted[0]["gpus"], fitted[0]["quick"]) == ("cpu", 2, True)
    assert "1.00 GB/s" in done.stdout and "100 us" in done.stdout
    assert "median error" in done.stdout and "send of 4,096 bytes over 2" in done.stdout


def test_json_and_a_cluster_file(invoke: Invoke, fitted: list[dict[str, object]], tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    done = invoke("calibrate", "--device", "cpu", "-o", str(path), "--json")
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["schema"] == 1 and printed["gpus"] == 2
    assert printed["intra"]["bytes_per_s"] == pytest.approx(1e9, rel=1e-3)
    assert printed["intra"]["latency_s"] == pytest.approx(1e-4, rel=1e-3)
    assert [m["family"] for m in printed["measurements"]] == ["transfer", "transfer"]
    assert all(abs(m["error"]) < 1e-3 for m in printed["measurements"])
    assert Cluster.parse(path).intra.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert f"--gpus {path}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "missing/here.toml"), "cannot write the cluster file: there is no folder missing"),
        (("--device", "tpu"), "unknown device 'tpu'"),
        (("--device", "cpu", "--gpus", "0"), "number of GPUs: 0"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(
    invoke: Invoke, arguments: tuple[str, ...], message: str
) -> None:
    done = invoke("calibrate", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.stderr
