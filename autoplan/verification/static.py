"""What can be proven of a plan's program from its graphs alone, at any number of ranks.

The passes run as they would for the runtime, once: ranks of one pipeline stage run one graph, whatever their data and
tensor coordinates, so a program for 16,384 ranks has as many distinct graphs as it has stages. Checked are placements
(:mod:`autoplan.passes.lint`), that the stages together are the whole graph, that messages between stages meet, that
every parameter has an owner, and that the memory planned for each rank is there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.fx import GraphModule, Node

from autoplan.capture import Capture
from autoplan.capture.errors import node_line
from autoplan.cluster import Cluster
from autoplan.errors import AutoplanError
from autoplan.explain.text import size
from autoplan.layers import LayerGraph
from autoplan.passes import lint, split_stages, weight_loss
from autoplan.passes import shard_tensors as sharding_pass
from autoplan.passes.context_parallel import context_parallel
from autoplan.passes.expert_parallel import expert_parallel
from autoplan.passes.split_stages import StageGraph
from autoplan.plan import Plan
from autoplan.runtime.build import is_split, proven_actions, stage_of_node
from autoplan.schedules import rank_of_stage
from autoplan.sharding import Placement, Shard, Sharding, shard_model
from autoplan.verification import messages
from autoplan.verification.types import Check

BYTES_OF_ROUNDING = 1e-6  # memory terms are sums of floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The distinct graphs of a plan: before and after the split over the tensor axis, then with a rank's experts and on
    its positions where there are such axes (``running``), and by stage. ``experts``: parameters whose experts are
    spread; ``positions``: how values lie over the context axis, by node."""

    whole: GraphModule
    sharded: GraphModule
    running: GraphModule
    placements: Mapping[str, Placement]
    stages: tuple[StageGraph, ...]
    sharding: Sharding | None
    experts: frozenset[str] = frozenset()
    positions: Mapping[str, Placement] = field(default_factory=dict)


def check_static(
    capture: Capture, layers: LayerGraph, plan: Plan, cluster: Cluster
) -> tuple[tuple[Check, ...], Programs | None]:
    """All checks, and the graphs where the passes made them. What a pass or the linter refuses is a failed check."""
    try:
        programs = build_programs(capture, layers, plan, cluster)
    except AutoplanError as error:
        return (Check(name="placements", ok=False, detail=error.what, where=error.where),), None
    layer_of = {name: layer.name for layer in layers.layers for name in layer.nodes}
    checks = (
        _guarded("placements", lambda: _placements(programs, plan, layer_of)),
        _guarded("stages", lambda: _stages(programs, layer_of)),
        _guarded("messages", lambda: _messages(programs.stages, plan)),
        _guarded("parameters", lambda: _parameters(capture, programs, plan)),
        _guarded("memory", lambda: _memory(plan)),
    )
    return checks, programs


def build_programs(capture: Capture, layers: LayerGraph, plan: Plan, cluster: Cluster) -> Programs:
    """The passes in the runtime's order."""
    whole = weight_loss.weight_loss(capture).graph_module if is_split(plan) else capture.graph_module
    stage = stage_of_node(plan, layers)
    sharded, placements, sharding = whole, {}, None
    if plan.strategy.tensor > 1:
        strategy = plan.strategy
        sharding = shard_model(
            capture, layers, degree=strategy.tensor, cluster=cluster, sequence=strategy.sequence_parallel
        )
        written = sharding_pass.shard_tensors(whole, sharding)
        sharded, placements = written.graph_module, written.parameters
        stage |= {name: stage[origin] for name, origin in written.origin.items() if origin in stage}
    running, experts, positions = sharded, frozenset[str](), dict[str, Placement]()
    if plan.strategy.expert > 1:
        spread = expert_parallel(sharded, degree=plan.strategy.expert)
        running, experts = spread.graph_module, spread.parameters
        stage |= {name: stage[origin] for name, origin in spread.origin.items() if origin in stage}
    if plan.strategy.context > 1:
        layer_of = {name: index for index, layer in enumerate(layers.layers) for name in layer.nodes}
        dealt = context_parallel(running, capture.inputs, degree=plan.strategy.context, layer_of=layer_of)
        running, positions = dealt.graph_module, dealt.placements
        stage |= {name: stage[origin] for name, origin in dealt.origin.items() if origin in stage}
    stages = split_stages.split_stages(running, stage)
    return Programs(
        whole=whole,
        sharded=sharded,
        running=running,
        placements=placements,
        stages=stages,
        sharding=sharding,
        experts=experts,
        positions=positions,
    )


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except AutoplanError as error:
        return Check(name=name, ok=False, detail=error.what, where=error.where)


