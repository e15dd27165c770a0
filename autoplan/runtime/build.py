"""The passes in order, for a rank: captured graph -> weighted loss -> local tensors -> own positions -> stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_aggregate

from autoplan.capture import Capture, retarget
from autoplan.cluster import Cluster
from autoplan.errors import StrategyError
from autoplan.layers import LayerGraph
from autoplan.layers.order import in_order_of
from autoplan.passes.context_parallel import context_parallel
from autoplan.passes.draw_apart import draw_apart
from autoplan.passes.expert_parallel import expert_parallel
from autoplan.passes.gather_parameters import gather_parameters
from autoplan.passes.recompute import recompute
from autoplan.passes.shard_tensors import shard_tensors
from autoplan.passes.split_backward import split_backward
from autoplan.passes.split_stages import StageGraph, split_stages
from autoplan.passes.weight_loss import weight_loss
from autoplan.plan import Plan, Strategy
from autoplan.schedules import (
    CHUNKED,
    SCHEDULES,
    Actions,
    all_actions,
    first_forward_problem,
    first_problem,
    forward_actions,
    rank_of_stage,
)
from autoplan.sharding import Placement, Shard, Sharding, shard_model, take_shard

ZERO_STAGES = (0, 1, 2, 3)
POLICIES = ("none", "selective", "full")
STACKED = Shard(0)  # how the expert axis splits weights [experts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGraphs:
    """All stages as the ranks of one tensor coordinate run them. ``weights`` counts the loss's weights of a part of
    the batch, None where the batch is never split; ``placements`` of parameters over the tensor axis, by name;
    ``experts``: those that hold a run of experts on each rank of the expert axis. ``adds``: for each stage, by kind
    of backward action, the parameters (as its graph names them) to which it adds gradients."""

    stages: tuple[StageGraph, ...]
    adds: tuple[dict[str, frozenset[str]], ...] = ()
    weights: GraphModule | None
    placements: dict[str, Placement]
    experts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Stages with their collectives; ``origin`` names, for inserted nodes, the node beside which each belongs."""

    graphs: RankGraphs
    origin: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Which pipeline ranks hold which parameter. Names are the first of each tied group, in the user's order."""

    canonical: dict[str, str]  # any name -> the first of its tied group
    holders: dict[str, tuple[int, ...]]

    @property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters held by several pipeline ranks."""
        return {name: ranks for name, ranks in self.holders.items() if len(ranks) > 1}


def check_executable(capture: Capture, plan: Plan) -> None:
    """Raise StrategyError for what the runtime cannot execute exactly."""
    strategy = plan.strategy
    if strategy.expert > 1 and strategy.zero_stage == 3:
        raise StrategyError(
            f"expert = {strategy.expert} with zero_stage = 3 cannot be executed",
            where="strategy.zero_stage",
            legal="0, 1, 2 beside an expert axis",
        )
    if strategy.zero_stage not in ZERO_STAGES:
        raise StrategyError(
            f"zero_stage = {strategy.zero_stage} cannot be executed",
            where="strategy.zero_stage",
            legal=", ".join(map(str, ZERO_STAGES)),
        )
    if strategy.schedule not in SCHEDULES:
        raise StrategyError(f"schedule {strategy.schedule!r} cannot be executed", legal=", ".join(SCHEDULES))
    if strategy.virtual_stages > 1 and strategy.schedule not in CHUNKED:
        raise StrategyError(
            f"virtual_stages = {strategy.virtual_stages} cannot be executed under schedule {strategy.schedule!r}",
            where="strategy.virtual_stages",
            legal=f"1, or schedule {', '.join(CHUNKED)}",
        )
    if is_split(plan) and capture.couplings:
        first = capture.couplings[0]
        raise StrategyError(
            f"`{first.operator}` makes samples of a batch meet ({first.reason}), and the plan splits the batch",
            where=first.where,
            legal="data = 1 with one micro-batch and context = 1",
            attempt='strategy={"data": 1, "micro_batch_size": <the whole batch>}',
        )


def layer_policies(plan: Plan) -> tuple[str, ...]:
    """The recompute policy of every layer. Raises StrategyError where the plan leaves it open or names another."""
    found: list[str] = []
    for index, stage in enumerate(plan.stages):
        layers = stage.last_layer - stage.first_layer + 1
        used = [policy for policy, count in stage.recompute.items() if count]
        policies = stage.layer_recompute or tuple(used) * layers
        if len(policies) != layers or not set(policies) <= set(POLICIES):
            raise StrategyError(
                f"stage {index} has {layers} layers and recomputes {', '.join(policies)}",
                where=f"stages.{index}.layer_recompute",
                legal=f"one of {', '.join(POLICIES)} for each layer",
                attempt="plan again for this model",
            )
        found.extend(policies)
    return tuple(found)


def recompute_groups(plan: Plan, layers: LayerGraph) -> tuple[frozenset[str], ...]:
    """The nodes of each layer that run again in the backward: all, its attention core, or none."""
    groups = []
    layers = in_order_of(layers, plan.model.layers)
    for layer, policy in zip(layers.layers, layer_policies(plan), strict=True):
        nodes = layer.nodes if policy == "full" else ()
        if policy == "selective":
            operators = layers.kinds[layer.kind].operators
            nodes = tuple(name for name, op in zip(layer.nodes, operators, strict=True) if op.core)
        groups.append(frozenset(nodes))
    return tuple(groups)


@functools.lru_cache(maxsize=16)
def proven_actions(schedule: str, pipeline: int, virtual_stages: int, micro_batches: int) -> tuple[Actions, ...]:
    """The action list of every pipeline rank. Raises StrategyError where the lists are no whole step, or would hang."""
    lists = all_actions(
        schedule, stages=pipeline * virtual_stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    problem = first_problem(lists)
    if problem is not None:
        raise StrategyError(
            f"schedule {schedule!r} of {micro_batches} micro-batches on {pipeline} ranks: {problem}",
            where="strategy.schedule",
            legal=", ".join(SCHEDULES),
        )
    return lists


@functools.lru_cache(maxsize=16)
def proven_forwards(pipeline: int, virtual_stages: int, micro_batches: int) -> tuple[Actions, ...]:
    """The lists of an evaluation, likewise."""
    lists = forward_actions(
        stages=pipeline * virtual_stages, micro_batches=micro_batches, virtual_stages=virtual_stages
    )
    problem = first_forward_problem(lists)
    if problem is not None:
        raise StrategyError(f"an evaluation of {micro_batches} micro-batches on {pipeline} ranks: {problem}")
    return lists


def is_gathered(strategy: Strategy) -> bool:
    """Whether parameters are slices that are made whole a layer at a time."""
    return strategy.zero_stage == 3 and strategy.data > 1


def is_split(plan: Plan) -> bool:
    """Whether a step computes the loss in several parts."""
    return plan.strategy.data > 1 or plan.strategy.micro_batches > 1 or plan.strategy.context > 1


class Builder:
    """Runs the passes once a tensor coordinate and keeps the results."""

    def __init__(
        self, capture: Capture, plan: Plan, layers: LayerGraph, cluster: Cluster | None, sharding: Sharding | None
    ) -> None:
        self._capture, self._plan, self._layers = capture, plan, layers
        self._cluster, self._sharding = cluster, sharding
        self._built: dict[int, RankGraphs] = {}
        first: dict[int, str] = {}
        self.canonical = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in capture.graph_module.named_parameters(remove_duplicate=False)
        }

    def graphs(self, tensor_rank: int) -> RankGraphs:
        if tensor_rank not in self._built:
            self._built[tensor_rank] = self._build(tensor_rank)
        return self._built[tensor_rank]

    def _build(self, tensor_rank: int) -> RankGraphs:
        cut = self.cut(tensor_rank)
        stages, adds = [], []
        for stage in cut.graphs.stages:
            each: dict[str, frozenset[str]] = {"B": frozenset(stage.parameters)}
            if self._plan.strategy.schedule == "zero_bubble":
                parts = split_backward(stage)
                stage, each = parts.stage, {"I": parts.first, "W": parts.second}
            stages.append(self._save_memory(stage, cut.origin))
            adds.append(each)
        return dataclasses.replace(cut.graphs, stages=tuple(stages), adds=tuple(adds))

    def cut(self, tensor_rank: int) -> Cut:
        """The stages before anything is written into them that saves memory: as they are emitted."""
        graph_module, weights = self._capture.graph_module, None
        if is_split(self._plan):
            weighted = weight_loss(self._capture)
            graph_module, weights = weighted.graph_module, weighted.weights
        placements: dict[str, Placement] = {}
        stage = stage_of_node(self._plan, self._layers)
        origin: dict[str, str] = {}
        if self._plan.strategy.tensor > 1:
            sharded = shard_tensors(graph_module, self._whole_sharding(), rank=tensor_rank)
            graph_module = draw_apart(sharded.graph_module, graph_module)
            placements = self._canonical_placements(sharded.parameters)
            stage |= {name: stage[origin] for name, origin in sharded.origin.items() if origin in stage}
            origin = sharded.origin
        experts: frozenset[str] = frozenset()
        if self._plan.strategy.expert > 1:
            spread = expert_parallel(graph_module, degree=self._plan.strategy.expert)
            graph_module, experts = spread.graph_module, self._experts(spread.parameters, placements)
            stage |= {name: stage[beside] for name, beside in spread.origin.items() if beside in stage}
            origin = {**origin, **spread.origin}
        if self._plan.strategy.context > 1:
            graph_module, added = self._over_context(graph_module)
            stage |= {name: stage[beside] for name, beside in added.items() if beside in stage}
            origin = {**origin, **added}
        stages = split_stages(graph_module, stage)
        if len(stages) != len(self._plan.stages):
            raise StrategyError(
                f"the plan has {len(self._plan.stages)} stages and the graph was cut into {len(stages)}",
                attempt="plan again for this model",
            )
        graphs = RankGraphs(stages=stages, weights=weights, placements=placements, experts=experts)
        return Cut(graphs=graphs, origin=dict(origin))

    def _experts(self, names: frozenset[str], placements: Mapping[str, Placement]) -> frozenset[str]:
        """By the first of each tied group's names. What the tensor axis splits already is refused."""
        found = frozenset(self.canonical[name] for name in names)
        twice = [name for name in sorted(found) if isinstance(placements.get(name), Shard)]
        if twice:
            raise StrategyError(
                f"the tensor axis splits `{twice[0]}` already, and the expert axis would split it again",
                where="strategy.expert",
                legal="tensor = 1 beside an expert axis",
            )
        return found

    def _over_context(self, graph_module: GraphModule) -> tuple[GraphModule, dict[str, str]]:
        """The graph on a rank's positions, and beside which node each inserted one belongs."""
        layer_of = {name: index for index, layer in enumerate(self._layers.layers) for name in layer.nodes}
        dealt = context_parallel(
            graph_module, self._capture.inputs, degree=self._plan.strategy.context, layer_of=layer_of
        )
        return draw_apart(dealt.graph_module, graph_module, axis="context"), dealt.origin

    def _save_memory(self, stage: StageGraph, origin: Mapping[str, str]) -> StageGraph:
        """ZeRO-3's gathers, and recompute around them. ``origin``: beside which node each inserted one belongs."""
        origin = dict(origin)
        if is_gathered(self._plan.strategy):
            layers = [_with_inserted(frozenset(layer.nodes), origin) for layer in self._layers.layers]
            gathered = gather_parameters(stage, layers)
            stage = gathered.stage
            origin |= {name: origin.get(beside, beside) for name, beside in gathered.origin.items()}
        groups = recompute_groups(self._plan, self._layers)
        return recompute(stage, [_with_inserted(group, origin) for group in groups if group])

    def _canonical_placements(self, placements: Mapping[str, Placement]) -> dict[str, Placement]:
        """By the first of each tied group's names. Tied names are one tensor, so they must be placed alike."""
        found: dict[str, Placement] = {}
        for name, placement in placements.items():
            first = self.canonical[name]
            if type(found.setdefault(first, placement)) is not type(placement):
                raise StrategyError(
                    f"`{name}` and `{first}` are one parameter, placed {placement} and {found[first]}",
                    attempt="untie them, or plan without tensor parallelism",
                )
        return found

    def _whole_sharding(self) -> Sharding:
        if self._sharding is None:
            if self._cluster is None:
                raise StrategyError("tensor parallelism needs the cluster (or a sharding) that it was planned for")
            strategy = self._plan.strategy
            self._sharding = shard_model(
                self._capture,
                self._layers,
                degree=strategy.tensor,
                cluster=self._cluster,
                sequence=strategy.sequence_parallel,
            )
        return self._sharding

    def ownership(self) -> Ownership:
        """From the stages of tensor coordinate 0: all coordinates have the same names."""
        canonical = self.canonical
        holders: dict[str, set[int]] = {name: set() for name in canonical.values()}
        for stage in self.graphs(0).stages:
            for name in stage.parameters:
                holders[canonical[name]].add(rank_of_stage(stage.index, ranks=self._plan.strategy.pipeline))
        # A parameter that the loss does not depend on rides along on rank 0, untouched, as in the single process.
        return Ownership(canonical=canonical, holders={n: tuple(sorted(s or {0})) for n, s in holders.items()})


