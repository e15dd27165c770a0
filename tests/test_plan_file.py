"""The text of plan files: one line a range of layers, older revisions brought up, and a plan for another model refused
with what differs."""

from __future__ import annotations

import dataclasses
import json
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from autoplan import plan_file
from autoplan.cluster import Cluster, Link
from autoplan.consistency import not_its_cluster, other_cluster, other_count, other_model
from autoplan.errors import ClusterError, PlanFileError
from autoplan.layers import LayerGraph
from autoplan.plan import OtherAnswer, Plan, Strategy
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, graph, problem
from tests.support.plans import of_revision, sealed

OLD = sorted((Path(__file__).parent / "report" / "data").glob("plan-revision-*.json"))


def planned(pipeline: int = 2, **forced: object) -> Plan:
    layers = [Dense(elements=20_000_000)] * 8
    return search(problem(layers, cluster(4), forced={"pipeline": pipeline, "schedule": "1f1b", **forced}))


def test_there_is_a_file_of_every_revision() -> None:
    assert [path.stem for path in OLD] == [f"plan-revision-{n}" for n in range(1, plan_file.REVISION + 1)]


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.stem)
def test_files_of_every_revision_are_read_and_written_as_the_newest(path: Path, tmp_path: Path) -> None:
    plan = Plan.load(path)
    assert plan.revision == plan_file.REVISION
    assert plan.strategy.pipeline == 2 and plan.model.parameters == 508_992
    assert Plan.load(plan.save(tmp_path / "new.json")) == plan
    assert "data 2 x pipeline 2" in plan.explain()


def test_the_first_files_said_only_what_all_sends_take() -> None:
    old = json.loads(OLD[0].read_text())
    assert "revision" not in old and "send_s" not in old["stages"][0]
    sends_s = old["predicted"]["time_terms"]["sends"]
    assert sends_s > 0
    assert [stage.send_s for stage in Plan.load(OLD[0]).stages] == [
        sends_s / 2,
        0.0,
    ]  # there and back over one boundary
    del old["predicted"]["time_terms"]["sends"]
    old["predicted"]["time_terms"]["bubble"] += sends_s
    assert [stage.send_s for stage in Plan.from_json(json.dumps(old)).stages] == [0.0, 0.0]


@pytest.mark.parametrize("revision", [plan_file.REVISION + 1, 0, -1, "2", None, True, 1.5])
def test_a_revision_that_is_not_known_is_refused(revision: object) -> None:
    data = planned().to_dict() | {"revision": revision}
    with pytest.raises(PlanFileError, match=r"revision`? is .*\n.*\n.*revisions 1 to") as caught:
        Plan.from_json(json.dumps(data), where="new.json")
    assert "new.json" in str(caught.value)


@pytest.mark.parametrize("revision", [0, -1, "2", None, 1.5])
def test_what_was_never_a_revision_is_no_matter_of_versions(revision: object) -> None:
    data = planned().to_dict() | {"revision": revision}
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(json.dumps(data))
    assert caught.value.what == f"field `revision` is {json.dumps(revision)}, and no revision of plan files"
    assert caught.value.legal == f"a whole number: revisions 1 to {plan_file.REVISION}; left out, it is 1"
    assert "newer" not in caught.value.attempt


def test_a_stage_that_moves_one_layer_is_two_lines_and_its_figures() -> None:
    plan = planned()
    first, second = plan.stages
    moved = dataclasses.replace(
        plan,
        stages=(
            dataclasses.replace(first, last_layer=first.last_layer - 1, recompute={"none": 3}, layer_recompute=()),
            dataclasses.replace(second, first_layer=second.first_layer - 1, recompute={"none": 5}, layer_recompute=()),
        ),
    )
    lines = list(unified_diff(plan.to_json().splitlines(), moved.to_json().splitlines(), lineterm="", n=0))
    assert '+      "first_layer": 0, "last_layer": 2, "recompute": {"none": 3},' in lines
    assert '-      "first_layer": 0, "last_layer": 3, "recompute": {"none": 4},' in lines
    assert sum("first_layer" in line for line in lines) == 4 and len(lines) <= 17  # and the digest


def test_the_text_is_the_data() -> None:
    plan = planned()
    edges = ((0, 1), (0, 5), *((layer, layer + 1) for layer in range(1, 7)))
    answer = OtherAnswer(condition="1 GiB more", quantity="memory_bytes", value=1.0, strategy=None, step_time_s=None)
    more = dataclasses.replace(plan, model=dataclasses.replace(plan.model, edges=edges), other_answers=(answer,))
    assert json.loads(more.to_json()) == more.to_dict()
    assert "      [0, 5],\n" in more.to_json()
    assert Plan.from_json(more.to_json()) == more


