"""Specs, cluster files, model configs and other tools' files mutated at random: read, or refused by one message of ours
that says where; never a traceback, and what is read is a cluster, a model or a strategy that can be one."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autoplan.cli.options import STRATEGY_KEYS, parse_strategy
from autoplan.cluster import Cluster
from autoplan.errors import AutoplanError, ClusterError, ModelError
from autoplan.plan import Plan
from autoplan.search import Problem, predict
from tests.search import test_context, test_expert

FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))

CLUSTERS: list[dict[str, Any]] = [
    {"device": "H100", "nodes": 4, "gpus_per_node": 8, "inter": {"bytes_per_s": 25e9, "latency_s": 5e-6}},
    {
        "device": {"base": "A100-80GB", "memory_bytes": 60e9, "memory_efficiency": 0.8},
        "nodes": 2,
        "intra": {"gbit_per_s": 200, "peers": 2},
        "inter": {"gbit_per_s": 100, "oversubscription": 2, "name": "mine"},
    },
    {
        "groups": [
            {"name": "new", "device": "H100", "nodes": 2},
            {"device": "A100-80GB", "nodes": 1, "gpus_per_node": 4, "inter": {"gbit_per_s": 100}},
        ],
        "between": {"gbit_per_s": 100, "latency_s": 1e-5},
        "links": [{"groups": ["new", "A100-80GB-SXM"], "gbit_per_s": 200}],
    },
]
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64},
    {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "hidden_act": "silu",
    },
]
SMALL = st.one_of(st.integers(-3, 40), st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.5, 1e-30]))
LARGE = st.sampled_from([10**9, 10**40, 2**63, 1e30])
OTHER = st.one_of(
    st.none(), st.booleans(), st.text(max_size=8), st.sampled_from([[], {}, [1, "a"], "H100", "bert", "rope", {"a": 1}])
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*at, key)
        yield from paths(part, (*at, key))


def mutated(examples: list[dict[str, Any]], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """One of ``examples`` with up to three of its values changed, dropped or doubled, or a key that is not known."""

    @st.composite
    def draw_one(draw: st.DrawFn) -> dict[str, Any]:
        data = copy.deepcopy(draw(st.sampled_from(examples)))
        for _ in range(draw(st.integers(1, 3))):
            places = list(paths(data))
            if not places:
                break
            *above, last = draw(st.sampled_from(places))
            place: Any = data
            for key in above:
                place = place[key]
            change = draw(st.sampled_from(("value", "value", "value", "drop", "twice", "key")))
            if change == "value":
                place[last] = copy.deepcopy(draw(values))
            elif change == "key" and isinstance(place, dict):
                place[draw(st.text(max_size=6))] = copy.deepcopy(draw(values))
            elif change == "twice" and isinstance(place, list):
                place.insert(last, copy.deepcopy(place[last]))
            else:
                del place[last]
        return data

    return draw_one()


def toml(value: Any) -> str:
    """A value in TOML, inline; what TOML cannot hold (null) is an empty text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)
    return str(value) if isinstance(value, int) else json.dumps("" if value is None else value)


def check_cluster(text: str, folder: Path) -> None:
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8", errors="replace")
    try:
        cluster = Cluster.parse(str(file))
    except ClusterError as error:
        assert "cluster.toml" in str(error) and (error.legal or error.attempt or error.what)
        return
    assert cluster.gpus >= 1 and len(cluster.groups) != 1
    for part in cluster.one_kind:
        device = part.device
        figures = [device.memory_bytes, device.memory_bytes_per_s, *device.peak_flops.values()]
        links = [link for count, link in ((part.gpus_per_node, part.intra), (part.nodes, part.inter)) if count > 1]
        figures += [link.bytes_per_s for link in (*links, *cluster.between)]
        assert all(0 < figure < math.inf for figure in figures), figures
        assert all(0 <= link.latency_s < math.inf for link in (part.intra, part.inter))
        assert device.context_bytes < device.memory_bytes
    assert cluster.fingerprint and cluster.summary()


@FEW
@given(mutated(CLUSTERS, st.one_of(SMALL, LARGE, OTHER)))
def test_cluster_files(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    check_cluster(
        "\n".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in data.items()), tmp_path_factory.getbasetemp()
    )


@pytest.mark.wide
@MANY
@given(mutated(CLUSTERS, st.one_of(SMALL, LARGE, OTHER)))
def test_many_cluster_files(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    check_cluster(
        "\n".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in data.items()), tmp_path_factory.getbasetemp()
    )


