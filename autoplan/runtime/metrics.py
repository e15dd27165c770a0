"""What each step of a training run did, measured, beside what the plan predicted.

    metrics = autoplan.Metrics(program, log_dir="run/metrics")     # on every rank
    for batch in metrics.track(loader):
        program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
    print(metrics.report())

A step's time is that of one turn of the loop, so it holds the optimizer and, told apart, the wait for data. Memory is
that of the fullest rank: on CUDA what the device has given away (as nvidia-smi shows it, and as the plan predicts), on
a CPU the process's largest resident size so far, Python and torch included. Exposed communication is measured, as the
time that ranks stand still in receives and collectives (:mod:`autoplan.runtime.waits`), the mean over the plan's ranks.
The pipeline's bubble is in it, so what the plan says of both together stands beside it.

Reading it costs one small all-gather each time; without a ``Metrics`` nothing is measured.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from autoplan.errors import AutoplanError, StrategyError
from autoplan.explain import text
from autoplan.plan import Plan
from autoplan.runtime.program import Program
from autoplan.runtime.waits import REASONS, WAITS

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch.utils.tensorboard import SummaryWriter

_Batch = TypeVar("_Batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step, or the mean of the steps since the last one told. ``step`` counts the program's steps so far.

    ``data_s`` of ``step_s`` is the wait for the next batch. ``tokens_per_s`` and ``mfu`` (of the GPUs' peak, without
    recompute) are of the whole ``step_s``; ``mfu`` is 0 where the plan has no peak to compare with. ``waits_s``: what
    the ranks stood still, by the axis that they waited over; the sum of the loss over all ranks is ``"loss"``.
    """

    step: int
    loss: float
    samples: int
    step_s: float
    data_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: float
    waits_s: dict[str, float]

    @property
    def exposed_communication_s(self) -> float:
        """All waits together, the pipeline's bubble included."""
        return sum(self.waits_s.values())

    def scalars(self) -> dict[str, float]:
        """By TensorBoard's tags."""
        known = {
            "loss": self.loss,
            "step_s": self.step_s,
            "data_s": self.data_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "exposed_communication_s": self.exposed_communication_s,
        }
        return known | {f"waits_s/{reason}": seconds for reason, seconds in self.waits_s.items() if seconds}


