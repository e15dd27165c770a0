"""Kinds side by side: in a SPEC and in a file; and files that are none get one clear message, whatever is in them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoplan.cluster import Cluster, device_kinds
from autoplan.errors import ClusterError

H100, A100 = "H100-80GB-SXM", "A100-80GB-SXM"


def write(directory: Path, text: str) -> Path:
    path = directory / "cluster.toml"
    path.write_text(text)
    return path


def test_a_spec_names_kinds_side_by_side() -> None:
    cluster = Cluster.parse("2x8xH100+2x4xA100-80GB")
    assert [(g.name, g.nodes, g.gpus_per_node) for g in cluster.groups] == [(H100, 2, 8), (A100, 2, 4)]
    assert cluster.groups[0] == dataclasses.replace(Cluster.parse("2x8xH100"), name=H100)
    assert (cluster.gpus, cluster.nodes, cluster.gpus_per_node) == (24, 6, 4)
    assert Cluster.parse(cluster.to_spec()) == cluster


def test_a_mixed_cluster_is_itself_what_all_its_gpus_can_do() -> None:
    cluster = Cluster.parse("8xH100+8xA100-40GB")
    fast, slow = (group.device for group in cluster.groups)
    assert cluster.device.peak_flops["bf16"] == slow.peak_flops["bf16"]
    assert "fp8" in fast.peak_flops
    assert "fp8" not in cluster.device.peak_flops
    assert cluster.device.memory_bytes == slow.memory_bytes
    assert cluster.intra.bytes_per_s == cluster.groups[1].intra.bytes_per_s


def test_parts_of_one_kind_are_one_group() -> None:
    assert Cluster.parse("2x8xH100+1x8xH100") == Cluster.parse("3x8xH100")
    assert [g.gpus for g in Cluster.parse("8xH100+8xA100+8xH100").groups] == [16, 8]


def test_between_groups_the_slower_network_is_assumed_and_said() -> None:
    cluster = Cluster.parse("8xH100+8xA100-80GB")
    assert cluster.link_between(0, 1) == cluster.link_between(1, 0) == Cluster.parse("8xA100-80GB").inter
    assert any(f"between {H100} and {A100}" in note for note in cluster.assumptions)


GROUPS = """
[[groups]]
name = "new"
device = "H100"
nodes = 2
[groups.inter]
gbit_per_s = 400
[[groups]]
device = "A100-80GB"
[[groups]]
device = "A100-80GB"
[groups.intra]
bytes_per_s = 100e9
"""


def test_a_file_gives_groups_and_the_links_between_them(tmp_path: Path) -> None:
    path = write(
        tmp_path, GROUPS + f'[between]\ngbit_per_s = 80\n[[links]]\ngroups = ["{A100}-2", "NEW"]\nbytes_per_s = 5e9\n'
    )
    cluster = Cluster.parse(path)
    assert [g.name for g in cluster.groups] == ["new", f"{A100}-1", f"{A100}-2"]
    assert [cluster.link_between(*p).bytes_per_s for p in itertools.combinations(range(3), 2)] == [10e9, 5e9, 10e9]
    assert cluster.groups[0].inter.bytes_per_s == 50e9
    assert cluster.groups[2].intra.bytes_per_s == 100e9
    assert Cluster.parse(cluster.to_spec()) == cluster


def test_one_group_is_a_cluster_of_one_kind(tmp_path: Path) -> None:
    path = write(tmp_path, '[[groups]]\ndevice = "H100"\nnodes = 2\n')
    cluster = Cluster.parse(path)
    assert dataclasses.replace(cluster, spec="2x8x" + H100, assumptions=()) == dataclasses.replace(
        Cluster.parse("2x8xH100"), assumptions=()
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("groups = 3", "`groups` is a list of tables"),
        ("groups = []", "`groups` is a list of tables"),
        ("[between]\ngbit_per_s = 1", "`groups` is a list of tables"),
        ('device = "H100"\n[[groups]]\ndevice = "A100"', "either `device` or `groups`"),
        ("[[groups]]\nnodes = 1", "`device` is missing"),
        ('[[groups]]\ndevice = "H100"\nname = 3', "`name`"),
        ('[[groups]]\ndevice = "H100"\n[between]\ngbit_per_s = 1', "there is one"),
        (GROUPS + "[between]\ngbit_a_s = 1", "did you mean `gbit_per_s`"),
        (GROUPS + "[between]\npeers = 2", "`between.peers`"),
        (GROUPS + "[between]\ngbit_per_s = 1\nbytes_per_s = 1e9", "given twice"),
        (GROUPS + '[[links]]\ngroups = ["new"]\ngbit_per_s = 1', "names two groups"),
        (GROUPS + '[[links]]\ngroups = ["new", "old"]\ngbit_per_s = 1', "no group is called 'old'"),
        (GROUPS + '[[links]]\ngroups = ["new", "new"]\ngbit_per_s = 1', "to itself"),
        (GROUPS + f'[[links]]\ngroups = ["new", "{A100}-1"]\n' * 2, "have a link already"),
        (GROUPS + '[[groups]]\ndevice = "cpu"', "cannot train one model together"),
        (GROUPS + '[[groups]]\nname = "new"\ndevice = "T4"', "two groups are called 'new'"),
        ('[[groups]]\ndevice = "T4"\n' * 7, "up to 6"),
        ('[[groups]]\ndevice = "T4"\nnodes = 4000000\n', "more than any cluster has"),
        ('device = "H100"\n[device2]', "unknown field `device2`"),
        ('[device]\nbase = "H100"\npeak_flops = 3', "`peak_flops` is a table"),
        ('[device]\nbase = "H100"\npeak_flops = { bf61 = 1e12 }', "did you mean `bf16`"),
        ('[device]\nbase = "H100"\nname = 3', "`name` is a short text"),
        ('[device]\nbase = "H100"\nname = "cpu"', "any name but cpu"),
        ('[device]\nbase = "cpu"\nname = "EPYC"', "cannot be 'EPYC'"),
        ('[device]\nbase = "H100"\nsms = 1.5', "a whole number"),
        ('[device]\nbase = "H100"\ngemm_efficiency = 60', "from 1e-06 to 1"),
        ('device = "H100"\n[inter]\nbytes_per_s = 1e-300', "cannot be 1e-300"),
        ('device = "H100"\nnodes = ' + "9" * 5000, "far too long"),
        ("a = " + "[" * 20000, "nested without end"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(write(tmp_path, text))
    assert says in str(caught.value)


@pytest.mark.parametrize("spec", ["8xH100+", "8xH100++8xA100", "8+8xH100", "8xH100+8xA10O", "8xH100+4xcpu"])
def test_nonsense_side_by_side_gets_one_clear_message(spec: str) -> None:
    with pytest.raises(ClusterError):
        Cluster.parse(spec)


# What people, scripts and accidents put into files: fields right, wrong and unknown, values of every type.
texts = st.one_of(
    st.sampled_from(["H100", "A100-80GB", "H10", "cpu", "new", "old", "", "2x8xH100", "\u20ac", "a\nb"]),
    st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=6),
)
numbers = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([0, 8, 10**7, 10**30, -1, 1e-320, 1e308, 25e9, 0.5, math.inf, -math.inf, math.nan]),
    st.booleans(),
)
links = st.dictionaries(
    st.sampled_from(["name", "bytes_per_s", "gbit_per_s", "latency_s", "peers", "oversubscription", "gbit", "value"]),
    st.one_of(numbers, texts),
    max_size=3,
)
devices = st.one_of(
    texts,
    st.sampled_from(["H100", "A100", "cpu"]),
    st.dictionaries(
        st.sampled_from(["base", "name", "sms", "memory_bytes", "gemm_efficiency", "peak_flops", "launch_s", "memory"]),
        st.one_of(
            st.sampled_from(["H100", "T4"]),
            numbers,
            texts,
            st.dictionaries(st.sampled_from(["bf16", "bf61", "value"]), numbers, max_size=2),
        ),
        max_size=4,
    ),
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "device": devices,
        "name": st.one_of(texts, numbers),
        "nodes": st.one_of(st.integers(1, 4), numbers, texts),
        "gpus_per_node": st.one_of(st.integers(1, 8), numbers, texts),
        "intra": st.one_of(links, numbers),
        "inter": st.one_of(links, texts),
        "node": numbers,
    },
)
pairs = st.lists(st.one_of(texts, st.sampled_from(["new", H100, A100]), numbers), max_size=3)
mixed = st.fixed_dictionaries(
    {},
    optional={
        "groups": st.one_of(st.lists(fields, max_size=4), numbers),
        "between": st.one_of(links, texts),
        "links": st.lists(st.builds(lambda link, named: {**link, "groups": named}, links, pairs), max_size=2),
        "device": devices,
    },
)


def toml(value: Any) -> str:
    """A value as TOML, tables in a line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {toml(each)}' for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return repr(value)


