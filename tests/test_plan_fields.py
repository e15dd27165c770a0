"""Every field of a plan file, changed alone: reading refuses it, or it is one of those that nothing in the file speaks
of, which only the digest keeps."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autoplan.cluster import Cluster
from autoplan.errors import PlanFileError
from autoplan.plan import Plan
from autoplan.search import predict, search
from tests.search import test_context, test_expert, test_sequence
from tests.support.layer_graphs import Dense, problem
from tests.support.mixed import group, mixed
from tests.support.plans import sealed

Path = tuple[Any, ...]
LAYERS = [Dense(elements=20_000_000 + 100_000 * i, core=2**20, core_flops=1e9) for i in range(12)]
LARGE = [Dense(elements=1_200_000_000)] * 12

# What nothing else in a file speaks of, by its path, and why. The digest alone keeps these.
UNSAID = {
    "assumptions": "as each of them",
    "assumptions.*": "words: what was assumed for the user is told, and nothing follows from it",
    "case": "words: a reason; of it only what was forced is compared",
    "model.name": "what the user calls the model; another model is known by its fingerprint, when there is one",
    "model.layers.*": "another name is as good, if each is there once; the model's own are compared when it is there",
    "model.layer_kinds.*": "hashes of layers' graphs, which are not in the file; compared when the model is there",
    "model.layer_kinds": "as each of them: none is as good",
    "first_revision": "how old the plan is, is told to who reads it; what older files lack is then not asked",
    "model.trainable_parameters": "of experts: a rank has some of them, and how many of its parameters are is not said",
    "model.fingerprint": "of the graph, which is not in the file; compared when the model is there",
    "cluster.fingerprint": "of links and speeds as data sheets said them when the plan was made: they are corrected",
    "cluster.spec": "a cluster file's name, or the user's; what a data sheet names is compared with it",
    "cluster.device": "of a cluster file, or the user's: a name",
    "cluster.groups.*.memory_bytes": "as the cluster's",
    "cluster.memory_bytes": "of a cluster file's GPU, which is not in the plan; the stages must fit",
    "optimizer": "adam and adamw keep and do the same",
    "strategy.schedule": "one stage runs gpipe and 1f1b alike",
    "certificate.status": "on several kinds of GPUs a bound may be reached and not be known to be one",
    "certificate.confirmed": "how many candidates were simulated leaves no trace in the plan",
    "stages.*.hidden_s": "what transfers take beside computation: of links, which are not in the file",
    "stages.*.parameters": "a GPU of several stages counts what they tie once: a little less than their sum is legal",
    "crossings.*.value": "of links of several kinds of GPUs, whose rates are not in the file; those of one kind agree",
    "axes.*.times_per_step": "collectives of layers, which are not in the file; a multiple of the micro-batches",
    "axes.*.bytes_per_step": "bytes of layers' tensors, which are not in the file",
    "axes.*.link": "another link of the same cluster; of a cluster file they are not in the plan",
    "alternatives": "as each of them",
    "alternatives.*": "which families have a plan at all is the search's to say",
    "alternatives.*.why_not": "words after the pace or the bytes, which are compared",
    "alternatives.*.peak_memory_bytes": "of a plan whose stages are not in the file; it must fit",
    "alternatives.*.strategy.tensor": "a plan whose stages are not in the file: its family, batch and GPUs are checked",
    "alternatives.*.strategy.pipeline": "as the tensor degree",
    "alternatives.*.strategy.zero_stage": "as the tensor degree",
    "alternatives.*.strategy.schedule": "as the tensor degree",
    "alternatives.*.strategy.sequence_parallel": "as the tensor degree",
    "crossings": "as each of them",
    "crossings.*": "which links, and how much memory, were looked at is the search's to say",
    "crossings.*.step_time_s": "over slower links a plan takes longer than here: how much is not in the file",
    "forced": "limits and ranges that the plan keeps to force nothing",
    "forced.pipeline": "a range that is left out: as the limits",
    "forced.max_gpus": "any limit that the plan keeps to",
    "forced.memory_headroom": "any limit that the plan keeps to",
}


def forced(spec: str = "8xA100-80GB", layers: list[Dense] = LAYERS, **keys: object) -> Callable[[], Plan]:
    return lambda: search(problem(layers, Cluster.parse(spec), forced=keys))


KINDS: dict[str, Callable[[], Plan]] = {
    "free": lambda: search(problem(LARGE, Cluster.parse("2x4xA100-80GB"))),
    "data": forced(data=8, zero_stage=0),
    "ZeRO-3": forced(data=4, zero_stage=3, micro_batch_size=1),
    "pipeline": forced(data=2, pipeline=4, schedule="1f1b", zero_stage=2),
    "GPipe that recomputes": forced(pipeline=2, schedule="gpipe", recompute="full"),
    "interleaved": forced(pipeline=2, data=2, schedule="interleaved", virtual_stages=3),
    "zero bubble": forced(pipeline=4, schedule="zero_bubble"),
    "three axes": forced("2x4xH100", data=2, tensor=2, pipeline=2, zero_stage=1),
    "limits": forced(memory_headroom="10%", max_gpus=4, **{"pipeline": "<=2"}),
    "boundaries": forced(stages="0-3,4-11", schedule="1f1b"),
    "sequence": lambda: predict(
        test_sequence.question({"data": 1, "tensor": 4, "pipeline": 2, "sequence_parallel": True})
    ),
    "experts": lambda: predict(test_expert.problem(expert=8, zero_stage=1, data=16, tensor=1, pipeline=1)),
    "context": lambda: predict(test_context.problem(context=4, data=2, tensor=2, pipeline=1, zero_stage=1)),
    "several kinds": lambda: search(
        problem(LAYERS, mixed([group(2, name="fast"), group(2, speed=0.5, memory_gib=8.0, name="slow")]), heads=1)
    ),
    "frozen": lambda: search(
        problem([Dense(trainable=i > 5) for i in range(12)], Cluster.parse("4xL4"), forced={"data": 2, "pipeline": 2})
    ),
    "compiled": lambda: search(problem(LAYERS, Cluster.parse("8xH100"), compiled=True)),
}
NEARLY_ALL = ("free", "ZeRO-3", "three axes")


@functools.cache
def file_of(kind: str) -> str:
    return KINDS[kind]().to_json()


LEGAL: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16", "fp8"),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero_bubble"),
    "optimizer": ("adamw", "adam", "sgd", "adafactor"),
    "dtype": ("bf16", "fp32", "fp16"),
    "status": ("optimal", "feasible"),
    "zero_stage": (0, 1, 2, 3),
    "revision": (1, 5),
    "first_revision": (1, 4, 5),
}
# A byte of gigabytes is rounding to a sum of floats; a second of what is no bytes is not.
ROUNDING, SECONDS = 1e-6, 1e3


def leaves(value: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every place in a plan's data but the digest."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        if (*at, key) != ("digest",):
            yield (*at, key), part
            yield from leaves(part, (*at, key))


def others(key: str, value: Any) -> list[Any]:
    """Other values that ``value`` might have been."""
    found: list[Any] = list(LEGAL.get(key, ()))
    if isinstance(value, bool):
        found.append(not value)
    elif isinstance(value, int):
        found += [value * 2, value // 2, value + 1, 0]
    elif isinstance(value, float):
        found += [value * 2, value / 2, 0.0, *([value + 1] if value < SECONDS else [])]
    elif isinstance(value, str):
        found += [f"{value}x", "another", ""]
    elif value is None:
        found.append(1.0)
    return [other for other in found if other != value and not _rounded(other, value)]


def _rounded(one: Any, other: Any) -> bool:
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return numbers and other != 0 and abs(one - other) <= ROUNDING * abs(other)


def changes(text: str) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """The plan's data with one place changed: its path, how, and the data."""
    for path, value in leaves(json.loads(text)):

        def changed(change: Callable[[Any, Any], object], path: Path = path) -> dict[str, Any]:
            data: dict[str, Any] = json.loads(text)
            place: Any = data
            for key in path[:-1]:
                place = place[key]
            change(place, path[-1])
            return data

        name = next(key for key in reversed(path) if isinstance(key, str))
        for other in others(name, value):
            yield path, repr(other), changed(lambda place, key, other=other: place.__setitem__(key, other))
        if isinstance(path[-1], int):
            yield path, "dropped", changed(lambda place, key: place.pop(key))
            yield path, "twice", changed(lambda place, key: place.insert(key, place[key]))
        else:
            yield path, "left out", changed(lambda place, key: place.pop(key))
            yield path, "renamed", changed(lambda place, key: place.__setitem__(f"{key}_", place.pop(key)))
        if isinstance(value, list | dict) and value:
            yield path, "emptied", changed(lambda place, key, value=value: place.__setitem__(key, type(value)()))


