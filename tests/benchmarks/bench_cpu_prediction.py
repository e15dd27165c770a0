"""Predicted against measured step time of the demonstration's GPT on CPU processes, after calibrating this machine.

Run: ``python tests/benchmarks/bench_cpu_prediction.py``, or ``pytest -m benchmark`` on this file with ``-s``. Prints a
line a strategy; asserts no clock. A step is what a user's loop repeats: ``program.step``, the optimizer's, and dropping
the gradients. Steps are timed by the clock from a barrier to the last rank's end; the least counts, because what else
runs on the machine only adds. Strategies take turns, so that all meet the same neighbours. It needs a free core a rank:
where others run, tensor parallelism waits for the slower rank twenty times a step, and the clock shows that wait, not
the program. So the processor time of the busier rank's thread is printed too, its collectives aside, beside the terms
that a rank computes: waits and other programs are in neither.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
from autoplan.runtime.waits import WAITS

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_gpt import GPT, batches, read_corpus

RANKS = 2
WIDTH = 256
TURNS = 3
STEPS = 10
WARM_UP = 2
TARGET = 0.20
STRATEGIES: dict[str, dict[str, Any]] = {
    "DP2": {"data": 2, "zero_stage": 0},
    "PP2": {"pipeline": 2, "micro_batch_size": 4},
    "TP2": {"tensor": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy: seconds of a step, predicted, the least measured and the middle one; and processor seconds that its
    busier rank computes, the lower quartile of all steps."""

    name: str
    strategy: str
    predicted_s: float
    measured_s: float
    median_s: float
    computed_s: float
    terms: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def computing_s(self) -> float:
        """What of the prediction keeps a rank's thread busy."""
        return sum(self.terms.get(name, 0.0) for name in ("forward", "backward", "recompute", "optimizer"))


def _example() -> dict[str, torch.Tensor]:
    return next(batches(read_corpus(), 1))


def _train(cluster: str, strategy: dict[str, Any], steps: int) -> tuple[list[tuple[float, float]], autoplan.Plan]:
    """(clock, processor) seconds of every step, and the plan."""
    torch.manual_seed(0)
    batch = _example()
    program = autoplan.compile(GPT(width=WIDTH), gpus=cluster, device="cpu", example_inputs=batch, strategy=strategy)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-3)
    seconds = []
    inside = _collectives_apart()
    for _ in range(steps):
        dist.barrier()
        inside.clear()
        started, busy = time.perf_counter(), time.thread_time()
        program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        busy = time.thread_time() - busy - sum(inside)
        dist.barrier()
        seconds.append((time.perf_counter() - started, busy))
    return seconds, program.plan


def _collectives_apart() -> list[float]:
    """A list that grows by the processor seconds of this thread in every collective from now on; messages of the
    pipeline stay with the rest: the thread copies them itself."""
    inside: list[float] = []
    during = WAITS.during

    @contextmanager
    def timed(reason: str) -> Iterator[None]:
        started = time.thread_time()
        with during(reason):
            yield
        if reason != "pipeline":
            inside.append(time.thread_time() - started)

    WAITS.during = timed  # type: ignore[method-assign]
    return inside


def compare(cluster: str, steps: int) -> list[Row]:
    """Plan and run every strategy on the calibrated ``cluster``, in turns of ``steps``."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in STRATEGIES}
    plans: dict[str, autoplan.Plan] = {}
    for _ in range(TURNS):
        for name, strategy in STRATEGIES.items():
            ranks = autoplan.launch(_train, cluster, strategy, WARM_UP + steps, gpus=RANKS, device="cpu")
            plans[name] = ranks[0][1]
            for of_step in list(zip(*(seconds for seconds, _ in ranks), strict=True))[WARM_UP:]:
                measured[name].append((max(s for s, _ in of_step), max(busy for _, busy in of_step)))
    rows = []
    for name, plan in plans.items():
        clock, busy = zip(*measured[name], strict=True)
        rows.append(
            Row(
                name=name,
                strategy=plan.strategy.describe(),
                predicted_s=plan.predicted.step_time_s,
                measured_s=min(clock),
                median_s=statistics.median(clock),
                computed_s=statistics.quantiles(busy, n=4)[0],
                terms={k: v for k, v in plan.predicted.time_terms.items() if v > 0},
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    print(f"GPT of width {WIDTH}, global batch 32 x 64 tokens, {RANKS} gloo processes")
    for row in rows:
        print(
            f"{row.name}  predicted {row.predicted_s * 1e3:6.1f} ms   measured {row.measured_s * 1e3:6.1f} ms "
            f"(median {row.median_s * 1e3:.1f})   error {row.error:+.1%}"
        )
        print("     " + ", ".join(f"{name} {value * 1e3:.1f}" for name, value in row.terms.items()) + " ms")
        print(
            f"     a rank computes {row.computing_s * 1e3:.1f} ms, its thread {row.computed_s * 1e3:.1f} ms: "
            f"{row.computing_s / row.computed_s - 1:+.1%}"
        )
    within = sum(abs(row.error) <= TARGET for row in rows)
    print(f"{within} of {len(rows)} within {TARGET:.0%}; mean error {statistics.fmean(abs(r.error) for r in rows):.1%}")


def main(*, steps: int, quick: bool, cluster: str | None = None) -> list[Row]:
    from autoplan.calibration import calibrate, write_cluster

    with tempfile.TemporaryDirectory() as folder:
        if cluster is None:
            cluster = str(Path(folder) / "measured.toml")
            write_cluster(calibrate(device="cpu", gpus=RANKS, quick=quick), Path(cluster))
        rows = compare(cluster, steps)
    show(rows)
    return rows


@pytest.mark.benchmark
def test_predicted_against_measured() -> None:
    rows = main(steps=STEPS, quick=False)
    assert all(row.predicted_s > 0 and row.measured_s > 0 for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="calibrate quickly")
    parser.add_argument("--cluster", help="a cluster file that `autoplan calibrate` wrote, instead of calibrating")
    arguments = parser.parse_args()
    main(steps=arguments.steps, quick=arguments.quick, cluster=arguments.cluster)