def _with_inserted(group: frozenset[str], origin: Mapping[str, str]) -> frozenset[str]:
    """The group and what a pass put in beside its nodes."""
    return group | {name for name, beside in origin.items() if beside in group}


def stage_of_node(plan: Plan, layers: LayerGraph) -> dict[str, int]:
    """The stage of each node of the layers. Raises StrategyError where the plan does not cover the layers in order."""
    expected = 0
    stages: dict[str, int] = {}
    layers = in_order_of(layers, plan.model.layers)  # a plan of branches has its own order of them
    for index, stage in enumerate(plan.stages):
        if stage.first_layer != expected or stage.last_layer < stage.first_layer:
            raise StrategyError(
                f"stage {index} starts at layer {stage.first_layer}, and layer {expected} is next",
                where=f"stages.{index}",
                legal="stages that cover the layers in order",
                attempt="plan again for this model",
            )
        for layer in layers.layers[stage.first_layer : stage.last_layer + 1]:
            stages.update(dict.fromkeys(layer.nodes, index))
        expected = stage.last_layer + 1
    if expected != len(layers.layers):
        raise StrategyError(
            f"the plan places {expected} layers and the model has {len(layers.layers)}",
            where="stages",
            attempt="plan again for this model",
        )
    return stages


def local_parameters(
    capture: Capture,
    graphs: RankGraphs,
    ownership: Ownership,
    *,
    holder: int,
    tensor_rank: int,
    degree: int,
    expert_rank: int = 0,
    expert_degree: int = 1,
    device: torch.device | None,
) -> dict[str, nn.Parameter]:
    """Parameters of pipeline rank ``holder`` by the user's names: the user's own objects where they are whole and on
    ``device`` (None: wherever they are)."""
    local: dict[str, nn.Parameter] = {}
    for name, whole in capture.graph_module.named_parameters():
        if holder not in ownership.holders[name]:
            continue
        placement = graphs.placements.get(name)
        if name in graphs.experts:
            share = take_shard(whole, STACKED, index=expert_rank, degree=expert_degree)
            local[name] = _parameter(_placed(share, device), whole)
        elif isinstance(placement, Shard):
            shard = take_shard(whole, placement, index=tensor_rank, degree=degree)
            local[name] = _parameter(_placed(shard, device), whole)
        elif device in (None, whole.device):
            local[name] = whole
        else:
            local[name] = _parameter(_placed(whole.detach(), device), whole)
    return local