def pattern(path: Path) -> str:
    named = ["*" if isinstance(key, int) else key for key in path]
    return ".".join("*" if above == "layer_kinds" else key for above, key in zip(["", *named], named, strict=False))


def accepted(kind: str) -> Iterator[tuple[Path, str]]:
    """The changes of a plan that reading takes, their digest made anew."""
    for path, how, data in changes(file_of(kind)):
        try:
            Plan.from_json(sealed(data), where="plan.json")
        except PlanFileError as error:
            assert "plan.json" in str(error) and error.attempt
        else:
            yield path, how


def check(kind: str) -> set[str]:
    found = [(path, how) for path, how in accepted(kind)]
    wrong = [f"{'.'.join(map(str, path))}: {how}" for path, how in found if pattern(path) not in UNSAID]
    assert not wrong, f"{len(wrong)} changes of a plan file are taken, such as {wrong[:5]}"
    return {pattern(path) for path, _ in found}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_search_makes_is_read(kind: str) -> None:
    plan = Plan.from_json(file_of(kind))
    assert plan.to_json() == file_of(kind)


@pytest.mark.parametrize("kind", NEARLY_ALL)
def test_a_field_that_is_changed_alone_is_refused(kind: str) -> None:
    check(kind)


@pytest.mark.wide
def test_every_field_of_every_kind_of_plan_is_refused_when_it_is_changed_alone() -> None:
    found = set().union(*(check(kind) for kind in KINDS))
    assert set(UNSAID) <= found, f"checked after all: {set(UNSAID) - found}"


