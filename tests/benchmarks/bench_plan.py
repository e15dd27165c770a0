"""Time and memory of whole ``autoplan plan`` commands, as a user waits for them.

Run: ``python tests/benchmarks/bench_plan.py [repeats]``. Prints a line a command: medians of wall seconds, processor
seconds and the process's largest resident memory. Asserts no clock.
"""

from __future__ import annotations

import os
import statistics
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


def report(repeats: int) -> None:
    """One line a command."""
    for arguments in COMMANDS:
        runs = [measure(arguments) for _ in range(repeats)]
        wall, processor, memory = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{wall:7.1f} s  {processor:7.1f} s processor  {memory:5.2f} GiB  autoplan plan {' '.join(arguments)}")


@pytest.mark.benchmark
def test_whole_commands() -> None:
    report(1)


if __name__ == "__main__":
    report(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
