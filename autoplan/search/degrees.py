"""Every legal tuple of degrees, as columns: data x pipeline x tensor, sequence parallelism, ZeRO stage, micro-batch
size, schedule, chunks a GPU.

A plan may use fewer GPUs than offered: part of one node, or whole nodes. Every number is tried on one node of up to
:data:`SMALL_NODE` GPUs, or where degrees are forced. Elsewhere those are tried that keep whole structure (a divisor of
one node's GPUs, or whole nodes whose number divides the nodes), and, for the sake of the batch, all those with a data
degree that divides it and not the GPUs: 24 samples are 24 ranks' on three nodes of eight, where 32 GPUs would have 8.

GPipe is listed only where it is forced or alone: under the closed form it takes the time of 1F1B and holds at least as
many micro-batches, so it is never the better choice. Interleaved and zero-bubble rows stand beside the 1F1B row of the
same degrees where that waits for more than :data:`LEAST_BUBBLE` of its step with a micro-batch for every rank, or where
they are forced. Chunks a GPU are the least that make the longest chunk as many layers, or as many of the most common
layer, as it then has (:func:`chunk_counts`): more chunks of the same length only add sends.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import Cluster
from autoplan.plan import Strategy
from autoplan.schedules import EVENLY_SPLIT, SCHEDULES

if TYPE_CHECKING:
    from autoplan.search.forced import Forced
    from autoplan.search.problem import Problem

Integers = NDArray[np.int64]

# Where 1F1B's pipeline waits for less of its step, no schedule is faster than 1F1B by more than the search's tolerance.
LEAST_BUBBLE = 0.02
SMALL_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns of equal length, one row a candidate; ``base`` has one row for every tuple of degrees whatever its
    schedule, and ``of`` says which of those a row is."""

    data: Integers
    tensor: Integers
    pipeline: Integers
    zero_stage: Integers
    micro_batch_size: Integers
    micro_batches: Integers
    sequence: NDArray[np.bool_]
    schedule: str
    # Rows that run another schedule than ``schedule``: its position in :data:`schedules.SCHEDULES`, else -1.
    other: Integers
    virtual_stages: Integers
    of: Integers
    base: Candidates | None = None

    def __len__(self) -> int:
        return len(self.data)

    @property
    def gpus(self) -> Integers:
        return self.data * self.tensor * self.pipeline

    @property
    def staged(self) -> NDArray[np.bool_]:
        """Whether there is more than one stage."""
        return self.pipeline > 1

    @property
    def listed(self) -> NDArray[np.bool_]:
        """Which rows run an interleaved or zero-bubble schedule."""
        return self.other >= 0

    def schedule_of(self, index: int) -> str:
        """The schedule of row ``index``."""
        return SCHEDULES[self.other[index]] if self.other[index] >= 0 else self.schedule

    def runs(self, schedule: str) -> NDArray[np.bool_]:
        """Which rows run ``schedule``."""
        return self.other == SCHEDULES.index(schedule)

    def strategy(self, index: int) -> Strategy:
        """Row ``index`` as a :class:`Strategy`."""
        return Strategy(
            data=int(self.data[index]),
            tensor=int(self.tensor[index]),
            pipeline=int(self.pipeline[index]),
            virtual_stages=int(self.virtual_stages[index]),
            zero_stage=int(self.zero_stage[index]),
            micro_batch_size=int(self.micro_batch_size[index]),
            micro_batches=int(self.micro_batches[index]),
            schedule=self.schedule_of(index),
            sequence_parallel=bool(self.sequence[index]),
        )


