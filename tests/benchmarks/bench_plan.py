"""Time and memory of planning real models, traced from their configs, as a user waits for it.

Run: ``python tests/benchmarks/bench_plan.py [repeats]``. Prints medians, and asserts no clock:

- a line a whole ``autoplan plan`` command, the start of Python and the imports of torch and transformers included:
  wall seconds, processor seconds and the process's largest resident memory;
- a line a call of :func:`autoplan.plan` in a fresh process that has imported torch and autoplan: processor seconds of
  capture (the import of transformers, building the model on meta, tracing, layers) and of the search after it (with
  the sharding of every kind of layer under every tensor degree), and the largest resident memory.
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

# Processor seconds at which a plan's phases end: problem_of stands between capture and search.
_CALL = """
import resource, sys, time
import torch
import autoplan, autoplan.api, autoplan.search
from autoplan.request import problem_of

ends = []
def marked(*arguments):
    ends.append(time.process_time())
    return problem_of(*arguments)

autoplan.api.problem_of = marked
started = time.process_time()
model, gpus, batch, seq = sys.argv[1:]
autoplan.plan(model, gpus=gpus, global_batch=int(batch), seq=int(seq))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
print(ends[0] - started, time.process_time() - ends[0], memory)
"""
CALLS = (
    ("gpt2", "8xA100-80GB", "64", "1024"),
    ("llama3-70b", "8x8xH100", "512", "8192"),
    ("llama3-70b", "64x8xH100", "1024", "8192"),
    ("llama3.1-405b", "2048x8xH100", "2048", "8192"),
)


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


def measure_call(arguments: tuple[str, ...]) -> tuple[float, ...]:
    """Processor seconds of capture and of search, and peak GiB, of one call in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _CALL, *arguments], capture_output=True, text=True, check=True)
    return tuple(float(text) for text in done.stdout.split())


def report(repeats: int) -> None:
    """One line a command, then one a call."""
    for arguments in COMMANDS:
        runs = [measure(arguments) for _ in range(repeats)]
        wall, processor, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{wall:7.1f} s  {processor:7.1f} s processor  {memory:5.2f} GiB  autoplan plan {' '.join(arguments)}")
    for call in CALLS:
        phases = [measure_call(call) for _ in range(repeats)]
        captured, searched, memory = (statistics.median(column) for column in zip(*phases, strict=True))
        print(
            f"capture {captured:5.2f} s + search {searched:5.2f} s = {captured + searched:5.2f} s processor  "
            f"{memory:5.2f} GiB  {call[0]} on {call[1]}, batch {call[2]}"
        )


@pytest.mark.benchmark
def test_whole_commands() -> None:
    report(1)


if __name__ == "__main__":
    report(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
