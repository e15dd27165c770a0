"""Time and memory of planning real models, traced from their configs, as a user waits for it.

Run: ``python tests/benchmarks/bench_plan.py [repeats]``. Prints medians, and asserts no clock:

- a line a whole ``autoplan plan`` command, the start of Python and the imports of torch and transformers included:
  wall seconds, processor seconds and the process's largest resident memory;
- a line a model on a cluster: processor seconds of capture (the import of transformers, building the model on meta,
  tracing, layers) in a process that has imported torch and autoplan, the median of several searches after that one
  capture (with the sharding of every kind of layer under every tensor degree), and the largest resident memory. A first
  search, of another model, is not counted: it imports what all searches need. Results that a process keeps between
  searches are dropped before each. The line says whether the median is within its limit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

COMMANDS = (
    ("gpt2", "--gpus", "8xA100-80GB"),
    ("llama3-8b", "--gpus", "8xH100", "--global-batch", "128"),
    ("llama3.1-405b", "--gpus", "2048x8xH100", "--global-batch", "2048", "--seq", "8192"),
)

_CALL = """
import functools, gc, resource, sys, time
import torch
import autoplan
from autoplan.request import AskedModel, Wish, cluster_of, problem_of

def searched(traced, cluster):
    from autoplan.search import search
    for kept in [kept for kept in gc.get_objects() if isinstance(kept, functools._lru_cache_wrapper)]:
        if str(kept.__module__).startswith("autoplan."):
            kept.cache_clear()
    cluster_of("2xH100", None)  # the tables of devices and links are read with the cluster, before a search
    started = time.process_time()
    search(problem_of(traced, cluster, Wish(None, "adamw")))
    return time.process_time() - started

model, gpus, batch, seq, repeats = sys.argv[1:]
cluster = cluster_of(gpus, None)
started = time.process_time()
traced = AskedModel(model, None, None, int(batch), int(seq), None).trace(cluster)
captured = time.process_time() - started
other = cluster_of("2xH100", None)
searched(AskedModel("bert-large", None, None, 8, 128, None).trace(other), other)
each = [searched(traced, cluster) for _ in range(int(repeats))]
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
print(captured, memory, *each)
"""
# Model, GPUs, global batch, tokens, and the seconds that its search should take less than.
CALLS = (
    (("gpt2", "8xA100-80GB", "64", "1024"), 0.1),
    (("llama3-70b", "8x8xH100", "512", "8192"), 0.5),
    (("llama3-70b", "64x8xH100", "1024", "8192"), 0.5),
    (("llama3.1-405b", "2048x8xH100", "2048", "8192"), 0.5),
)
SEARCHES = 5


def measure(arguments: tuple[str, ...]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and peak GiB of one command; its plan goes to a folder that is dropped."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autoplan.cli", "plan", *arguments, "-o", str(Path(folder) / "plan.json")]
        started = time.perf_counter()
        child = os.posix_spawn(sys.executable, command, os.environ, file_actions=_silent())
        _, status, used = os.wait4(child, 0)
        seconds = time.perf_counter() - started
    assert os.waitstatus_to_exitcode(status) == 0, " ".join(command)
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 2**30


def _silent() -> list[tuple[int, int, str, int, int]]:
    return [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]


def measure_call(arguments: tuple[str, ...]) -> tuple[float, float, list[float]]:
    """Processor seconds of capture, peak GiB, and processor seconds of each search, in a process of its own."""
    command = [sys.executable, "-c", _CALL, *arguments, str(SEARCHES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    captured, memory, *each = (float(text) for text in done.stdout.split())
    return captured, memory, each


def report(repeats: int) -> None:
    """One line a command, then one a model on a cluster."""
    for arguments in COMMANDS:
        runs = [measure(arguments) for _ in range(repeats)]
        wall, processor, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{wall:7.1f} s  {processor:7.1f} s processor  {memory:5.2f} GiB  autoplan plan {' '.join(arguments)}")
    for call, limit_s in CALLS:
        captured, memory, each = measure_call(call)
        searched = statistics.median(each)
        print(
            f"capture {captured:5.2f} s, search {searched:5.3f} s processor (least {min(each):5.3f}), "
            f"{'within' if searched < limit_s else 'above'} its limit of {limit_s} s; {memory:5.2f} GiB  "
            f"{call[0]} on {call[1]}, batch {call[2]}"
        )


@pytest.mark.benchmark
def test_whole_commands() -> None:
    report(1)


if __name__ == "__main__":
    report(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
