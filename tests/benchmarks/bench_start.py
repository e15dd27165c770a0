"""What a person waits for before reading: the help, a plan file explained, and its page in a browser.

Run: ``python -m tests.benchmarks.bench_start [PLAN.json]``. Prints medians of processor seconds and of wall seconds a
command, and, where a Chromium is installed, the milliseconds until the page of the plan has loaded; asserts no clock.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pytest

from autoplan.plan import Plan
from autoplan.report.page import page
from tests.support import chromium

PLAN = Path(__file__).parents[2] / "docs" / "pipeline.json"
REPEATS = 5


def seconds(*arguments: str) -> tuple[float, float]:
    """Processor and wall seconds of one command, the start of Python included."""
    silent = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    started = time.perf_counter()
    command = [sys.executable, "-m", "autoplan.cli", *arguments]
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=silent)
    _, status, used = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, " ".join(command)
    return used.ru_utime + used.ru_stime, time.perf_counter() - started


def report(plan: Path) -> None:
    """A line a command, and one for the page."""
    for arguments in (("--help",), ("explain", str(plan)), ("show", str(plan), "--timeline")):
        runs = [seconds(*arguments) for _ in range(REPEATS)]
        processor, wall = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{processor:6.2f} s processor  {wall:6.2f} s  autoplan {' '.join(arguments)}")
    if chromium.found() is None:
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        file = Path(name) / "plan.html"
        file.write_text(page(Plan.load(plan)), encoding="utf-8")
        with chromium.Chromium(Path(name) / "profile") as browser:
            browser.open(file)
            loaded = browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"{loaded:6.0f} ms  its page in Chromium")


@pytest.mark.benchmark
def test_start() -> None:
    report(PLAN)


if __name__ == "__main__":
    report(Path(sys.argv[1]) if len(sys.argv) > 1 else PLAN)
