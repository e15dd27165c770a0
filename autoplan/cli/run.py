"""``autoplan run``: a training script on local processes, one a GPU, with torchrun's environment variables.

``AUTOPLAN_GPUS`` and ``AUTOPLAN_DEVICE`` tell ``autoplan.compile`` in the script what it was started for.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli import completions, console
from autoplan.errors import ClusterError, ModelError

MOST_PROCESSES = 1024  # no machine has more GPUs than a few tens; each is a process with torch in it


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="The training script; its arguments follow it.")],
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus", metavar="SPEC", help="4, or 4xH100: processes on this machine.", autocompletion=completions.specs
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option("--device", help="cuda, or cpu for gloo processes.", autocompletion=completions.devices),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, metavar="N", help="Go on without failed ranks, at most N times.")
    ] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print how it ended as one JSON object; the script's output goes to stderr.")
    ] = False,
) -> None:
    """Run a script on local processes, one a GPU. What follows `--` goes to the script untouched.

    Exits with the failed process's own code, whatever it is: 0, 1 and 3 are then the script's, and not what other
    commands mean by them. Where autoplan itself ends it, an `error:` line on stderr says so. With --max-restarts the
    script starts again on the ranks that did not fail: autoplan.compile plans for them, and Checkpoints.resume() goes
    on from the latest checkpoint.

    Example: autoplan run train.py --gpus 4 --device cpu -- --steps 20
    """
    processes = _processes(gpus)
    if not Path(script).is_file():
        raise ModelError(f"no such script: {script}", attempt="autoplan run train.py --gpus 4")
    chosen = _device(device, processes)

    with console.progress("Starting"):  # torch takes seconds to load
        from autoplan.runtime.supervise import Job, supervise
    job = Job(
        command=(script, *context.args),
        device=chosen,
        kind=gpus.strip().removeprefix("+").lstrip("0123456789"),
        max_restarts=max_restarts,
    )
    with _output_beside(json):
        code = supervise(job, processes)
    if json:
        ended = {"exit_code": code, "script": script, "device": chosen, "processes": processes}
        console.result_json({"schema": 1, **ended})
    raise typer.Exit(code)


@contextlib.contextmanager
def _output_beside(json: bool) -> Iterator[None]:
    """What processes that are started inside print goes to stderr where ``json`` has stdout."""
    if not json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _processes(gpus: str) -> int:
    match = re.fullmatch(r"\s*([+-]?\d+)(?:\s*x\s*[A-Za-z].*)?", gpus)
    if match is None:
        raise ClusterError(
            f"run starts the processes of one machine, and {gpus!r} is not a number of them",
            legal="4, or 4xH100",
            attempt="on several machines: torchrun --nnodes ... SCRIPT.py on each",
        )
    count = int(match[1])
    if count < 1:
        raise ClusterError(f"number of GPUs: {count}", where=gpus, legal="1 or more")
    return count


def _device(device: str | None, processes: int) -> str:
    if device not in (None, "cpu", "cuda"):
        raise ClusterError(f"unknown device {device!r}", legal="cuda, cpu")
    if device == "cpu" and processes > MOST_PROCESSES:
        raise ClusterError(
            f"{processes} processes are more than one machine can start",
            legal=f"1 to {MOST_PROCESSES}",
            attempt="on several machines: torchrun --nnodes ... SCRIPT.py on each",
        )
    if device == "cpu":
        return "cpu"
    from autoplan.cluster import local_device_count

    found = local_device_count()
    if found < processes:
        raise ClusterError(
            f"{processes} GPUs were asked for and this machine has {found}",
            legal=f"1 to {found}" if found else "--device cpu, since there is none",
            attempt="--device cpu runs the same program on gloo processes",
        )
    return "cuda"