def check_is_one_or_says_why(path: Path) -> None:
    try:
        cluster = Cluster.parse(path)
    except ClusterError as error:
        assert str(path) in str(error)
        assert error.legal or error.attempt or "peak_flops" in error.what or "field" in error.what
        return
    assert cluster.gpus == sum(part.gpus for part in cluster.one_kind) == cluster.nodes * cluster.gpus_per_node
    for part in (cluster, *cluster.groups):
        assert 1 <= part.gpus <= 10**7
        assert {type(part.nodes), type(part.gpus_per_node), type(part.device.sms)} == {int}
        check_figures(dataclasses.asdict(part.device))
        for link in (part.intra, part.inter, *part.between):
            check_figures(dataclasses.asdict(link))
    assert all(part.device.memory_bytes >= cluster.device.memory_bytes for part in cluster.one_kind)
    assert len({part.name for part in cluster.groups}) == len(cluster.groups)
    assert len(cluster.between) == math.comb(len(cluster.groups), 2)
    assert Cluster.parse(cluster.to_spec()) == cluster


def check_figures(figures: dict[str, Any]) -> None:
    """Names are text; the rest is positive, finite, and gives times that are."""
    for name, value in figures.items():
        if name == "name":
            assert isinstance(value, str)
            assert value.strip()
        elif name == "peak_flops":
            assert value
            check_figures(value)
        elif name != "peers":
            assert type(value) in (int, float)
            assert 0 < value < math.inf
            assert 1e12 / value < math.inf


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(fields, mixed))
def test_a_file_is_a_cluster_or_an_error_that_says_why(tmp_path: Path, described: dict[str, Any]) -> None:
    text = "\n".join(f"{key} = {toml(value)}" for key, value in described.items())
    check_is_one_or_says_why(write(tmp_path, text))


