"""Each axis of a plan in a row: what it splits, with which collective, how often, how many bytes, what shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoplan.cost_models.communication import Group, group_on, tensor_time
from autoplan.layers.types import Collective, LayerKind
from autoplan.plan import Axis, Plan
from autoplan.schedules import rank_of_stage, sends_a_micro_batch
from autoplan.search.dag_transfers import transfers
from autoplan.search.evaluate import Evaluation, stage_link
from autoplan.search.problem import Problem
from autoplan.search.space import Space

_SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def axes(space: Space, evaluation: Evaluation) -> tuple[Axis, ...]:
    """Rows for the axes in use, of the GPU that is the bottleneck; innermost last, as ranks are laid out."""
    strategy = evaluation.strategy
    rows = []
    if strategy.pipeline > 1:
        rows.append(_pipeline(space, evaluation))
    if strategy.data > 1:
        rows.append(_data(space, evaluation))
    if strategy.tensor > 1:
        rows.append(_tensor(space, evaluation))
    return tuple(rows)


def _pipeline(space: Space, evaluation: Evaluation) -> Axis:
    strategy, cluster = evaluation.strategy, space.problem.cluster
    stage_of = [s for s, stage in enumerate(evaluation.stages) for _ in range(stage.first, stage.end)]
    # A GPU sends activations forward and gradients back: the busiest does both. Its own stages hand over.
    sent = [0.0] * strategy.pipeline
    for value in transfers(
        space.problem.layers_under(strategy.tensor, sequence=strategy.sequence_parallel),
        stage_of,
        samples=strategy.micro_batch_size,
    ):
        source, *readers = (rank_of_stage(s, ranks=strategy.pipeline) for s in (value.source, *value.destinations))
        for reader in readers:
            if reader != source:
                sent[source] += value.bytes_each
                sent[reader] += value.bytes_each
    width = strategy.data * strategy.tensor
    crosses = any(
        (s * width) // cluster.gpus_per_node != ((s + 1) * width) // cluster.gpus_per_node
        or (s * width + width - 1) // cluster.gpus_per_node != ((s + 2) * width - 1) // cluster.gpus_per_node
        for s in range(strategy.pipeline - 1)
    )
    return Axis(
        name="pipeline",
        degree=strategy.pipeline,
        splits="layers",
        collective="send and receive",
        times_per_step=strategy.micro_batches
        * sends_a_micro_batch(ranks=strategy.pipeline, virtual_stages=strategy.virtual_stages),
        bytes_per_step=strategy.micro_batches * max(sent),
        exposed_s=2 * sum(evaluation.sends_s),
        link=(cluster.inter if crosses else cluster.intra).name,
    )


def _data(space: Space, evaluation: Evaluation) -> Axis:
    strategy, stages = evaluation.strategy, evaluation.busiest
    pieces, micro = sum(stage.end - stage.first for stage in stages), strategy.micro_batches
    collective, times = {
        0: ("all-reduce of gradients", pieces),
        1: ("reduce-scatter of gradients, all-gather of weights", 2 * pieces),
        2: ("reduce-scatter of gradients, all-gather of weights", (micro + 1) * pieces),
        3: ("all-gather of weights, reduce-scatter of gradients", 3 * micro * pieces),
    }[strategy.zero_stage]
    splits = {
        0: "the batch",
        1: "the batch and optimizer state",
        2: "the batch, optimizer state and gradients",
        3: "the batch, optimizer state, gradients and weights",
    }[strategy.zero_stage]
    return Axis(
        name="data",
        degree=strategy.data,
        splits=splits,
        collective=collective,
        times_per_step=times,
        bytes_per_step=sum(stage.data.bytes_per_step for stage in stages),
        exposed_s=sum(stage.data.exposed_s(micro) for stage in stages),
        link=stage_link(space, strategy, size=strategy.data, stride=strategy.tensor),
    )


def _tensor(space: Space, evaluation: Evaluation) -> Axis:
    strategy, stages = evaluation.strategy, evaluation.busiest
    degree, micro = strategy.tensor, strategy.micro_batches
    every = [
        collective
        for stage in stages
        for kind, policy in zip(stage.kinds, stage.policies, strict=True)
        for collective in run_in_a_micro_batch(kind.collectives, policy)
    ]
    found = [collective for collective in every if collective.axis == "tensor"]
    # A stage's times are those of all axes that its layers wait for.
    others = waited(
        space.problem, [c for c in every if c.axis != "tensor"], degree=degree, micro_batch=strategy.micro_batch_size
    )
    return Axis(
        name="tensor",
        degree=degree,
        splits="matrices and the sequence" if strategy.sequence_parallel else "matrices",
        collective=", ".join(name.replace("_", "-") for name in sorted({c.name for c in found})) or "none",
        times_per_step=micro * len(found),
        bytes_per_step=micro * sent_bytes(found, degree=degree, micro_batch=strategy.micro_batch_size),
        exposed_s=micro * (sum(stage.tensor_s for stage in stages) - others) if found else 0.0,
        link=stage_link(space, strategy, size=degree, stride=1),
    )


def run_in_a_micro_batch(collectives: Sequence[Collective], policy: str) -> list[Collective]:
    """All collectives of a layer in a forward and a backward: where the forward runs again (full recompute), its
    collectives do too."""
    again = [collective for collective in collectives if collective.phase == "forward"] if policy == "full" else []
    return [*collectives, *again]


def waited(problem: Problem, collectives: Sequence[Collective], *, degree: int, micro_batch: int) -> float:
    """Seconds that a micro-batch of so many samples waits for ``collectives`` under tensor ``degree``."""
    alone = LayerKind(operators=(), collectives=tuple(collectives))
    return tensor_time(
        alone, problem.cluster, degree=degree, micro_batch=micro_batch, software=problem.software
    ).total_s


def sent_bytes(collectives: Sequence[Collective], *, degree: int, micro_batch: int) -> float:
    """Bytes that each of ``degree`` ranks sends in a micro-batch of so many samples."""
    return sum(
        _SENT[c.name] * (degree - 1) / degree * c.bytes_per_sample * (micro_batch if c.batched else 1)
        for c in collectives
    )


class Transfers(NamedTuple):
    """What a row says of an axis's transfers, by the names of its fields."""

    times_per_step: int
    bytes_per_step: float
    exposed_s: float
    link: str


def inner_transfers(problem: Problem, plan: Plan, collectives: Sequence[Collective], degree: int) -> Transfers:
    """Of an axis inside the data axis, whose ``collectives`` are those of a micro-batch on the busiest rank."""
    strategy = plan.strategy
    micro, samples = strategy.micro_batches, strategy.micro_batch_size
    group = Group(size=degree, stride=strategy.tensor, ranks=strategy.gpus)
    return Transfers(
        times_per_step=micro * len(collectives),
        bytes_per_step=micro * sent_bytes(collectives, degree=degree, micro_batch=samples),
        exposed_s=micro * waited(problem, collectives, degree=strategy.tensor, micro_batch=samples),
        link=group_on(problem.cluster, group).link_name,
    )


def busiest_layers(problem: Problem, plan: Plan) -> list[tuple[LayerKind, str]]:
    """The layers of the rank that works longest, under its tensor degree, each with its recompute policy."""
    kinds = problem.kinds(plan.strategy.tensor)
    return [
        (kinds[layer.kind], policy)
        for stage in plan.busiest
        for layer, policy in zip(
            problem.layers.layers[stage.first_layer : stage.last_layer + 1], stage.layer_recompute, strict=True
        )
    ]
