"""Each axis of a plan in a row: what it splits, with which collective, how often, how many bytes, what shows."""

from __future__ import annotations

from collections import Counter

from autoplan.plan import Axis
from autoplan.schedules import rank_of_stage, sends_a_micro_batch
from autoplan.search.dag_transfers import transfers
from autoplan.search.evaluate import Evaluation, stage_link
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
    degree, micro, samples = strategy.tensor, strategy.micro_batches, strategy.micro_batch_size
    found = [collective for stage in stages for kind in stage.kinds for collective in kind.collectives]
    counts = Counter(collective.name for collective in found)
    sent = sum(
        _SENT[c.name] * (degree - 1) / degree * c.bytes_per_sample * (samples if c.batched else 1) for c in found
    )
    return Axis(
        name="tensor",
        degree=degree,
        splits="matrices and the sequence" if strategy.sequence_parallel else "matrices",
        collective=", ".join(name.replace("_", "-") for name in sorted(counts)) or "none",
        times_per_step=micro * len(found),
        bytes_per_step=micro * sent,
        exposed_s=micro * sum(stage.tensor_forward_s + stage.tensor_backward_s for stage in stages),
        link=stage_link(space, strategy, size=degree, stride=1),
    )