def _placements(programs: Programs, plan: Plan, layer_of: Mapping[str, str]) -> Check:
    degree = plan.strategy.tensor
    if degree == 1:
        return Check(name="placements", ok=True, detail="every rank of a stage holds whole tensors")
    try:
        placed = lint.check_placements(programs.sharded, programs.whole, programs.placements, degree=degree)
    except AutoplanError as error:
        layer = next((layer_of[n] for n in _quoted(error.what) if n in layer_of), "")
        return Check(name="placements", ok=False, detail=error.what, where=error.where, layer=layer)
    split = sum(isinstance(state, Shard) for state in placed.values())
    return Check(name="placements", ok=True, detail=f"{len(placed):,} values followed, {split:,} split over {degree}")


def _quoted(text: str) -> list[str]:
    return text.split("`")[1::2]


# ----------------------------------------------------------------------------------------------------------- stages


def _stages(programs: Programs, layer_of: Mapping[str, str]) -> Check:
    """Each stage runs the whole graph's own operators on the same arguments, and hands on what it says."""
    original = {node.name: node for node in programs.running.graph.nodes}
    operators = 0
    for stage in programs.stages:
        problem, node = _unfaithful(stage, original)
        if problem:
            beside = original.get(node.name) if node is not None else None
            return Check(
                name="stages",
                ok=False,
                detail=f"stage {stage.index}: {problem}",
                layer=layer_of.get(node.name, "") if node is not None else "",
                where=node_line(beside) if beside is not None else "",
            )
        operators += sum(node.op == "call_function" for node in stage.graph_module.graph.nodes)
    return Check(name="stages", ok=True, detail=f"{operators:,} operators of {len(programs.stages)} stages as written")


def _unfaithful(stage: StageGraph, original: Mapping[str, Node]) -> tuple[str, Node | None]:
    graph = stage.graph_module.graph
    taken = [node.name for node in graph.nodes if node.op == "placeholder"]
    wanted = [*stage.batch_inputs, *(value.name for value in stage.receives)]
    if taken != wanted:
        return f"takes {', '.join(taken)} where it is given {', '.join(wanted)}", None
    for node in graph.nodes:
        beside = original.get(node.name)
        if node.op != "call_function" or beside is None or beside.op != "call_function":
            continue
        if node.target != beside.target:
            return f"`{node.name}` runs {node.target} for {beside.target}", node
        read, meant = _reads(node), _reads(beside)
        if len(read) == len(meant) and read != meant:
            return f"`{node.name}` reads {', '.join(read)} for {', '.join(meant)}", node
    (results,) = graph.output_node().args
    assert isinstance(results, tuple)
    for value, result in zip(stage.sends, results, strict=False):
        if not isinstance(result, Node) or _source(result) != value.name:
            return f"sends `{getattr(result, 'name', result)}` as `{value.name}`", original.get(value.name)
    return "", None


def _reads(node: Node) -> list[str]:
    """Names of the tensors that a node reads, copies looked through; sizes come from elsewhere in a stage."""
    return [_source(child) for child in node.all_input_nodes if hasattr(child.meta.get("val"), "shape")]


def _source(node: Node) -> str:
    """A received value that is written in place is copied first: the copy stands for it."""
    if "clone" in node.name and node.op == "call_function" and node.all_input_nodes[0].op == "placeholder":
        return node.all_input_nodes[0].name
    return node.name


# --------------------------------------------------------------------------------------------------------- messages


def _messages(stages: tuple[StageGraph, ...], plan: Plan) -> Check:
    strategy = plan.strategy
    if len(stages) == 1:
        return Check(name="messages", ok=True, detail="one stage sends nothing")
    for stage in stages:
        for value in stage.sends:
            for reader in value.destinations:
                if value not in stages[reader].receives:
                    return Check(
                        name="messages",
                        ok=False,
                        detail=f"stage {stage.index} sends `{value.name}` to stage {reader}, which expects none such",
                    )
    actions = proven_actions(strategy.schedule, strategy.pipeline, strategy.virtual_stages, strategy.micro_batches)
    found = messages.match([messages.rank_events(stages, own) for own in actions])
    if found.problems:
        return Check(name="messages", ok=False, detail="; ".join(found.problems[:3]))
    pipelines = strategy.data * strategy.tensor
    return Check(
        name="messages",
        ok=True,
        detail=f"{found.messages:,} messages meet in each of {pipelines:,} pipelines, in the order of every edge",
    )


# ------------------------------------------------------------------------------------------------------- parameters


