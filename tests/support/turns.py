"""Ways to take a training step, timed in turns on the same ranks: what else runs on a machine slows all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

Step = Callable[[], float]  # takes a step and returns its loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What one rank measured of one way: by turn the clock's seconds and its process's; the losses of all steps."""

    clock_s: tuple[float, ...]
    process_s: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Medians over the turns: the slowest rank's clock, and the mean processor time of the ranks. ``clock`` has every
    turn. ``losses``: the mean over the ranks that know one."""

    clock_s: float
    process_s: float
    clock: tuple[float, ...]
    losses: tuple[float, ...]


def take_turns(ways: Mapping[str, Step], *, turns: int, warm_up: int = 3) -> dict[str, Turns]:
    """On the calling rank: in every turn one step of each way, begun together by all ranks; another goes first each
    time."""
    clock: dict[str, list[float]] = {name: [] for name in ways}
    process: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(-warm_up, turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            started, busy = time.perf_counter(), time.process_time()
            losses[name].append(ways[name]())
            if turn >= 0:
                clock[name].append(time.perf_counter() - started)
                process[name].append(time.process_time() - busy)
    return {
        name: Turns(clock_s=tuple(clock[name]), process_s=tuple(process[name]), losses=tuple(losses[name]))
        for name in ways
    }


def over_ranks(ranks: Sequence[Mapping[str, Turns]]) -> dict[str, Timed]:
    """What all ranks measured together."""
    found = {}
    for name in ranks[0]:
        clock = [max(turn) for turn in zip(*(rank[name].clock_s for rank in ranks), strict=True)]
        process = [statistics.fmean(turn) for turn in zip(*(rank[name].process_s for rank in ranks), strict=True)]
        found[name] = Timed(
            clock_s=statistics.median(clock),
            process_s=statistics.median(process),
            clock=tuple(clock),
            losses=tuple(map(_known_mean, zip(*(rank[name].losses for rank in ranks), strict=True))),
        )
    return found


def _known_mean(losses: Sequence[float]) -> float:
    return statistics.fmean(loss for loss in losses if not math.isnan(loss))
