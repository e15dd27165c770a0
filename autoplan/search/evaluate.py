"""What a decision costs, exactly: each stage priced by the cost models, the whole timed by the schedule simulator.

Nothing of the search's tables is used but the recompute choice, so that what is reported is recomputed from the plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoplan import schedules
from autoplan.cost_models import communication
from autoplan.cost_models.data_parallel import DataParallelTime
from autoplan.cost_models.memory import count_elements, stage_memory
from autoplan.cost_models.precision import product_dtype
from autoplan.layers.types import LayerGraph, LayerKind
from autoplan.plan import Predicted, Stage, Strategy
from autoplan.search import listed
from autoplan.search.space import Space
from autoplan.search.tables import Tables
from autoplan.search.timing import StageTimes, brief_step_s
from autoplan.search.timing import step_s as whole_step_s

_TIME_TERMS = (
    *("forward", "backward", "recompute", "tensor_communication", "sharded_state"),
    *("gradient_synchronisation", "optimizer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """One stage of a decision. Times are of one micro-batch, but for ``tail_s`` (``synchronise_s`` + ``optimizer_s``),
    which comes once a step. Of what layers do again, ``recompute_s`` are operators and ``tensor_again_s`` the
    collectives between them."""

    first: int
    end: int
    policies: tuple[str, ...]
    kinds: tuple[LayerKind, ...]
    memory_terms: dict[str, float]
    parameters: int
    compute_forward_s: float
    compute_backward_s: float
    recompute_s: float
    tensor_forward_s: float
    tensor_backward_s: float
    tensor_again_s: float
    data: DataParallelTime
    tied_s: float
    optimizer_s: float

    @property
    def forward_s(self) -> float:
        return self.compute_forward_s + self.tensor_forward_s + self.data.forward_s

    @property
    def backward_s(self) -> float:
        return self.compute_backward_s + self.again_s + self.tensor_backward_s + self.data.backward_s

    @property
    def again_s(self) -> float:
        """What a backward does of the forward again."""
        return self.recompute_s + self.tensor_again_s

    @property
    def tensor_s(self) -> float:
        """All collectives inside of layers, forward and backward."""
        return self.tensor_forward_s + self.tensor_backward_s + self.tensor_again_s

    @property
    def forward_terms(self) -> dict[str, float]:
        """What :attr:`forward_s` is made of, by the names of the step's terms."""
        return {
            "forward": self.compute_forward_s,
            "tensor_communication": self.tensor_forward_s,
            "sharded_state": self.data.forward_s,
        }

    @property
    def backward_terms(self) -> dict[str, float]:
        """What :attr:`backward_s` is made of."""
        return {
            "backward": self.compute_backward_s,
            "recompute": self.recompute_s,
            "tensor_communication": self.tensor_backward_s + self.tensor_again_s,
            "sharded_state": self.data.backward_s,
        }

    @property
    def period_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def synchronise_s(self) -> float:
        return self.data.step_s + self.tied_s

    @property
    def tail_s(self) -> float:
        return self.synchronise_s + self.optimizer_s

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_terms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A decision, priced: ``objective_s`` is what the search minimises (:attr:`StageTimes.objective_s`), ``step_s`` the
    simulated step."""

    strategy: Strategy
    stages: tuple[StageCosts, ...]
    sends_s: tuple[float, ...]
    objective_s: float
    step_s: float
    bubble_fraction: float
    times: StageTimes | None = None

    @property
    def busiest(self) -> tuple[StageCosts, ...]:
        """The stages of the rank with the longest period."""
        ranks = self.strategy.pipeline
        each = [self.stages[rank::ranks] for rank in range(ranks)]
        return max(each, key=lambda stages: sum(stage.period_s for stage in stages))

    @property
    def bottleneck(self) -> StageCosts:
        """The stage with the longest period; the first of equals."""
        return max(self.stages, key=lambda stage: stage.period_s)

    @property
    def peak_bytes(self) -> float:
        return max(stage.peak_bytes for stage in self.stages)


StepTime = Callable[[StageTimes], float]


def evaluate_decision(
    space: Space, strategy: Strategy, cuts: tuple[int, ...], *, step_s: StepTime = whole_step_s
) -> Evaluation:
    """Price ``strategy`` with stages at ``cuts``, with the least recompute that fits; ``step_s`` times the step.

    Raises :class:`ValueError` where an interleaved or zero-bubble strategy fits under no policy.
    """
    if listed.is_listed(strategy):
        memories = listed.rank_memories(space, strategy, cuts)
        if memories is None:
            raise ValueError(f"{strategy.describe()} does not fit at {cuts}")
        return evaluate_listed(space, strategy, cuts, memories, step_s=step_s)
    tables = space.tables(strategy).of_split(cuts)
    return evaluate_stages(tables, space, cuts, tables.split_policies(), step_s=step_s)


def evaluate_stages(
    tables: Tables,
    space: Space,
    cuts: tuple[int, ...],
    policies: Sequence[tuple[str, ...]],
    *,
    step_s: StepTime = whole_step_s,
) -> Evaluation:
    """Price stages at ``cuts`` whose layers follow ``policies``, each stage's in turn."""
    strategy = tables.strategy
    stages = tuple(
        stage_costs(space, tables, stage, first, end, policies[stage])
        for stage, (first, end) in enumerate(itertools.pairwise(cuts))
    )
    split = tables.of_split(cuts)
    sends = split.receives_s()
    times = stage_times(strategy, stages, sends, split.sent_s())
    return timed(strategy, stages, sends, times, step_s=step_s)


