"""Leave one source out: refit the GEMM efficiencies on the other sources, predict the one left out.

    python -m tests.regression.fit          # prints the table of data/held_out.txt; under a minute

Fitted is one number a family of cards, the share of the data-sheet peak that large products keep: it moves a step's
time more than all else that is fitted. It is chosen on a grid by the mean absolute error over the family's runs. A
family that only the held-out source has run on takes the mean of the other families' efficiencies: what one would
assume of a card that nobody has published on. Software profiles stay as documented: most belong to one source, whose
held-out error is therefore that of a user whose software is known and whose model and machine are not.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence

from tests.regression.runs import Run, predict_step_s, read_runs

LOWEST, HIGHEST = 0.40, 0.88
POINTS = 5
# Even in 1 / efficiency, in which a step's time is a straight line but where memory takes over from arithmetic.
GRID = tuple(1 / HIGHEST + step * (1 / LOWEST - 1 / HIGHEST) / (POINTS - 1) for step in range(POINTS))
FAMILIES = {"V100": "Volta", "A100": "Ampere", "H100-96GB": "Hopper, 500 W", "H100": "Hopper", "H200": "Hopper"}

# Of one run: its predicted over its published time, minus one, at every efficiency of the grid.
Errors = tuple[float, ...]


def family(run: Run) -> str:
    """Cards that share an efficiency; each of Blackwell's has a power limit of its own."""
    name = run.cluster.device.name
    return next((value for prefix, value in FAMILIES.items() if name.startswith(prefix)), name)


def errors_on_grid(run: Run) -> Errors:
    found = []
    for slowness in GRID:
        device = dataclasses.replace(run.cluster.device, gemm_efficiency=1 / slowness)
        there = dataclasses.replace(run, cluster=dataclasses.replace(run.cluster, device=device))
        found.append(predict_step_s(there) / run.step_time_s - 1)
    return tuple(found)


def at(errors: Errors, efficiency: float) -> float:
    """The error at ``efficiency``, straight between the points of the grid."""
    place = min(max((1 / efficiency - GRID[0]) / (GRID[1] - GRID[0]), 0.0), len(GRID) - 1.001)
    low = int(place)
    return errors[low] + (place - low) * (errors[low + 1] - errors[low])


def best_efficiency(table: Sequence[Errors]) -> float:
    """The efficiency of least mean absolute error, to a hundredth."""
    choices = [LOWEST + 0.01 * step for step in range(round((HIGHEST - LOWEST) * 100) + 1)]
    return min(choices, key=lambda choice: statistics.mean(abs(at(errors, choice)) for errors in table))


def fit(rows: Sequence[tuple[Run, Errors]]) -> dict[str, float]:
    """Efficiency by family."""
    families: dict[str, list[Errors]] = defaultdict(list)
    for run, errors in rows:
        families[family(run)].append(errors)
    return {name: best_efficiency(table) for name, table in families.items()}


def held_out(rows: Sequence[tuple[Run, Errors]], source: str) -> list[float]:
    """Errors of ``source``'s runs with efficiencies that never saw them."""
    fitted = fit([pair for pair in rows if pair[0].source != source])
    unknown = statistics.mean(fitted.values())
    return [at(errors, fitted.get(family(run), unknown)) for run, errors in rows if run.source == source]


def report(rows: Sequence[tuple[Run, Errors]]) -> str:
    """Fitted on all sources, and on all but the one in the row."""
    fitted = fit(rows)
    lines = ["fitted on all: " + ", ".join(f"{name} {value:.2f}" for name, value in sorted(fitted.items())), ""]
    lines.append(f"{'source':<24}{'rows':>5}{'in the fit':>12}{'left out':>10}{'bias':>8}")
    inside, outside = [], []
    for source in dict.fromkeys(run.source for run, _ in rows):
        within = [abs(at(errors, fitted[family(run)])) for run, errors in rows if run.source == source]
        without = held_out(rows, source)
        inside += within
        outside += [abs(error) for error in without]
        lines.append(
            f"{source:<24}{len(within):>5}{statistics.mean(within):>12.1%}"
            f"{statistics.mean(abs(error) for error in without):>10.1%}{statistics.mean(without):>+8.1%}"
        )
    lines.append(f"{'all':<24}{len(inside):>5}{statistics.mean(inside):>12.1%}{statistics.mean(outside):>10.1%}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(report([(run, errors_on_grid(run)) for run in read_runs()]))