def _placed(values: Tensor, device: torch.device | None) -> Tensor:
    """On ``device``; memory for them, where they are on meta and have no values yet."""
    if values.is_meta and device is not None:
        return torch.empty_like(values, device=device)
    return values.to(device or values.device)


def _parameter(values: Tensor, whole: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=whole.requires_grad)


def install(
    stage: StageGraph, ownership: Ownership, parameters: Mapping[str, nn.Parameter], device: torch.device
) -> StageGraph:
    """The stage with this rank's parameters in its graph, its buffers and constants on ``device``."""
    module = stage.graph_module
    for name in stage.parameters:
        _set(module, name, parameters[ownership.canonical[name]])
    for name in stage.buffers:
        value = module.get_buffer(name)
        if value.device != device:
            _set(module, name, value.to(device))
    return dataclasses.replace(stage, graph_module=on_device(module, device))


def on_device(module: GraphModule, device: torch.device) -> GraphModule:
    """Let devices baked into the graph (arange, full) be ``device``; in place."""
    if device.type != "cpu":
        for inner in module.modules():
            if isinstance(inner, GraphModule):
                for node in inner.graph.nodes:
                    node.args = map_aggregate(node.args, lambda a: device if isinstance(a, torch.device) else a)
                    node.kwargs = map_aggregate(node.kwargs, lambda a: device if isinstance(a, torch.device) else a)
                inner.recompile()
    return retarget(module, device)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, value)