def timed(
    strategy: Strategy,
    stages: tuple[StageCosts, ...],
    sends_s: tuple[float, ...],
    times: StageTimes,
    *,
    step_s: StepTime,
) -> Evaluation:
    """Priced stages, one a rank, and the step that they make."""
    taken_s = step_s(times)
    busy = sum(strategy.micro_batches * stage.period_s + stage.tail_s for stage in stages)
    return Evaluation(
        strategy=strategy,
        stages=stages,
        sends_s=sends_s,
        objective_s=times.closed_form_s,
        step_s=taken_s,
        bubble_fraction=max(0.0, 1 - busy / (len(stages) * taken_s)) if taken_s else 0.0,
        times=times,
    )


def evaluate_listed(
    space: Space,
    strategy: Strategy,
    cuts: tuple[int, ...],
    memories: Sequence[listed.RankMemory],
    *,
    step_s: StepTime = whole_step_s,
) -> Evaluation:
    """Price an interleaved or zero-bubble strategy whose ranks hold ``memories``; a stage's memory is its rank's."""
    stages, sends, times = listed_times(space, strategy, cuts, memories)
    taken_s = step_s(times)
    return Evaluation(
        strategy=strategy,
        stages=stages,
        sends_s=sends,
        objective_s=taken_s if step_s is brief_step_s else times.objective_s,
        step_s=taken_s,
        bubble_fraction=listed.bubble_fraction(times, taken_s),
        times=times,
    )


def listed_times(
    space: Space, strategy: Strategy, cuts: tuple[int, ...], memories: Sequence[listed.RankMemory]
) -> tuple[tuple[StageCosts, ...], tuple[float, ...], StageTimes]:
    """The stages of such a strategy, its sends, and what the simulator asks of them. Stages of equal layers under equal
    policies are priced once."""
    tables, kinds = space.tables(strategy), [layer.kind for layer in space.problem.layers.layers]
    priced: dict[tuple[object, ...], StageCosts] = {}
    stages = []
    for stage, (first, end) in enumerate(itertools.pairwise(cuts)):
        memory = memories[schedules.rank_of_stage(stage, ranks=strategy.pipeline)]
        key = (memory.policy, *kinds[first:end], tables.tied_apart_s(first, end))
        if key not in priced:
            policies = (memory.policy,) * (end - first)
            priced[key] = stage_costs(space, tables, stage, first, end, policies, memory_terms=memory.terms)
        stages.append(dataclasses.replace(priced[key], first=first, end=end, memory_terms=memory.terms))
    sends = listed.sends_s(tables, cuts)
    times = dataclasses.replace(
        stage_times(strategy, stages, sends),
        weight_s=tuple(listed.weight_s(space, strategy, stage.kinds) for stage in stages),
        virtual_stages=strategy.virtual_stages,
    )
    return tuple(stages), sends, times


def stage_times(
    strategy: Strategy, stages: Sequence[StageCosts], sends_s: tuple[float, ...], sent_s: tuple[float, ...] = ()
) -> StageTimes:
    """What the simulator asks of priced stages."""
    return StageTimes(
        schedule=strategy.schedule,
        micro_batches=strategy.micro_batches,
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        send_s=sends_s,
        tail_s=tuple(stage.tail_s for stage in stages),
        sent_s=sent_s,
    )


def stage_costs(
    space: Space,
    tables: Tables,
    stage: int,
    first: int,
    end: int,
    policies: tuple[str, ...],
    *,
    memory_terms: dict[str, float] | None = None,
) -> StageCosts:
    """Price layers ``first`` to ``end`` - 1 on ``stage`` under the given recompute policies. ``memory_terms``: those of
    the GPU where it holds other stages too."""
    strategy, problem = tables.strategy, space.problem
    model = space.kinds_of(strategy)
    indices = [layer.kind for layer in problem.layers.layers[first:end]]
    kinds = tuple(model[k] for k in indices)
    policies = tuple(kind.policy(chosen) for kind, chosen in zip(kinds, policies, strict=True))
    costs = [tables.chain.costs[k] for k in indices]
    elements = count_elements(kinds)
    tensor_again_s = sum(c.tensor_forward_s for c, p in zip(costs, policies, strict=True) if p == "full")
    return StageCosts(
        first=first,
        end=end,
        policies=policies,
        kinds=kinds,
        memory_terms=memory_terms
        or stage_memory(
            kinds,
            strategy=strategy,
            stage=stage,
            recipe=tables.recipe,
            device=problem.cluster.device,
            recompute=policies,
            received_bytes=tables.held_bytes(first, end),
        ),
        parameters=elements.total,
        compute_forward_s=sum(c.forward_s for c in costs),
        compute_backward_s=sum(c.backward_s for c in costs),
        recompute_s=sum(c.extra_s[p] for c, p in zip(costs, policies, strict=True)) - tensor_again_s,
        tensor_forward_s=sum(c.tensor_forward_s for c in costs),
        tensor_backward_s=sum(c.tensor_backward_s for c in costs),
        tensor_again_s=tensor_again_s,
        data=tables.data_axis(
            elements.total, elements.trainable, end - first, backward_s=sum(c.backward_s for c in costs)
        ),
        tied_s=tables.tied_apart_s(first, end),
        optimizer_s=tables.optimizer_s(elements.trainable),
    )


