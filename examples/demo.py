"""One small GPT, three runs: a single process, the plan that autoplan picks for 4 CPU processes, and a forced
pipeline of 2 stages x tensor parallelism over 2. The losses of every step and the final weights must agree.

    make demo
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_gpt import BATCH, CONTEXT, GPT, STEPS, train_alone, train_planned

import autoplan

PROCESSES = 4
# float32 sums in another order on each plan, and AdamW amplifies that step by step; a wrong plan is off by far more.
AGREEMENT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    title: str
    losses: list[float]
    weights: dict[str, Tensor]
    seconds: float


def planned(steps: int, strategy: dict[str, int] | None) -> tuple[list[float], dict[str, Tensor], autoplan.Plan]:
    """What each process of a planned run executes."""
    return train_planned(steps, gpus=PROCESSES, device="cpu", strategy=strategy)


def run_planned(title: str, strategy: dict[str, int] | None, steps: int) -> Run:
    say(f"training under {title} ...")
    started = time.perf_counter()
    losses, weights, plan = autoplan.launch(planned, steps, strategy, gpus=PROCESSES, device="cpu")[0]
    seconds = time.perf_counter() - started
    return Run(title=f"{title}: {plan.strategy.describe()}", losses=losses, weights=weights, seconds=seconds)


def run_alone(steps: int) -> Run:
    say("training in a single process ...")
    torch.set_num_threads(1)
    started = time.perf_counter()
    losses, weights = train_alone(steps)
    return Run(title="a single process", losses=losses, weights=weights, seconds=time.perf_counter() - started)


def show(runs: list[Run], steps: int) -> float:
    """Print the three curves and how far they are apart; returns the largest difference of a loss."""
    single = runs[0]
    curves = Table(title="loss (nats a byte)", title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    curves.add_column("step", justify="right")
    for letter, _ in zip("ABC", runs, strict=True):
        curves.add_column(letter, justify="right")
    curves.add_column("largest difference", justify="right")
    for step in [*range(0, steps, steps // 10), steps - 1]:
        values = [run.losses[step] for run in runs]
        curves.add_row(str(step), *(f"{value:.6f}" for value in values), f"{max(values) - min(values):.1e}")
    console = Console(highlight=False)
    console.print(curves)
    console.print()
    worst = 0.0
    for letter, run in zip("ABC", runs, strict=True):
        console.print(f"{letter}  {run.title} ({run.seconds:.0f} s)")
        if run is single:
            continue
        loss = max(abs(a - b) for a, b in zip(run.losses, single.losses, strict=True))
        weight = max((run.weights[name] - value).abs().max().item() for name, value in single.weights.items())
        console.print(f"   against A: losses of {steps} steps within {loss:.1e}, final weights within {weight:.1e}")
        worst = max(worst, loss)
    return worst


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parameters = sum(parameter.numel() for parameter in GPT().parameters())
    say(f"A GPT of {parameters:,} parameters reads Python's standard library: {BATCH} x {CONTEXT} bytes a step")
    runs = [
        run_alone(STEPS),
        run_planned("the plan autoplan picks", None, STEPS),
        run_planned("a forced plan", {"pipeline": 2, "tensor": 2}, STEPS),
    ]
    say("")
    worst = show(runs, STEPS)
    agree = worst <= AGREEMENT
    print(f"\nThe loss curves {'agree' if agree else 'DO NOT AGREE'}: {worst:.1e} apart at most.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
