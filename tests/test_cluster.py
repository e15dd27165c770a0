"""How a user names machines, and what the hardware files promise."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autoplan.cluster import HARDWARE, Cluster, device_kinds, local_device_count
from autoplan.errors import ClusterError
from autoplan.instances import INSTANCES


@pytest.mark.parametrize(
    ("spec", "nodes", "gpus_per_node", "kind"),
    [
        ("8xH100", 1, 8, "H100-80GB-SXM"),
        ("2x8xA100-80GB", 2, 8, "A100-80GB-SXM"),
        ("2048x8xH100", 2048, 8, "H100-80GB-SXM"),
        ("16xH100", 2, 8, "H100-80GB-SXM"),
        (" 4x4090 ", 1, 4, "RTX-4090"),
        ("2x4x3090", 2, 4, "RTX-3090"),
        ("1xh200", 1, 1, "H200"),
        ("8xA100-80GB-SXM", 1, 8, "A100-80GB-SXM"),
        ("4xcpu", 1, 4, "cpu"),
        ("64xGB200", 1, 64, "GB200"),  # one NVLink domain holds 72
        ("256xGB200", 4, 64, "GB200"),  # 72 does not divide 256
    ],
)
def test_specs_name_nodes_gpus_and_kind(spec: str, nodes: int, gpus_per_node: int, kind: str) -> None:
    cluster = Cluster.parse(spec)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.device.name) == (nodes, gpus_per_node, kind)
    assert cluster.gpus == nodes * gpus_per_node
    again = Cluster.parse(cluster.to_spec())
    assert (again.nodes, again.gpus_per_node, again.device) == (nodes, gpus_per_node, cluster.device)


@pytest.mark.parametrize("spec", [8, "8"])
def test_a_bare_number_is_the_local_kind_or_a_default_said_aloud(spec: str | int) -> None:
    if local_device_count():
        pytest.skip("this machine has GPUs")
    cluster = Cluster.parse(spec)
    assert (cluster.gpus, cluster.device.name) == (8, "A100-80GB-SXM")
    assert any("no GPU here" in note for note in cluster.assumptions)


def test_what_was_filled_in_is_said() -> None:
    assert any("25 GB/s" in note for note in Cluster.parse("2x8xA100-80GB").assumptions)
    assert any("gloo" in note for note in Cluster.parse("2xcpu").assumptions)
    assert Cluster.parse("8xH100").assumptions == ()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (0, "must be 1 or more, not 0"),
        ("0", "must be 1 or more"),
        (-2, "must be 1 or more"),
        ("0xH100", "must be 1 or more"),
        ("-1x8xH100", "must be 1 or more"),
        ("8xH1000", "did you mean H100-80GB-SXM"),
        ("8xA10O", "did you mean"),
        ("H100", "say how many: 8xH100"),
        ("12xH100", "do not fill nodes of 8"),
        ("1x16xH100", "spans 8"),
        ("8x", "not a cluster"),
        ("axH100", "not a cluster"),
        ("", "not a cluster"),
        (True, "not a cluster"),
        (2.0, "not a cluster"),
        ("nowhere/cluster.toml", "cannot read"),
    ],
)
def test_nonsense_gets_one_clear_message(spec: object, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(spec)  # type: ignore[arg-type]
    assert says in str(caught.value)


def write(directory: Path, text: str) -> Path:
    path = directory / "cluster.toml"
    path.write_text(text)
    return path


def test_a_cluster_file_overrides_links_and_device(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "nodes = 4\ngpus_per_node = 4\n"
        '[device]\nbase = "A100-40GB"\nmemory_bytes = 30e9\npeak_flops = { bf16 = 200e12 }\n'
        '[inter]\nname = "RoCE"\ngbit_per_s = 100\n',
    )
    cluster = Cluster.parse(path)
    assert (cluster.gpus, cluster.device.memory_bytes, cluster.device.peak_flops["bf16"]) == (16, 30e9, 200e12)
    assert cluster.device.peak_flops["fp32"] == 19.5e12
    assert (cluster.inter.name, cluster.inter.bytes_per_s) == ("RoCE", 12.5e9)
    assert cluster.intra == Cluster.parse("4xA100-40GB").intra
    assert Cluster.parse(cluster.to_spec()) == cluster


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("nodes = 2", "`device` is missing"),
        ('device = "H100"\nnodes = 0', "`nodes`"),
        ('device = "H100"\nnodes = 2.5', "`nodes`"),
        ('device = "H100"\nnode = 2', "did you mean `nodes`"),
        ('device = "H10"', "unknown GPU kind"),
        ('device = "H100"\n[inter]\nbytes_per_s = -1', "`bytes_per_s`"),
        ('device = "H100"\n[inter]\nbandwidth = 1', "`inter.bandwidth`"),
        ('device = "H100"\ninter = 3', "`inter`"),
        ('[device]\nbase = "H100"\nmemory = 3', "`device.memory`"),
        ("device = [", "not TOML"),
    ],
)
def test_a_malformed_cluster_file_names_the_field(tmp_path: Path, text: str, field: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(path)
    assert field in str(caught.value)
    assert str(path) in str(caught.value)


def leaves(data: dict, path: str = "") -> list[tuple[str, dict]]:
    found: list[tuple[str, dict]] = []
    for key, value in data.items():
        if isinstance(value, dict):
            found += [(f"{path}{key}", value)] if "value" in value else leaves(value, f"{path}{key}.")
    return found


@pytest.mark.parametrize("kind", device_kinds())
def test_every_value_of_a_hardware_file_has_a_source(kind: str) -> None:
    data = tomllib.loads((HARDWARE / f"{kind}.toml").read_text())
    values = leaves(data)
    assert len(values) >= 15
    for path, value in values:
        assert value["source"].strip(), path
    cluster = Cluster.parse(f"2x{2 if kind != 'cpu' else 1}x{kind}")
    assert cluster.device.name == kind
    assert 0 < cluster.device.context_bytes < cluster.device.memory_bytes


def test_parsing_does_not_import_torch() -> None:
    code = "import sys; from autoplan.cluster import Cluster; Cluster.parse('8xH100'); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("spec", "gpus", "kind", "gbit_per_s"),
    [
        ("4xp5.48xlarge", 32, "H100-80GB-SXM", 400),  # 8 GPUs, 3200 Gb/s a machine
        ("2xp4d.24xlarge", 16, "A100-40GB-SXM", 50),
        ("2xa3-mega", 16, "H100-80GB-SXM", 200),
        ("1xg5.48xlarge", 8, "A10G", 12.5),
        ("16xND96isr_H100_v5", 128, "H100-80GB-SXM", 400),
    ],
)
def test_machines_of_clouds_by_name(spec: str, gpus: int, kind: str, gbit_per_s: float) -> None:
    cluster = Cluster.parse(spec)
    assert (cluster.gpus, cluster.device.name) == (gpus, kind)
    assert cluster.inter.bytes_per_s == pytest.approx(gbit_per_s * 1e9 / 8)
    assert Cluster.parse(cluster.to_spec()) == cluster


def test_a_part_of_a_machine_is_not_a_machine() -> None:
    with pytest.raises(ClusterError, match="has 8"):
        Cluster.parse("2x4xp5.48xlarge")


def test_every_machine_has_a_device_and_a_single_meaning() -> None:
    assert {instance.kind for instance in INSTANCES} <= set(device_kinds())
    names = [name.lower() for instance in INSTANCES for name in instance.names]
    assert len(set(names)) == len(names)


def test_an_oversubscribed_network_gives_each_gpu_its_part(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('device = "H100"\nnodes = 4\n[inter]\ngbit_per_s = 400\noversubscription = 2\n')
    assert Cluster.parse(path).inter.bytes_per_s == pytest.approx(25e9)
    path.write_text('device = "H100"\nnodes = 4\n[inter]\noversubscription = 0.5\n')
    with pytest.raises(ClusterError, match="oversubscription"):
        Cluster.parse(path)


@pytest.mark.parametrize(("value", "example"), [("nan", "5e-6"), ("0", "5e-6"), ("inf", "5e-6")])
def test_what_is_no_figure_is_answered_with_one_of_its_field(value: str, example: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(f'device = "H100"\nnodes = 2\n[inter]\nlatency_s = {value}\n')
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(path)
    assert caught.value.attempt == f"latency_s = {example}" and caught.value.legal == "a number from 1e-12 to 60"


@pytest.mark.parametrize("value", ["8192", "-1.0", "nan", "inf", "1e20", '"80GB"', "true"])
def test_a_memory_that_no_gpu_has_is_refused_by_name(value: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'nodes = 2\n[device]\nbase = "H100"\nmemory_bytes = {value}\n')
    with pytest.raises(ClusterError, match="`memory_bytes`") as caught:
        Cluster.parse(str(file))
    assert "mine.toml" in str(caught.value)


@pytest.mark.parametrize("value", ['"two"', "0", "1.5", "true", "[]", "-3"])
@pytest.mark.parametrize("field", ["nodes", "gpus_per_node"])
def test_a_count_in_a_cluster_file_is_a_positive_whole_number(tmp_path: Path, field: str, value: str) -> None:
    """What is legal is said of the field, and not of a SPEC."""
    file = tmp_path / "c.toml"
    file.write_text(f'device = "H100"\n{field} = {value}\n')
    with pytest.raises(ClusterError, match=f"field `{field}`") as refused:
        Cluster.parse(str(file))
    assert refused.value.legal.startswith("a positive whole number: 1 to ")
    assert refused.value.attempt == f"{field} = 2" and str(file) in str(refused.value)