def test_edges_that_are_none_are_refused() -> None:
    data = planned().to_dict()
    for pair in ([3, 3], [4, 2], [0, 8]):
        data["model"]["edges"] = [pair]
        with pytest.raises(PlanFileError, match=r"`model.edges.0`: \(\d, \d\) is no pair"):
            Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["\x1b[2Jgpt", "gpt\x07", "a\nb", "\x9b31m"])
def test_names_that_steer_a_terminal_are_refused(text: str) -> None:
    plan = planned()
    for changed in (
        dataclasses.replace(plan, model=dataclasses.replace(plan.model, name=text)),
        dataclasses.replace(plan, assumptions=(*plan.assumptions, text)),
        dataclasses.replace(plan, forced={text: 1}),
    ):
        with pytest.raises(PlanFileError, match="characters that steer a terminal") as refused:
            Plan.from_json(changed.to_json())
        assert not {"\x1b", "\x07", "\x9b"} & set(str(refused.value))


def test_another_answers_degrees_are_checked_too() -> None:
    answer = OtherAnswer(
        condition="1 GiB more", quantity="memory_bytes", value=1.0, strategy=Strategy(data=0), step_time_s=1.0
    )
    data = dataclasses.replace(planned(), other_answers=(answer,)).to_dict()
    with pytest.raises(PlanFileError, match=r"`other_answers.0.strategy.data`"):
        Plan.from_json(json.dumps(data))


def model(**changes: object) -> LayerGraph:
    made = graph([Dense(elements=20_000_000)] * 8)
    return dataclasses.replace(made, fingerprint="another", **changes)  # type: ignore[arg-type]


def test_what_differs_from_the_plans_model_is_said() -> None:
    plan = planned()
    assert other_model(plan, dataclasses.replace(model(), fingerprint=plan.model.fingerprint)) == ""
    undigested = model(layer_digests=())
    assert other_model(plan, undigested) == "operators or shapes of the same layers"
    assert "tokens per sample" in other_model(plan, model(tokens_per_sample=77))
    fewer = other_model(plan, graph([Dense(elements=10_000_000)] * 4))
    assert "parameters 160,000,000 there and 40,000,000 here" in fewer and "layers 8 there and 4 here" in fewer


def test_a_clusters_fingerprint_is_of_its_figures() -> None:
    one = Cluster.parse("8xH100")
    assert one.fingerprint == Cluster.parse("1x8xH100").fingerprint
    renamed = dataclasses.replace(one, spec="elsewhere.toml", name="mine", assumptions=("x",))
    assert renamed.fingerprint == one.fingerprint
    slower = dataclasses.replace(one, inter=dataclasses.replace(one.inter, bytes_per_s=1.0))
    others = ("16xH100", "8xA100-80GB", "8xH100+8xA100")
    found = {one.fingerprint, slower.fingerprint, *(Cluster.parse(spec).fingerprint for spec in others)}
    assert len(found) == 5
    assert planned().cluster.fingerprint == cluster(4).fingerprint


# --------------------------------------------------------------------------------------------- the plan's cluster


MIXED = "2x4xH100+1x8xA100-80GB"


