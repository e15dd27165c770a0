"""Every legal tuple of degrees, as columns: data x pipeline x tensor, ZeRO stage, micro-batch size, schedule.

A plan may use fewer GPUs than offered as long as it keeps whole structure: a divisor of one node's GPUs, or whole
nodes whose number divides the nodes. GPipe is listed only where it is forced or alone: under the closed form it takes
the time of 1F1B and holds at least as many micro-batches, so it is never the better choice. Interleaved and zero-bubble
schedules are listed where they are forced; a search that is free tries them last
(:mod:`autoplan.search.other_schedules`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.cluster import Cluster
from autoplan.plan import Strategy
from autoplan.schedules import SCHEDULES

if TYPE_CHECKING:
    from autoplan.search.forced import Forced
    from autoplan.search.problem import Problem

Integers = NDArray[np.int64]

# Chunks a GPU that are tried; more are legal where they are forced.
VIRTUAL_STAGES = (2, 3, 4, 6, 8)
# Where 1F1B's pipeline waits for less of its step, no schedule is faster than 1F1B by more than the search's tolerance.
LEAST_BUBBLE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns of equal length, one row a candidate."""

    data: Integers
    tensor: Integers
    pipeline: Integers
    zero_stage: Integers
    micro_batch_size: Integers
    micro_batches: Integers
    schedule: str
    # Rows that run another schedule than ``schedule``: its position in :data:`schedules.SCHEDULES`, else -1.
    other: Integers
    virtual_stages: Integers
    sequence: bool = False

    def __len__(self) -> int:
        return len(self.data)

    @property
    def gpus(self) -> Integers:
        return self.data * self.tensor * self.pipeline

    @property
    def staged(self) -> NDArray[np.bool_]:
        """Whether there is more than one stage."""
        return self.pipeline > 1

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
            sequence_parallel=self.sequence and int(self.tensor[index]) > 1,
        )


def divisors(number: int) -> tuple[int, ...]:
    """Divisors of ``number``, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def whole_counts(cluster: Cluster) -> tuple[int, ...]:
    """Numbers of GPUs that keep whole structure, ascending; the last is all of them."""
    within = divisors(cluster.gpus_per_node)
    across = (cluster.gpus_per_node * nodes for nodes in divisors(cluster.nodes))
    return tuple(sorted({*within, *across}))


def enumerate_candidates(problem: Problem, forced: Forced, *, tensors: Iterable[int]) -> Candidates:
    """All legal rows for tensor degrees ``tensors`` (legal ones), in an order that depends on nothing else."""
    rows: list[tuple[int, ...]] = []
    tensors = tuple(tensors)
    for gpus in reversed(counts(problem, forced)):
        rows += _rows(problem, forced, gpus, tensors)
        # A user who forces degrees and leaves data open means the rest of the GPUs for data.
        if rows and forced.names_a_degree and forced.data is None:
            break
    table = _with_schedules(problem, forced, np.array(rows, dtype=np.int64).reshape(-1, 6))
    data, tensor, pipeline, zero_stage, micro, micro_batches, other, virtual_stages = table.T
    return Candidates(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        zero_stage=zero_stage,
        micro_batch_size=micro,
        micro_batches=micro_batches,
        schedule=_first_schedule(problem, forced),
        other=other,
        virtual_stages=virtual_stages,
        sequence=problem.sequence,
    )


def _first_schedule(problem: Problem, forced: Forced) -> str:
    """What rows run that have no column for it; one stage runs every schedule alike."""
    if forced.schedule in ("gpipe", "1f1b"):
        return str(forced.schedule)
    plain = [name for name in problem.schedules if name in ("1f1b", "gpipe")]
    return "1f1b" if "1f1b" in plain or not plain else plain[0]


def _with_schedules(problem: Problem, forced: Forced, table: Integers) -> Integers:
    """``table`` with the columns ``other`` and ``virtual_stages``: rows run the plain schedule, or what was forced."""
    chunks = forced.virtual_stages or 1
    if forced.pipeline == 1 or (forced.schedule not in ("interleaved", "zero_bubble") and chunks == 1):
        return _columns(table, -1, 1)
    name = forced.schedule or "interleaved"
    tried = (chunks,) if forced.virtual_stages or name != "interleaved" else VIRTUAL_STAGES
    pipeline, layers = table[:, 2], len(problem.layers.layers)
    pieces = [
        _columns(table[(pipeline > 1) & (pipeline * virtual <= layers)], SCHEDULES.index(name), virtual)
        for virtual in tried
    ]
    return np.concatenate(pieces)


def _columns(table: Integers, other: int, virtual_stages: int) -> Integers:
    more = np.tile(np.array([other, virtual_stages], dtype=np.int64), (len(table), 1))
    return np.concatenate((table, more), axis=1)


def counts(problem: Problem, forced: Forced) -> tuple[int, ...]:
    """Numbers of GPUs to try. Where all three degrees are forced, their product."""
    if forced.data and forced.tensor and forced.pipeline:
        return (forced.product,)
    most = problem.max_gpus or problem.cluster.gpus
    return tuple(n for n in whole_counts(problem.cluster) if n % forced.product == 0 and n <= most)


def tensor_degrees(problem: Problem, forced: Forced) -> tuple[int, ...]:
    """Tensor degrees worth asking the model about, ascending."""
    if forced.tensor:
        return (forced.tensor,)
    highest = problem.max_tensor or problem.cluster.gpus_per_node
    return tuple(d for d in divisors(problem.cluster.gpus) if (2 if problem.sequence_forced else 1) <= d <= highest)


def _rows(problem: Problem, forced: Forced, gpus: int, tensors: tuple[int, ...]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    layers = len(problem.layers.layers)
    for tensor in tensors:
        for pipeline in _options(forced.pipeline, divisors(gpus // tensor) if gpus % tensor == 0 else ()):
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or pipeline > layers or forced.data not in (None, data) or problem.global_batch % data:
                continue
            if data > 1 and problem.batch_coupling:
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