@pytest.mark.parametrize("kind", ["ZeRO-3", "several kinds"])
def test_the_digest_keeps_all_of_it(kind: str) -> None:
    for path, how, data in changes(file_of(kind)):
        with pytest.raises(PlanFileError):
            Plan.from_json(json.dumps(data))
            pytest.fail(f"{path} {how}")


def test_a_tools_own_layout_is_no_change() -> None:
    """Keys in another order, no spaces, whole floats as whole numbers: as jq writes it."""
    data = json.loads(file_of("data"))
    data["cluster"]["memory_bytes"] = int(data["cluster"]["memory_bytes"])
    assert Plan.from_json(json.dumps(data, sort_keys=True)) == Plan.from_json(file_of("data"))


def test_a_file_without_its_digest_is_refused() -> None:
    data = json.loads(file_of("data"))
    del data["digest"]
    with pytest.raises(PlanFileError, match="`digest`: is not there"):
        Plan.from_json(json.dumps(data))


def test_an_older_file_is_none_with_a_digest() -> None:
    data = json.loads(file_of("data")) | {"revision": 4}
    with pytest.raises(PlanFileError, match="`revision`: 4, but files have a `digest` since revision 5"):
        Plan.from_json(sealed(data))


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("ZeRO-3", ("strategy", "zero_stage"), 1, "axes.0.splits"),
        ("pipeline", ("strategy", "zero_stage"), 1, "axes.1.splits"),
        ("interleaved", ("strategy", "schedule"), "gpipe", "strategy.schedule"),
        ("pipeline", ("strategy", "schedule"), "gpipe", "forced.schedule"),
        ("three axes", ("forced", "tensor"), 4, "forced.tensor"),
        ("data", ("optimizer",), "sgd", "stages.0.memory_terms.optimizer_state"),
        ("data", ("precision",), "fp32", "model.dtype"),
        ("data", ("predicted", "mfu"), 0.01, "predicted.mfu"),
        ("pipeline", ("predicted", "bubble_fraction"), 0.5, "predicted.bubble_fraction"),
        ("pipeline", ("predicted", "exposed_communication_s"), 0.0, "predicted.exposed_communication_s"),
        ("free", ("alternatives", 0, "short_by_bytes"), 1.0, "alternatives.0.short_by_bytes"),
        ("pipeline", ("stages", 1, "parameters"), 5, "stages.1.parameters"),
        ("data", ("model", "layers", 3), "layers.2", "model.layers.3"),
        ("three axes", ("strategy", "sequence_parallel"), True, "axes.2.splits"),
        ("limits", ("forced", "max_gpus"), 1, "forced.max_gpus"),
        ("boundaries", ("forced", "stages"), "0-4,5-11", "forced.stages"),
        ("limits", ("forced", "pipeline"), ">=4", "forced.pipeline"),
    ],
)
def test_the_field_that_contradicts_the_rest_is_named(kind: str, path: Path, value: Any, said: str) -> None:
    data = json.loads(file_of(kind))
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanFileError, match=rf"field `{said}`: ") as caught:
        Plan.from_json(sealed(data))
    assert "plan again" in caught.value.attempt