@pytest.mark.wide
@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(fields, mixed))
def test_2500_files_are_clusters_or_errors_that_say_why(tmp_path: Path, described: dict[str, Any]) -> None:
    text = "\n".join(f"{key} = {toml(value)}" for key, value in described.items())
    check_is_one_or_says_why(write(tmp_path, text))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_in_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    check_is_one_or_says_why(path)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(max_size=30),
        st.lists(
            st.sampled_from([*device_kinds(), "8x", "2x", "x", "+", "0x", "-1x", "1" * 5000, "p5", "H100", " "]),
            max_size=8,
        ).map("".join),
    )
)
def test_any_text_is_a_cluster_or_is_refused_in_words(text: str) -> None:
    try:
        cluster = Cluster.parse(text)
    except ClusterError:
        return
    assert cluster.gpus == sum(part.gpus for part in cluster.one_kind)


def test_a_link_with_a_bandwidth_of_its_own_is_not_called_what_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        """
        [[groups]]
        device = "H100"
        nodes = 2
        [groups.inter]
        latency_s = 9e-6
        [[groups]]
        device = "A100-80GB"
        nodes = 2
        [groups.inter]
        gbit_per_s = 100
        oversubscription = 2
        [between]
        bytes_per_s = 10e9
        """
    )
    cluster = Cluster.parse(str(tmp_path / "own.toml"))
    new, old = cluster.groups
    assert new.inter.name == "400 Gb/s NDR InfiniBand, 8 rails (your figures)"  # at its own bandwidth
    assert old.inter.name == "100 Gb/s a GPU, oversubscribed 2 times (your figures)"
    assert old.inter.bytes_per_s == pytest.approx(100e9 / 8 / 2)
    assert cluster.link_between(0, 1).name == "10 GB/s a GPU (your figures)"
    assert new.spec == f"H100-80GB-SXM of {cluster.spec}"  # what messages about a group call it


def test_more_memory_is_as_many_bytes_more_on_every_gpu_whatever_its_kind() -> None:
    here = Cluster.parse("8xH100+8xA100-40GB")
    there = here.with_more_memory(2.0**30)
    for before, after in zip((here, *here.groups), (there, *there.groups), strict=True):
        assert after.device.memory_bytes == before.device.memory_bytes + 2.0**30
