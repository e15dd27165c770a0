"""``autoplan doctor``: whether this machine can plan and train, in plain words."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

import typer

from autoplan.cli import console, options
from autoplan.explain.text import seconds, size

_PACKAGES = ("torch", "numpy", "networkx", "pulp", "highspy", "pydantic", "transformers")
_LEAST_PYTHON = (3, 11)
_SHARED_MEMORY = "/dev/shm"
_LEAST_SHARED_BYTES = 2**30
_LAUNCHED = 2
_LAUNCH_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``state``: ok, warn (something is not there, and the rest works) or FAIL. ``attempt``: what mends it."""

    state: str
    what: str
    said: str
    attempt: str = ""


def doctor(json: options.Json = False) -> None:
    """Check versions, GPUs, solvers and that processes start and talk to each other.

    Exit code 1: something that planning or training needs does not work.

    Example: autoplan doctor
    """
    with console.progress("Examining this machine"):
        findings = [finding for check in CHECKS for finding in _run(check)]
    failed = any(finding.state == "FAIL" for finding in findings)
    if json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        console.result_json({"schema": 1, "healthy": not failed, "findings": rows})
    else:
        listed = console.table(("", False), ("", False), ("", False))
        listed.show_header = False
        for finding in findings:
            mend = f"\ntry: {finding.attempt}" if finding.attempt else ""
            listed.add_row(finding.state, finding.what, finding.said + mend)
        console.result(listed)
    if failed:
        raise typer.Exit(1)


def _run(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that breaks is a finding too: doctor is asked when things are broken."""
    try:
        return list(check())
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [Finding(state="FAIL", what=check.__name__.strip("_").replace("_", " "), said=said)]


def _python() -> Iterator[Finding]:
    state = "ok" if sys.version_info >= _LEAST_PYTHON else "FAIL"
    yield Finding(state=state, what="python", said=f"{platform.python_version()}, {platform.platform(terse=True)}")


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding(state="ok", what="packages", said=", ".join(found))
    if missing:
        attempt = f"pip install {' '.join(missing)}"
        yield Finding(state="FAIL", what="packages", said=f"not installed: {', '.join(missing)}", attempt=attempt)


def _solvers() -> Iterator[Finding]:
    from autoplan.search.solver import available_solvers

    if found := available_solvers():
        yield Finding(state="ok", what="solvers", said=", ".join(found))
        return
    said = "no MILP solver runs here: plans come from the dynamic program, which is exact too"
    yield Finding(state="warn", what="solvers", said=said, attempt="pip install highspy")


def _gpus() -> Iterator[Finding]:
    import torch

    from autoplan.cluster import local_device_count

    count = local_device_count()
    if not count:
        said = "none that torch sees: planning works, and training on CPU processes (device='cpu')"
        yield Finding(state="warn", what="GPUs", said=said)
        return
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(state="ok", what=f"GPU {index}", said=f"{properties.name}, {size(properties.total_memory)}")
    if not torch.distributed.is_nccl_available():
        yield Finding(state="FAIL", what="NCCL", said="this build of torch has none: GPUs cannot talk to each other")


def _shared_memory() -> Iterator[Finding]:
    if not os.path.isdir(_SHARED_MEMORY):
        return
    space = os.statvfs(_SHARED_MEMORY)
    whole = space.f_blocks * space.f_frsize
    small = whole < _LEAST_SHARED_BYTES
    yield Finding(
        state="warn" if small else "ok",
        what=_SHARED_MEMORY,
        said=size(whole) + (": NCCL and data loaders want more" if small else ""),
        attempt="in a container: --shm-size 16g" if small else "",
    )


def _processes() -> Iterator[Finding]:
    import time

    from autoplan.runtime.launch import launch

    started = time.perf_counter()
    sums = launch(_sum_of_ranks, gpus=_LAUNCHED, device="cpu", deadline_s=_LAUNCH_DEADLINE_S)
    right = sums == [sum(range(1, _LAUNCHED + 1))] * _LAUNCHED
    said = f"{_LAUNCHED} started and summed over gloo in {seconds(time.perf_counter() - started)}"
    yield Finding(
        state="ok" if right else "FAIL", what="processes", said=said if right else f"{said}, and got {sums} for 3"
    )


def _sum_of_ranks() -> int:
    import torch
    import torch.distributed as dist

    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value)
    return int(value.item())


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _solvers,
    _gpus,
    _shared_memory,
    _processes,
)
