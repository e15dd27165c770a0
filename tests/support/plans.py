"""Plans typed by hand, for tests that need a decision and not its reasons."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

from autoplan.capture import Capture
from autoplan.layers import LayerGraph
from autoplan.layers.types import Layer, LayerKind
from autoplan.plan import Certificate, ClusterSummary, ModelSummary, Plan, Predicted, Stage, Strategy
from autoplan.plan_file import REVISION, digest_of


def one_layer_a_node(capture: Capture) -> LayerGraph:
    """Every operator a layer of its own, so that a test can cut anywhere."""
    nodes = [node.name for node in capture.graph_module.graph.nodes if node.op == "call_function"]
    return LayerGraph(
        name=capture.name,
        layers=tuple(Layer(name=name, kind=0, nodes=(name,)) for name in nodes),
        kinds=(LayerKind(operators=()),),
        edges=(),
        tokens_per_sample=capture.tokens_per_sample,
        dtype="fp32",
        fingerprint="",
    )


def stage(first: int, last: int) -> Stage:
    return Stage(
        first_layer=first,
        last_layer=last,
        recompute={"none": last - first + 1},
        peak_memory_bytes=0.0,
        memory_terms={},
        forward_s=0.0,
        backward_s=0.0,
        parameters=0,
    )


def hand_plan(
    layers: LayerGraph, *, cuts: tuple[int, ...] | None = None, gpus: int | None = None, **strategy: Any
) -> Plan:
    """A plan of ``strategy``; stage s ends before layer ``cuts[s]``, evenly where not given."""
    degrees = Strategy(**strategy)
    count = len(layers.layers)
    stages = degrees.pipeline * degrees.virtual_stages
    if cuts is None:
        cuts = tuple(count * (s + 1) // stages for s in range(stages - 1))
    bounds = (0, *cuts, count)
    return Plan(
        gpus=gpus or degrees.gpus,
        gpus_used=degrees.gpus,
        global_batch=degrees.global_batch,
        precision="fp32",
        optimizer="adamw",
        model=ModelSummary(
            name=layers.name,
            parameters=0,
            trainable_parameters=0,
            tokens_per_sample=layers.tokens_per_sample,
            dtype="fp32",
            layers=tuple(layer.name for layer in layers.layers),
            fingerprint="",
        ),
        cluster=ClusterSummary(spec="cpu", device="cpu", nodes=1, gpus_per_node=degrees.gpus, memory_bytes=0.0),
        strategy=degrees,
        stages=tuple(stage(a, b - 1) for a, b in itertools.pairwise(bounds)),
        predicted=Predicted(
            step_time_s=0.0,
            tokens_per_s=0.0,
            model_tflops_per_gpu=0.0,
            mfu=0.0,
            peak_memory_bytes=0.0,
            bubble_fraction=0.0,
            exposed_communication_s=0.0,
            time_terms={},
        ),
        certificate=Certificate(
            status="feasible",
            lower_bound_s=0.0,
            gap=0.0,
            considered=0,
            pruned_by_memory=0,
            pruned_by_bound=0,
            solved=0,
            solver="hand",
        ),
        case="typed by hand",
        axes=(),
        alternatives=(),
        assumptions=(),
    )


def with_strategy(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, **changes))


def with_recompute(plan: Plan, *policies: str) -> Plan:
    """``plan`` with the layers' recompute policies given in turn, again from the first when they run out."""
    turns = itertools.cycle(policies)

    def changed(stage: Stage) -> Stage:
        layers = tuple(next(turns) for _ in range(stage.last_layer - stage.first_layer + 1))
        return dataclasses.replace(
            stage, recompute={policy: layers.count(policy) for policy in layers}, layer_recompute=layers
        )

    return dataclasses.replace(plan, stages=tuple(changed(stage) for stage in plan.stages))


def sealed(data: dict[str, Any]) -> str:
    """The text of a plan file of ``data``, whose digest is made anew: as if autoplan had written it so."""
    return json.dumps(data | {"digest": digest_of(data)})


def of_revision(data: dict[str, Any], revision: int) -> str:
    """The text of an older file, which has no digest and does not say what a GPU computes at most."""
    older = {name: value for name, value in data.items() if name not in ("digest", "first_revision")}
    cluster = {name: value for name, value in data["cluster"].items() if name != "peak_flops"}
    cluster["groups"] = [{k: v for k, v in group.items() if k != "peak_flops"} for group in cluster["groups"]]
    model = {name: value for name, value in data["model"].items() if name != "layer_kinds"}
    return json.dumps(older | {"revision": revision, "cluster": cluster, "model": model})


def stored_file(revision: int = REVISION) -> Path:
    """A plan's file as autoplan wrote it when ``revision`` was the newest."""
    return Path(__file__).parents[1] / "report" / "data" / f"plan-revision-{revision}.json"