@pytest.mark.parametrize("spec", ["4xH100", "2x2xA100-80GB", "2xH100+2xA100-80GB", "ours.toml"])
def test_a_cluster_whose_figures_were_replaced_is_not_what_its_spec_says(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text('device = "A10G"\nnodes = 2\ngpus_per_node = 2\n')
    named = Cluster.parse(spec)
    device = dataclasses.replace(named.device, memory_bytes=named.device.memory_bytes / 2)
    groups = tuple(dataclasses.replace(group, device=device) for group in named.groups)
    layers = [Dense(elements=20_000_000)] * 8
    for asked in (named, dataclasses.replace(named, device=device, groups=groups)):
        plan = search(problem(layers, asked))
        assert plan.cluster.spec == asked.spec + ("" if asked is named else ", changed")
        again = Plan.load(plan.save(tmp_path / "plan.json"))
        assert again == plan and other_cluster(again, asked) == ""
    with pytest.raises(ClusterError):
        Cluster.parse(plan.cluster.spec)
    mine = dataclasses.replace(cluster(4), spec="my machines")
    assert search(problem(layers, mine)).cluster.spec == "my machines"


def planned_on(spec: str) -> Plan:
    layers = [Dense(elements=20_000_000)] * 8
    return search(problem(layers, Cluster.parse(spec)))


def edited(plan: Plan, **changes: object) -> str:
    """The file of ``plan`` with other fields of its cluster."""
    data = plan.to_dict()
    data["cluster"] |= changes
    return sealed(data)


@pytest.mark.parametrize("spec", ["4xA100-80GB", "2x4xH100", "1xp5.48xlarge", "2xcpu", MIXED])
def test_a_plans_cluster_is_the_one_that_its_spec_names(spec: str) -> None:
    plan = planned_on(spec)
    assert Plan.from_json(plan.to_json()) == plan
    assert other_cluster(plan, Cluster.parse(spec)) == ""


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"spec": "4xH100"}, "cluster.device", "'A100-80GB-SXM', but `4xH100` means 'H100-80GB-SXM'"),
        ({"spec": "8xA100-80GB"}, "cluster.gpus_per_node", "4, but `8xA100-80GB` means 8"),
        ({"spec": "2x2xA100-80GB"}, "cluster.nodes", "1, but `2x2xA100-80GB` means 2"),
        ({"spec": MIXED}, "cluster.groups", "1 kinds of GPUs"),
        ({"device": "A100-40GB-SXM"}, "cluster.device", "means 'A100-80GB-SXM'"),
        ({"memory_bytes": 40e9}, "cluster.memory_bytes", "but a GPU of `4xA100-80GB-SXM` has 8"),
        ({"memory_bytes": 40e9, "fingerprint": ""}, "cluster.memory_bytes", "40000000000.0, but"),
        ({"memory_bytes": 85e9}, "cluster.memory_bytes", "85000000000.0, but"),
        ({"fingerprint": "mine"}, "cluster.fingerprint", "64 hexadecimal digits"),
    ],
)
def test_a_cluster_that_is_not_what_its_spec_says_is_refused(changes: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(edited(planned_on("4xA100-80GB"), **changes), where="mine.json")
    message = str(caught.value)
    assert f"field `{field}`: " in message and said in message
    assert "mine.json" in message and "take the edit back, or plan again" in message


@pytest.mark.parametrize(
    ("group", "changes", "said"),
    [
        (0, {"device": "A10G"}, "`cluster.groups.0.device`: 'A10G', but"),
        (1, {"memory_bytes": 2.0**34}, "`cluster.groups.1.memory_bytes`: 17179869184.0, but"),
    ],
)
def test_each_kind_of_a_mixed_cluster_is_what_its_spec_says(group: int, changes: dict[str, object], said: str) -> None:
    data = planned_on(MIXED).to_dict()
    data["cluster"]["groups"][group] |= changes
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(json.dumps(data))
    assert said in str(caught.value)


@pytest.mark.parametrize("spec", ["machines/ours.toml", "ours.toml", "4", "a cluster of ours", "9" * 5000 + "xH100"])
def test_what_a_file_or_this_machine_says_is_not_looked_up(spec: str) -> None:
    """A plan is read where the cluster's file is not, and where the machine is another."""
    assert Plan.from_json(edited(planned_on("4xA100-80GB"), spec=spec)).cluster.spec == spec


def test_plans_of_older_data_sheets_stay_readable() -> None:
    """No fingerprint, or one that figures of today do not give: then memory may be a little off too."""
    plan = planned_on("4xA100-80GB")
    for fingerprint in ("", "0" * 64):
        text = edited(plan, memory_bytes=plan.cluster.memory_bytes * 1.01, fingerprint=fingerprint)
        assert Plan.from_json(text).stages == plan.stages


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ("2x4xA100-80GB", "H100-80GB-SXM there and A100-80GB-SXM here"),
        ("2x8xH100", "8 GPUs there and 16 here"),
        ("8xH100", "2 x 4 GPUs there and 1 x 8 here"),
        ("16xA100-80GB", "H100-80GB-SXM there and A100-80GB-SXM here; 8 GPUs there and 16 here"),
        (MIXED, "H100-80GB-SXM there and H100-80GB-SXM + A100-80GB-SXM here; 8 GPUs there and 16 here"),
    ],
)
def test_what_differs_from_the_plans_cluster_is_said(here: str, said: str) -> None:
    plan, cluster = planned_on("2x4xH100"), Cluster.parse(here)
    assert other_cluster(plan, cluster) == said
    assert bool(other_count(plan, cluster)) == (cluster.gpus != 8)
    message = str(not_its_cluster(plan, cluster, said, attempt="plan again"))
    assert message.startswith(f"the plan was made for 2x4xH100-80GB-SXM, and {cluster.spec} is another cluster: {said}")
    assert "legal: the plan's own cluster: 2 x 4 H100-80GB-SXM" in message and "try:   plan again" in message