def divisors(number: int) -> tuple[int, ...]:
    """Divisors of ``number``, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def whole_counts(cluster: Cluster) -> frozenset[int]:
    """Numbers of GPUs that keep whole structure."""
    return _whole_counts(cluster.nodes, cluster.gpus_per_node)


@functools.lru_cache(maxsize=64)
def _whole_counts(nodes: int, gpus_per_node: int) -> frozenset[int]:
    if nodes == 1 and gpus_per_node <= SMALL_NODE:
        return frozenset(range(1, gpus_per_node + 1))
    return frozenset({*divisors(gpus_per_node), *(gpus_per_node * some for some in divisors(nodes))})


def fills_nodes(cluster: Cluster, gpus: int) -> bool:
    """Whether ``gpus`` are part of one node, or whole nodes."""
    return gpus <= cluster.gpus_per_node or gpus % cluster.gpus_per_node == 0


def enumerate_candidates(
    problem: Problem, forced: Forced, *, tensors: Iterable[int], shared: Iterable[int] = ()
) -> Candidates:
    """All legal rows for tensor degrees ``tensors`` (legal ones), those of ``shared`` over the sequence too, in an
    order that depends on nothing else."""
    rows: list[tuple[int, ...]] = []
    tensors = tuple(tensors)
    for gpus in reversed(counts(problem, forced, tensors)):
        found = _rows(problem, forced, gpus, tensors)
        rows += found
        # A user who forces degrees and leaves data open means the rest for data: as many as the batch allows.
        if forced.names_a_degree and forced.data is None and any(row[0] * forced.product == gpus for row in found):
            break
    plain = np.array(rows, dtype=np.int64).reshape(-1, 6)
    over = plain[np.isin(plain[:, 1], np.array(list(shared), dtype=np.int64))]
    whole = plain[:0] if problem.sequence_forced else plain
    table = np.concatenate((whole, over))
    base = _candidates(
        table,
        sequence=np.arange(len(table)) >= len(whole),
        schedule=_first_schedule(problem, forced),
        other=np.full(len(table), -1),
        virtual_stages=np.ones(len(table), dtype=np.int64),
        of=np.arange(len(table)),
    )
    of, other, virtual_stages = _with_schedules(problem, forced, base)
    return _candidates(
        table[of],
        sequence=base.sequence[of],
        schedule=base.schedule,
        other=other,
        virtual_stages=virtual_stages,
        of=of,
        base=base,
    )


def _candidates(table: Integers, **columns: Any) -> Candidates:
    data, tensor, pipeline, zero_stage, micro_batch_size, micro_batches = table.T
    return Candidates(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        zero_stage=zero_stage,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        **columns,
    )


def _first_schedule(problem: Problem, forced: Forced) -> str:
    """What rows run that have no column for it; one stage runs every schedule alike."""
    if forced.schedule in ("gpipe", "1f1b"):
        return str(forced.schedule)
    plain = [name for name in problem.schedules if name in ("1f1b", "gpipe")]
    return "1f1b" if "1f1b" in plain or not plain else plain[0]


def _with_schedules(problem: Problem, forced: Forced, base: Candidates) -> tuple[Integers, Integers, Integers]:
    """Rows of ``base`` with the schedule and the chunks a GPU that each runs (columns ``other``, ``virtual_stages``):
    the plain schedule and what may gain on it, or what was forced."""
    every = np.arange(len(base))
    chunks = forced.virtual_stages or 1
    if forced.pipeline != 1 and (forced.schedule in EVENLY_SPLIT or chunks > 1):
        name = forced.schedule or "interleaved"
        return _joined(_under(problem, base, name, every[base.staged], forced.virtual_stages))
    pieces = [(every, np.full(len(every), -1), np.ones(len(every), dtype=np.int64))]
    if forced.schedule is None and forced.virtual_stages is None and not problem.stages and base.schedule == "1f1b":
        worthwhile = every[gains(base)]
        for name in EVENLY_SPLIT:
            if name in problem.schedules:
                pieces += _under(problem, base, name, worthwhile, None)
    return _joined(pieces)


def gains(rows: Candidates) -> NDArray[np.bool_]:
    """Where 1F1B waits for more than :data:`LEAST_BUBBLE` of the step, with a micro-batch for every rank."""
    ranks, micro_batches = rows.pipeline, rows.micro_batches
    bubble = ranks - 1 > LEAST_BUBBLE * (micro_batches + ranks - 1)
    return (ranks > 1) & (ranks <= micro_batches) & bubble


Piece = tuple[Integers, Integers, Integers]


def _under(problem: Problem, base: Candidates, name: str, rows: Integers, chunks: int | None) -> list[Piece]:
    """``rows`` of ``base`` under a schedule, with ``chunks`` a GPU or all that are tried."""
    graph, found = problem.layers, []
    layers = len(graph.layers)
    most_common = max(Counter(layer.kind for layer in graph.layers).values())
    for ranks in np.unique(base.pipeline[rows]).tolist():
        here = rows[base.pipeline[rows] == ranks]
        tried: tuple[int, ...] = (chunks or 1,)
        if name == "interleaved" and chunks is None:
            tried = chunk_counts(ranks, layers=layers, most_common=most_common)
        for virtual in tried:
            if ranks * virtual <= layers:
                other, each = np.full(len(here), SCHEDULES.index(name)), np.full(len(here), virtual)
                found.append((here, other, each))
    return found


@functools.lru_cache(maxsize=4096)
def chunk_counts(ranks: int, *, layers: int, most_common: int) -> tuple[int, ...]:
    """Numbers of chunks a GPU, from 2: for every length of the longest chunk the least that reach it."""
    most = layers // ranks
    lengths = (
        -(-number // (ranks * length)) for number in {layers, most_common} for length in range(1, number // ranks + 1)
    )
    return tuple(sorted({chunks for chunks in (*lengths, most) if 2 <= chunks <= most}))


def _joined(pieces: list[Piece]) -> Piece:
    none = np.zeros(0, dtype=np.int64)
    of, other, virtual_stages = (
        (np.concatenate((none, *columns)) for columns in zip(*pieces, strict=True)) if pieces else (none, none, none)
    )
    return of, other, virtual_stages


def counts(problem: Problem, forced: Forced, tensors: Iterable[int]) -> tuple[int, ...]:
    """Numbers of GPUs to try, ascending. Where all three degrees are forced, their product."""
    cluster = problem.cluster
    most = min(problem.max_gpus or cluster.gpus, cluster.gpus)
    if forced.data and forced.tensor and forced.pipeline:
        tried: Iterable[int] = (forced.product,)
    elif forced.names_a_degree:
        tried = range(forced.product, most + 1, forced.product)
    else:
        tried = whole_counts(cluster) | _counts_of_batch(problem, tensors)
    return tuple(sorted(n for n in tried if n <= most and fills_nodes(cluster, n)))


def _counts_of_batch(problem: Problem, tensors: Iterable[int]) -> frozenset[int]:
    """Numbers of GPUs with a data degree that divides the batch and not the GPUs that there are."""
    gpus, layers = problem.cluster.gpus, len(problem.layers.layers)
    pipelines = [degree for degree in divisors(gpus) if degree <= layers]
    return frozenset(
        data * tensor * pipeline
        for data in divisors(problem.global_batch)
        if gpus % data
        for tensor in tensors
        for pipeline in pipelines
    )


def tensor_degrees(problem: Problem, forced: Forced) -> tuple[int, ...]:
    """Tensor degrees worth asking the model about, ascending."""
    if forced.tensor:
        return (forced.tensor,)
    highest = problem.max_tensor or problem.cluster.gpus_per_node
    tried = {*divisors(problem.cluster.gpus), *(2**power for power in range(highest.bit_length()))}
    return tuple(sorted(d for d in tried if (2 if problem.sequence_forced else 1) <= d <= highest))


def _rows(problem: Problem, forced: Forced, gpus: int, tensors: tuple[int, ...]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    layers = len(problem.layers.layers)
    whole = forced.names_a_degree or gpus in whole_counts(problem.cluster)
    for tensor in tensors:
        for pipeline in _options(forced.pipeline, divisors(gpus // tensor) if gpus % tensor == 0 else ()):
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or pipeline > layers or forced.data not in (None, data) or problem.global_batch % data:
                continue
            if (data > 1 and problem.batch_coupling) or not (whole or problem.cluster.gpus % data):
                continue
            for micro in _micro_batch_sizes(problem, forced, data):
                micro_batches = problem.global_batch // (data * micro)
                for zero in _zero_stages(problem, forced, data):
                    rows.append((data, tensor, pipeline, zero, micro, micro_batches))
    return rows


def _options(forced: int | None, free: tuple[int, ...]) -> tuple[int, ...]:
    return free if forced is None else tuple(d for d in free if d == forced)


def _micro_batch_sizes(problem: Problem, forced: Forced, data: int) -> Iterator[int]:
    each = problem.global_batch // data
    for size in divisors(each):
        if problem.batch_coupling and size != problem.global_batch:
            continue
        if problem.fixed_micro_batch not in (None, size) or forced.micro_batch_size not in (None, size):
            continue
        yield size


def _zero_stages(problem: Problem, forced: Forced, data: int) -> tuple[int, ...]:
    if data == 1:
        return () if forced.zero_stage else (0,)
    return _options(forced.zero_stage, problem.zero_stages)