def plan_stages(graph: LayerGraph, evaluation: Evaluation) -> tuple[Stage, ...]:
    """The plan's stage table."""
    flops = layers_flops(graph)
    weights_s = (0.0,) * len(evaluation.stages)
    if evaluation.times is not None and evaluation.times.weight_s:
        weights_s = evaluation.times.weight_s
    return tuple(
        Stage(
            first_layer=stage.first,
            last_layer=stage.end - 1,
            recompute=dict(sorted(Counter(stage.policies).items())),
            peak_memory_bytes=stage.peak_bytes,
            memory_terms={name: value for name, value in stage.memory_terms.items() if value},
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            parameters=stage.parameters,
            layer_recompute=stage.policies,
            send_s=send_s,
            synchronise_s=stage.synchronise_s,
            optimizer_s=stage.optimizer_s,
            weight_gradients_s=weights,
            forward_terms={name: value for name, value in stage.forward_terms.items() if value},
            backward_terms={name: value for name, value in stage.backward_terms.items() if value},
            hidden_s=max(0.0, stage.data.total_s - stage.data.exposed_s(evaluation.strategy.micro_batches)),
            flops=sum(flops[stage.first : stage.end]) * evaluation.strategy.micro_batch_size,
        )
        for stage, send_s, weights in zip(evaluation.stages, (*evaluation.sends_s, 0.0), weights_s, strict=True)
    )


def predicted(space: Space, evaluation: Evaluation) -> Predicted:
    """The step in figures."""
    problem, strategy = space.problem, evaluation.strategy
    terms = time_terms(evaluation)
    flops = sum(layers_flops(problem.layers)) * problem.global_batch
    per_gpu = flops / evaluation.step_s / strategy.gpus
    peak = problem.cluster.device.flops(product_dtype(problem.precision))
    exposed = ("tensor_communication", "sharded_state", "sends", "gradient_synchronisation")
    return Predicted(
        step_time_s=evaluation.step_s,
        tokens_per_s=problem.global_batch * problem.layers.tokens_per_sample / evaluation.step_s,
        model_tflops_per_gpu=per_gpu / 1e12,
        mfu=per_gpu / peak,
        peak_memory_bytes=evaluation.peak_bytes,
        bubble_fraction=evaluation.bubble_fraction,
        exposed_communication_s=sum(terms[name] for name in exposed),
        time_terms=terms,
    )


def time_terms(evaluation: Evaluation) -> dict[str, float]:
    """Where the step goes on the rank that works longest; what it does not fill itself is sends and bubble."""
    micro_batches = evaluation.strategy.micro_batches
    terms = dict.fromkeys(_TIME_TERMS, 0.0)
    for stage in evaluation.busiest:
        terms["forward"] += micro_batches * stage.compute_forward_s
        terms["backward"] += micro_batches * stage.compute_backward_s
        terms["recompute"] += micro_batches * stage.recompute_s
        terms["tensor_communication"] += micro_batches * stage.tensor_s
        terms["sharded_state"] += micro_batches * (stage.data.forward_s + stage.data.backward_s)
        terms["gradient_synchronisation"] += stage.synchronise_s
        terms["optimizer"] += stage.optimizer_s
    rest = max(0.0, evaluation.step_s - sum(terms.values()))
    sends = min(rest, 2 * sum(evaluation.sends_s))
    return terms | {"sends": sends, "bubble": rest - sends}


def layers_flops(graph: LayerGraph) -> list[float]:
    """FLOPs of each layer's forward and backward for one sample, without recompute."""
    each = [sum(op.flops + op.backward_flops for op in kind.operators if op.batched) for kind in graph.kinds]
    return [each[layer.kind] for layer in graph.layers]


def stage_link(space: Space, strategy: Strategy, *, size: int, stride: int) -> str:
    """Name of the slowest link that a group of ``strategy`` crosses."""
    group = communication.Group(size=size, stride=stride, ranks=strategy.gpus)
    return communication.group_on(space.problem.cluster, group).link_name