def _parameters(capture: Capture, programs: Programs, plan: Plan) -> Check:
    """Every parameter is read in one stage, or in several that all say so; shards of it cover it once."""
    degree = plan.strategy.tensor
    objects = dict(capture.graph_module.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in objects.items():
        first.setdefault(id(parameter), name)
    readers: dict[str, set[int]] = defaultdict(set)
    declared: dict[str, set[int]] = defaultdict(set)
    for stage in programs.stages:
        for node in stage.graph_module.graph.nodes:
            if node.op == "get_attr" and (read := objects.get(str(node.target))) is not None:
                readers[first[id(read)]].add(stage.index)
                if str(node.target) in stage.shared_parameters:
                    declared[first[id(read)]].add(stage.index)
                if str(node.target) not in stage.parameters:
                    return _bad_parameter(str(node.target), f"stage {stage.index} reads it and does not hold it")
    for name, stages in readers.items():
        if len(stages) > 1 and declared[name] != stages:
            lacks = ", ".join(map(str, sorted(stages - declared[name])))
            return _bad_parameter(name, f"stages {sorted(stages)} hold it, and stage {lacks} takes it for its own")
    for name, placement in programs.placements.items():
        whole = objects[name]
        if isinstance(placement, Shard) and not placement.divides(whole.shape[placement.dim], degree):
            return _bad_parameter(name, f"{placement} of {tuple(whole.shape)} does not divide over {degree} ranks")
        canonical = first[id(whole)]
        if programs.placements.get(canonical, placement) != placement:
            return _bad_parameter(name, f"tied to `{canonical}` and placed {placement}")
    problem = _count_problem(programs, plan, objects, first, readers)
    if problem:
        return Check(name="parameters", ok=False, detail=problem)
    shared = sum(len(stages) > 1 for stages in readers.values())
    unread = len(first) - len(readers)
    text = f"{len(first):,} parameters, each in one stage" + (f" but {shared} shared between stages" if shared else "")
    return Check(name="parameters", ok=True, detail=text + (f"; {unread} that nothing reads" if unread else ""))


def _bad_parameter(name: str, problem: str) -> Check:
    return Check(name="parameters", ok=False, detail=f"`{name}`: {problem}", layer=name.rpartition(".")[0])


def _count_problem(
    programs: Programs,
    plan: Plan,
    objects: Mapping[str, nn.Parameter],
    first: Mapping[int, str],
    readers: Mapping[str, set[int]],
) -> str:
    """Elements that each stage's graph reads on one rank, against the plan's own count of them."""
    placements = {first[id(objects[name])]: placement for name, placement in programs.placements.items()}
    experts = {first[id(objects[name])] for name in programs.experts}
    for index, stage in enumerate(plan.stages):
        held = 0
        for name, stages in readers.items():
            if index in stages:
                share = plan.strategy.tensor if isinstance(placements.get(name), Shard) else 1
                share *= plan.strategy.expert if name in experts else 1
                held += objects[name].numel() // share
        if stage.parameters and held != stage.parameters:
            return f"stage {index} holds {held:,} elements a rank, and the plan says {stage.parameters:,}"
    return ""


# ----------------------------------------------------------------------------------------------------------- memory


def _memory(plan: Plan) -> Check:
    """The planned peak of each stage's ranks: the sum of its terms, and within the device."""
    if not plan.cluster.memory_bytes:
        return Check(name="memory", ok=True, detail="the cluster states no capacity")
    for index, stage in enumerate(plan.stages):
        capacity = plan.cluster.memory_of(stage)
        total = sum(stage.memory_terms.values())
        if not math.isclose(total, stage.peak_memory_bytes, rel_tol=BYTES_OF_ROUNDING):
            text = f"stage {index}: terms of {size(total)} for a peak of {size(stage.peak_memory_bytes)}"
            return Check(name="memory", ok=False, detail=text)
        if stage.peak_memory_bytes > capacity:
            per = plan.strategy.gpus // plan.strategy.pipeline
            holder = rank_of_stage(index, ranks=plan.strategy.pipeline)
            text = (
                f"ranks {holder * per} to {(holder + 1) * per - 1} (stage {index}) need "
                f"{size(stage.peak_memory_bytes)} of {size(capacity)}"
            )
            return Check(name="memory", ok=False, detail=text)
    fullest = max(plan.stages, key=lambda stage: stage.peak_memory_bytes / plan.cluster.memory_of(stage))
    used, capacity = fullest.peak_memory_bytes, plan.cluster.memory_of(fullest)
    return Check(
        name="memory", ok=True, detail=f"{plan.strategy.gpus:,} ranks, at most {size(used)} of {size(capacity)}"
    )