@FEW
@given(st.text(max_size=60))
@example("[" * 3000)
@example('device = "H100"\nnodes = ' + "9" * 5000)
@example("\ud800")
def test_texts_that_are_no_cluster_files(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    check_cluster(text, tmp_path_factory.getbasetemp())


@settings(FEW, max_examples=100)
@given(
    st.one_of(
        st.text(max_size=20),
        st.from_regex(
            r"[-+]?[0-9]{0,12}(x[0-9]{1,12})?(x?(H100|A100-80GB|cpu|h200|X1))?([+][0-9]xL4)?", fullmatch=True
        ),
        st.integers(),
    )
)
def test_specs(spec: str | int) -> None:
    try:
        cluster = Cluster.parse(spec)
    except ClusterError as error:
        assert error.what and error.exit_code == 2
        return
    assert cluster.gpus >= 1 and Cluster.parse(cluster.spec).gpus == cluster.gpus


def check_config(text: str, folder: Path) -> None:
    from autoplan.models import resolve

    file = folder / "config-of-a-test.json"
    file.write_text(text, encoding="utf-8", errors="replace")
    try:
        found = resolve(str(file), batch=2, sequence=8)
    except ModelError as error:
        assert error.exit_code == 2 and error.what
        return
    assert all(parameter.is_meta for parameter in found.model.parameters())
    assert all(tensor.shape[0] == 2 for tensor in found.example_inputs.values())


@FEW
@given(mutated(CONFIGS, st.one_of(SMALL, OTHER)))
def test_model_configs(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    check_config(json.dumps(data), tmp_path_factory.getbasetemp())


@pytest.mark.wide
@MANY
@given(mutated(CONFIGS, st.one_of(SMALL, OTHER)))
def test_many_model_configs(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    check_config(json.dumps(data), tmp_path_factory.getbasetemp())


@FEW
@given(st.text(max_size=60))
@example("[" * 100_000)
@example('{"model_type": "gpt2", "n_layer": ' + "9" * 5000 + "}")
@example('{"model_type": "gpt2", "n_layer": 1000000000}')
@example('{"model_type": "gpt2", "vocab_size": 0}')
def test_texts_that_are_no_model_configs(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    check_config(text, tmp_path_factory.getbasetemp())


TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("deepspeed", {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}),
    ("accelerate", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 8}),
    ("transformers", {"tp_size": 2, "fsdp_size": 4, "per_device_train_batch_size": 2, "torch_compile": True}),
    (
        "accelerate",
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "num_processes": 16,
            "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 4},
            "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        },
    ),
    (
        "torchtitan",
        {
            "parallelism": {
                "data_parallel_shard_degree": 4,
                "tensor_parallel_degree": 2,
                "context_parallel_degree": 2,
                "expert_parallel_degree": 4,
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "Interleaved1F1B",
            },
            "training": {"local_batch_size": 2, "global_batch_size": 32, "seq_len": 4096},
            "compile": {"enable": True, "components": ["model", "loss"]},
        },
    ),
]


def check_tool(tool: str, data: dict[str, Any], folder: Path) -> None:
    from autoplan.export.read import read_file

    file = folder / (f"{tool}.toml" if tool == "torchtitan" else f"{tool}.json")
    lines = "\n".join(f"{json.dumps(str(key))} = {toml(value)}" for key, value in data.items())
    file.write_text(lines if tool == "torchtitan" else json.dumps(data), encoding="utf-8", errors="replace")
    try:
        imported = read_file(file, tool).imported
    except AutoplanError as error:
        assert error.exit_code == 2 and error.what
        return
    whole = ("data", "tensor", "pipeline", "context", "expert", "micro_batch_size")
    assert all(isinstance(imported.strategy[key], int) for key in whole if key in imported.strategy)
    assert all(imported.strategy[key] >= 1 for key in whole if key in imported.strategy)
    assert imported.strategy.get("zero_stage", 0) in (0, 1, 2, 3)
    assert imported.gpus is None or imported.gpus >= 1
    assert imported.global_batch is None or imported.global_batch >= 1
    assert isinstance(imported.compiled, bool)


@st.composite
def tools(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    tool, data = draw(st.sampled_from(TOOLS))
    return tool, draw(mutated([data], st.one_of(SMALL, LARGE, OTHER)))


@FEW
@given(tools())
def test_other_tools_files(tmp_path_factory: pytest.TempPathFactory, case: tuple[str, dict[str, Any]]) -> None:
    check_tool(*case, tmp_path_factory.getbasetemp())


@pytest.mark.wide
@MANY
@given(tools())
def test_many_of_other_tools_files(tmp_path_factory: pytest.TempPathFactory, case: tuple[str, dict[str, Any]]) -> None:
    check_tool(*case, tmp_path_factory.getbasetemp())


KEYS = st.one_of(
    st.sampled_from([*STRATEGY_KEYS, "compiled", "zero"]),
    st.sampled_from(["context", "expert", "data", "tensor", "pipeline", "virtual_stages", "schedule", "stages"]),
)
ASKED = st.one_of(
    st.integers(-2, 17).map(str),
    st.sampled_from(["1|2", "<=4", "!=3", "1f1b", "interleaved", "zero_bubble", "full", "true", "10%", "0-3", ""]),
    st.text(max_size=6),
)
PARTS = st.lists(st.tuples(KEYS, st.sampled_from(["=", "<=", ">", ""]), ASKED).map("".join), min_size=1, max_size=4)


def check_strategy(texts: list[str], question: Callable[..., Problem]) -> None:
    """What is accepted is obeyed, and its plan is one that can be read again."""
    try:
        forced = parse_strategy(texts)
        plan = predict(question(**forced))
    except AutoplanError as error:
        assert error.what and error.exit_code in (1, 2)
        return
    whole = ("data", "tensor", "pipeline", "context", "expert", "virtual_stages", "zero_stage", "micro_batch_size")
    assert all(getattr(plan.strategy, key) == forced[key] for key in whole if isinstance(forced.get(key), int))
    assert Plan.from_json(plan.to_json()) == plan


@settings(FEW, max_examples=40)
@given(PARTS, st.sampled_from([test_context.problem, test_expert.problem]))
def test_strategies(texts: list[str], question: Callable[..., Problem]) -> None:
    check_strategy(texts, question)


@pytest.mark.wide
@MANY
@given(PARTS, st.sampled_from([test_context.problem, test_expert.problem]))
def test_many_strategies(texts: list[str], question: Callable[..., Problem]) -> None:
    check_strategy(texts, question)