def test_memory_and_links_tell_clusters_of_one_kind_apart() -> None:
    plan, same = planned_on("2x4xH100"), Cluster.parse("2x4xH100")
    roomier = dataclasses.replace(same, device=dataclasses.replace(same.device, memory_bytes=96 * 2.0**30))
    assert other_cluster(plan, roomier).endswith("a GPU there and 96.0 GiB a GPU here")
    slow = dataclasses.replace(same, inter=dataclasses.replace(same.inter, bytes_per_s=10e9))
    assert other_cluster(plan, slow) == "links between nodes 50 GB/s there and 10 here"
    late = dataclasses.replace(same, intra=Link(name="x", bytes_per_s=same.intra.bytes_per_s, latency_s=1.0))
    assert other_cluster(plan, late) == "links or other figures of GPUs of the same name"
    oldest = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, fingerprint=""))
    assert other_cluster(oldest, slow) == ""  # such files do not tell


# ------------------------------------------------------------------------------------------------- what stages compute


@pytest.mark.parametrize(
    "forced",
    [{}, {"data": 2, "recompute": "full"}, {"tensor": 2, "micro_batch_size": 2}],
    ids=["pipeline", "data", "tensor"],
)
def test_the_stages_flops_are_those_of_the_step(forced: dict[str, object]) -> None:
    """Recompute is none of the model's own; tensor ranks share a micro-batch, data ranks do not."""
    plan = planned(pipeline=2, **forced)
    each = [stage.flops for stage in plan.stages]
    assert each == pytest.approx(
        [3e12 * (s.last_layer - s.first_layer + 1) * plan.strategy.micro_batch_size for s in plan.stages]
    )
    total = sum(each) * plan.strategy.micro_batches * plan.strategy.data
    assert total == pytest.approx(3e12 * 8 * plan.global_batch)
    assert total == pytest.approx(
        plan.predicted.model_tflops_per_gpu * 1e12 * plan.gpus_used * plan.predicted.step_time_s
    )


def test_flops_that_the_step_does_not_make_are_refused() -> None:
    data = planned().to_dict()
    data["stages"][1]["flops"] *= 1.01
    with pytest.raises(PlanFileError, match=r"`predicted.model_tflops_per_gpu`: makes .* FLOPs a step, but the stages"):
        Plan.from_json(json.dumps(data))
    for stage in data["stages"]:
        del stage["flops"]
    assert [stage.flops for stage in Plan.from_json(of_revision(data, 3)).stages] == [0.0, 0.0]


@pytest.mark.parametrize("revision", [4, 5])
def test_older_files_counted_too_few_messages_between_two_ranks_of_several_stages(revision: int) -> None:
    strategy = {"pipeline": 2, "virtual_stages": 2, "micro_batches": 16}
    axes = [{"name": "pipeline", "times_per_step": 32}, {"name": "data", "times_per_step": 32}]
    old = {"revision": revision, "strategy": strategy, "axes": axes}
    assert [axis["times_per_step"] for axis in plan_file.migrate(old)["axes"]] == [48, 32]
    wider = old | {"strategy": strategy | {"pipeline": 4}}
    assert plan_file.migrate(wider)["axes"] == axes


# ------------------------------------------------------------------------------------------------------ older files


def test_older_files_counted_other_axes_in_the_tensor_row() -> None:
    """The row is what the same question gives now; what the axes take together is the step's term."""
    path = OLD[0].with_name("experts-revision-6.json")
    written = {axis["name"]: axis for axis in json.loads(path.read_text())["axes"]}
    assert written["tensor"]["collective"] == "all-reduce, all-to-all"
    plan = Plan.load(path)
    tensor, expert = (next(axis for axis in plan.axes if axis.name == name) for name in ("tensor", "expert"))
    assert tensor.collective == "all-reduce"
    assert tensor.times_per_step == written["tensor"]["times_per_step"] - expert.times_per_step
    # Two all-reduces a layer forward, two backward: half of a ring of two sends the tensor once.
    layers, row = 4, 2.0 * 4096 * 2048
    assert tensor.bytes_per_step == plan.strategy.micro_batches * layers * 4 * row
    assert tensor.exposed_s + expert.exposed_s == pytest.approx(plan.predicted.time_terms["tensor_communication"])


