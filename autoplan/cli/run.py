"""``autoplan run``: a training script on local processes, one a GPU, under torchrun.

``AUTOPLAN_GPUS`` and ``AUTOPLAN_DEVICE`` tell ``autoplan.compile`` in the script what it was started for.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from autoplan.errors import ClusterError, ModelError, RuntimeFault

# Elastic restarts would repeat a deterministic failure: the first one ends the run.
_TORCHRUN = ("--standalone", "--max-restarts", "0", "--monitor-interval", "0.1")
_SIGNALLED = 128


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", help="The training script; its arguments follow it.")],
    gpus: Annotated[str, typer.Option("--gpus", metavar="SPEC", help="4, or 4xH100: processes on this machine.")],
    device: Annotated[str | None, typer.Option("--device", help="cuda, or cpu for gloo processes.")] = None,
) -> None:
    """Run a script under torchrun, one process a GPU. What follows `--` goes to the script untouched.

    Exits with the failed process's own code.
    """
    processes = _processes(gpus)
    if not Path(script).is_file():
        raise ModelError(f"no such script: {script}", attempt="autoplan run train.py --gpus 4")
    chosen = _device(device, processes)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    os.environ["AUTOPLAN_GPUS"] = gpus
    os.environ["AUTOPLAN_DEVICE"] = chosen
    raise typer.Exit(_torchrun([*_TORCHRUN, "--nproc-per-node", str(processes), script, *context.args]))


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


def _torchrun(arguments: list[str]) -> int:
    """Run torchrun in this process; 0, or the exit code of the process that failed first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            raise RuntimeFault(f"rank {rank} was ended by signal {-failure.exitcode}") from None
        return failure.exitcode
    except SignalException as error:  # Ctrl-C, or the batch system's notice: torchrun has stopped the others
        return _SIGNALLED + error.sigval.value
    return 0