class Metrics:
    """Measures the steps of ``program``; made on every rank (it gathers what the ranks measured).

    ``log_dir``: where rank 0 writes the scalars for TensorBoard (``autoplan[tensorboard]``). ``progress``: a bar on
    rank 0's stderr; None: where that is a terminal. ``every``: steps between two readings, each the mean of the steps
    between them.
    """

    def __init__(
        self,
        program: Program,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        every: int = 1,
    ) -> None:
        if every < 1:
            raise StrategyError(f"every = {every}", where="Metrics", legal="1 or more")
        self._program, self._every = program, every
        self._mesh = program._rank_part().mesh
        first = self._mesh.rank == 0
        self._writer = _writer(log_dir) if log_dir is not None and first else None
        self._shows = first and (sys.stderr.isatty() if progress is None else progress)
        self.history: list[StepMetrics] = []
        self._begin()

    @property
    def latest(self) -> StepMetrics | None:
        """The last reading; None before the first."""
        return self.history[-1] if self.history else None

    def track(self, batches: Iterable[_Batch], *, steps: int | None = None) -> Iterator[_Batch]:
        """The batches (``steps`` of them at most), each turn of the loop a step that is measured and shown."""
        total = steps if steps is not None else len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
        iterator = iter(batches)
        with ExitStack() as stack:
            bar = stack.enter_context(_bar(total)) if self._shows else None
            stack.callback(WAITS.stop)
            self._begin()
            taken = 0
            while steps is None or taken < steps:
                asked = time.perf_counter()
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                self._data_s += time.perf_counter() - asked
                yield batch
                taken += 1
                reading = self.end_step()
                if bar is not None:
                    bar.update(bar.task_ids[0], advance=1)
                    if reading is not None:
                        bar.update(bar.task_ids[0], now=_line(reading, self._program.plan))

    def end_step(self) -> StepMetrics | None:
        """Close a step: for loops that :meth:`track` does not hold. None between two readings (a collective)."""
        self._turns += 1
        if self._turns < self._every:
            return None
        reading = self._read()
        self.history.append(reading)
        if self._writer is not None:
            for tag, value in reading.scalars().items():
                self._writer.add_scalar(tag, value, reading.step)
            self._writer.flush()  # a rank ends without destructors
        self._begin()
        return reading

    def report(self) -> str:
        """Predicted against measured, the median of all readings but the first, as a table of a few lines."""
        readings = self.history[1:] or self.history
        if not readings:
            return "no step was measured"
        plan = self._program.plan
        predicted = plan.predicted
        waiting = predicted.exposed_communication_s + predicted.bubble_fraction * predicted.step_time_s
        rows = [
            ("step", predicted.step_time_s, statistics.median(r.step_s for r in readings), text.seconds),
            ("tokens/s", predicted.tokens_per_s, statistics.median(r.tokens_per_s for r in readings), text.count),
            ("MFU", predicted.mfu, statistics.median(r.mfu for r in readings), text.percent),
            ("memory", predicted.peak_memory_bytes, statistics.median(r.memory_bytes for r in readings), text.size),
            ("waits and bubble", waiting, statistics.median(r.exposed_communication_s for r in readings), text.seconds),
            ("wait for data", 0.0, statistics.median(r.data_s for r in readings), text.seconds),
        ]
        lines = [f"{'':18}{'predicted':>12}{'measured':>12}{'ratio':>8}"]
        for name, said, found, write in rows:
            ratio = f"{found / said:.2f}" if said else "-"
            lines.append(f"{name:18}{write(said) if said else '-':>12}{write(found):>12}{ratio:>8}")
        return "\n".join(lines)

    # -------------------------------------------------------------------------------------------------------- measuring

    def _begin(self) -> None:
        WAITS.start()
        self._turns, self._data_s = 0, 0.0
        self._steps_before, self._samples_before = self._program.steps, self._program.samples
        self._started = time.perf_counter()

    def _read(self) -> StepMetrics:
        turns, plan = self._turns, self._program.plan
        step_s = (time.perf_counter() - self._started) / turns
        waits = WAITS.take()
        own = [step_s, self._data_s / turns, _memory_bytes(self._mesh.device)]
        slowest, data_s, memory, *waited = self._over_ranks(own, [waits[reason] / turns for reason in REASONS])
        samples = (self._program.samples - self._samples_before) / turns
        share = samples / plan.global_batch
        predicted = plan.predicted
        return StepMetrics(
            step=self._program.steps,
            loss=self._program.loss,
            samples=round(samples),
            step_s=slowest,
            data_s=data_s,
            tokens_per_s=samples * plan.model.tokens_per_sample / slowest,
            mfu=predicted.mfu * predicted.step_time_s * share / slowest,
            memory_bytes=memory,
            waits_s=dict(zip(REASONS, waited, strict=True)),
        )

    def _over_ranks(self, most: list[float], mean: list[float]) -> list[float]:
        """The largest of each of ``most`` over all ranks, and the mean of each of ``mean`` over those that work."""
        mesh = self._mesh
        if mesh.world == 1:
            return [*most, *mean]
        own = torch.tensor([*most, *mean], dtype=torch.float64, device=mesh.device)
        every = [torch.empty_like(own) for _ in range(mesh.world)]
        dist.all_gather(every, own)
        table = torch.stack(every)
        largest = table[:, : len(most)].amax(0)
        return [*largest.tolist(), *table[: mesh.strategy.gpus, len(most) :].mean(0).tolist()]


def _writer(log_dir: str | os.PathLike[str]) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise AutoplanError(
            "metrics are logged by TensorBoard's own writer, which is not installed",
            where="Metrics(log_dir=...)",
            attempt='pip install "autoplan[tensorboard]", or no log_dir',
        ) from None
    try:
        return SummaryWriter(log_dir)
    except OSError as error:
        raise AutoplanError(
            f"cannot write the metrics: {error.strerror}", where=str(log_dir), attempt="another log_dir"
        ) from None


def _memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _line(reading: StepMetrics, plan: Plan) -> str:
    """For the bar: as much as a line of 80 columns holds beside it."""
    waits = reading.exposed_communication_s / reading.step_s
    parts = [
        f"loss {reading.loss:.4g}",
        f"{text.count(reading.tokens_per_s)} tok/s",
        *([f"MFU {reading.mfu:.0%}"] if reading.mfu else []),
        text.size(reading.memory_bytes),
        f"waits {waits:.0%}",
    ]
    if plan.predicted.step_time_s:
        parts.append(f"{reading.step_s / plan.predicted.step_time_s:.2f}x plan")
    return "  ".join(parts)


def _bar(total: int | None) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    columns: list[Any] = [
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        BarColumn(None),  # what the others leave
        TextColumn("{task.fields[now]}", markup=False, table_column=Column(no_wrap=True)),
    ]
    bar = Progress(*columns, console=Console(stderr=True), expand=True)
    bar.add_task("", total=total, now="")
    return bar