def older(revision: int = 4) -> dict[str, Any]:
    """A plan's data as files of ``revision`` had them."""
    data: dict[str, Any] = json.loads(of_revision(planned_on("2x4xH100").to_dict(), revision))
    return data


def forged(path: tuple[Any, ...], value: object) -> str:
    data = older()
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize("revision", [3, 4])
def test_an_older_file_is_said_to_be_less_checked_and_stays_so(revision: int, tmp_path: Path) -> None:
    plan = Plan.from_json(json.dumps(older(revision)))
    assert plan.first_revision == revision and f"written as revision {revision}" in plan.unchecked
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert again.revision == plan_file.REVISION and again.unchecked == plan.unchecked
    assert planned().unchecked == ""


def test_a_file_of_revision_5_that_was_an_older_one_is_known_by_what_it_lacks() -> None:
    data = json.loads(OLD[4].read_text())
    assert Plan.from_json(json.dumps(data)).first_revision == 5
    data["cluster"]["peak_flops"] = 0.0
    assert Plan.from_json(sealed(data)).first_revision == 4


@pytest.mark.parametrize(
    ("path", "since"),
    [(("digest",), 5), (("cluster", "peak_flops"), 5), (("first_revision",), 6), (("model", "layer_kinds"), 6)],
)
def test_an_older_file_has_no_fields_of_newer_ones(path: tuple[str, ...], since: int) -> None:
    """A file of today that calls itself older, to be checked less, is none."""
    data = json.loads(forged(path, {"digest": "", "layer_kinds": {}}.get(path[-1], 6)))
    with pytest.raises(
        PlanFileError, match=f"`revision`: 4, but files have a `{'.'.join(path)}` since revision {since}"
    ):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("axes", 0, "link"), "carrier pigeon", "axes.0.link"),
        (("axes", 0, "times_per_step"), 7777, "axes.0.times_per_step"),
        (("axes", 0, "exposed_s"), 0.0, "axes.0.exposed_s"),
        (("alternatives", 0, "why_not"), "it was not fancied", "alternatives.0.why_not"),
        (("alternatives", 0, "why_not"), "900.0% slower: lazy", "alternatives.0.step_time_s"),
        (("predicted", "bubble_fraction"), 0.9, "predicted.bubble_fraction"),
        (("certificate", "gap"), 0.5, "certificate.gap"),
        (("forced",), {"tensor": 8}, "forced.tensor"),
    ],
)
def test_what_an_older_file_says_is_checked_too(path: tuple[Any, ...], value: object, said: str) -> None:
    with pytest.raises(PlanFileError, match=f"field `{said}`: "):
        Plan.from_json(forged(path, value))


def test_the_layer_that_differs_is_named() -> None:
    """By hashes of what each kind of layer computes, one a kind."""
    layers = [Dense(elements=20_000_000)] * 8
    plan = search(problem(layers, cluster(4), forced={"pipeline": 2}))
    assert list(plan.model.layer_kinds.values()) == ["0-7"]
    wider = [*layers[:5], Dense(elements=20_000_000, flops=2e12), *layers[6:7], Dense(flops=3e12)]
    said = other_model(plan, dataclasses.replace(graph(wider), fingerprint="another"))
    assert said.endswith("operators, shapes or dtypes of layer 5, layers.5 (and 1 more)")
    alike = dataclasses.replace(graph(layers), fingerprint="another")
    assert other_model(plan, alike) == "the layers are alike, and hand other values on"
    mixed = search(problem([Dense(), *layers, Dense()], cluster(4), forced={"pipeline": 2}))
    assert list(mixed.model.layer_kinds.values()) == ["0, 9", "1-8"]


@pytest.mark.parametrize(
    ("kinds", "field"),
    [
        ({"mine": "0-7"}, "model.layer_kinds.mine"),
        ({"0" * 12: "0-6"}, "model.layer_kinds"),
        ({"0" * 12: "0-7, 7"}, "model.layer_kinds"),
        ({"0" * 12: "0-9999999"}, "model.layer_kinds"),
        ({"0" * 12: "all"}, "model.layer_kinds"),
    ],
)
def test_kinds_that_are_not_of_each_layer_once_are_refused(kinds: dict[str, str], field: str) -> None:
    data = planned().to_dict()
    data["model"]["layer_kinds"] = kinds
    with pytest.raises(PlanFileError, match=f"field `{field}`: "):
        Plan.from_json(sealed(data))
