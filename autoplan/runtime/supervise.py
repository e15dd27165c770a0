"""A script's ranks as processes of this machine: started, watched, ended together, and started again without those that
failed.

Each attempt has a store of its own, in this process, so that no address of an earlier one is found in it, and ranks
have torchrun's environment variables (``TORCHELASTIC_USE_AGENT_STORE`` tells torch of the store). A rank that fails
leaves its message in a file instead of printing it: one is shown, that of the rank that failed first. Where restarts
are left, the ranks that did not fail start again, fewer than before: ``AUTOPLAN_GPUS`` tells ``autoplan.compile``,
which plans for them, and :meth:`Checkpoints.resume` goes on from the latest checkpoint with the same global batch.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from autoplan.errors import AutoplanError
from autoplan.runtime.faults import RankFault, is_peer_failure
from autoplan.runtime.launch import GRACE_S, LEAVE_S, LOOK_S, StopClock, lost, silent_fault
from autoplan.runtime.progress import DIRECTORY_VARIABLE, FAULT_SUFFIX, LAUNCHER_VARIABLE

POLL_S = 0.05
_SIGNALLED = 128
_FAILED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """``command``: the script and its arguments. ``kind``: what follows the count in ``AUTOPLAN_GPUS`` ("xH100")."""

    command: tuple[str, ...]
    device: str
    kind: str = ""
    max_restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """``fault`` None: all ranks are done. ``failed``: the ranks that failed by themselves, not for want of others."""

    fault: AutoplanError | None = None
    code: int = 0
    failed: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    stopped: StopClock = field(default_factory=StopClock)
    is_stopped_for_good: bool = False


class _Signalled(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def supervise(job: Job, ranks: int) -> int:
    """Run the job on ``ranks`` processes to its end; 0, or the exit code of the rank that failed first.

    Messages go to stderr. Raises RuntimeFault where a signal ended that rank.
    """
    devices = _visible_devices(ranks) if job.device == "cuda" else [""] * ranks
    previous = signal.signal(signal.SIGTERM, _raise_signalled)
    try:
        for attempt in range(job.max_restarts + 1):
            outcome = _attempt(job, devices, attempt)
            if outcome.fault is None:
                return 0
            left = [device for rank, device in enumerate(devices) if rank not in outcome.failed]
            if attempt == job.max_restarts or not left:
                return _give_up(outcome, everyone=not left and attempt < job.max_restarts)
            _say(f"{outcome.fault}")
            _say(f"restart {attempt + 1} of {job.max_restarts}, on {len(left)} of {len(devices)} ranks")
            devices = left
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT
    except _Signalled as error:
        return _SIGNALLED + error.number
    finally:
        signal.signal(signal.SIGTERM, previous)
    raise AssertionError("the last attempt returns")


def _raise_signalled(number: int, _: object) -> None:
    raise _Signalled(number)


def _say(text: str) -> None:
    sys.stderr.write(f"autoplan: {text}\n")
    sys.stderr.flush()


def _give_up(outcome: _Outcome, *, everyone: bool) -> int:
    assert outcome.fault is not None
    if everyone:
        _say("every rank failed by itself, and a restart would fail alike")
    if outcome.code <= 0:
        raise outcome.fault
    _say(str(outcome.fault))
    return outcome.code


def _visible_devices(ranks: int) -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[:ranks] if named else [str(index) for index in range(ranks)]


def _attempt(job: Job, devices: Sequence[str], attempt: int) -> _Outcome:
    world = len(devices)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = Path(tempfile.mkdtemp(prefix="autoplan-"))
    ranks: list[_Rank] = []
    try:
        for number in range(world):
            environment = {
                **os.environ,
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "AUTOPLAN_GPUS": f"{world}{job.kind}",
                "AUTOPLAN_DEVICE": job.device,
                "AUTOPLAN_RESTARTS": str(attempt),
                DIRECTORY_VARIABLE: str(told),
                LAUNCHER_VARIABLE: str(os.getpid()),
            }
            environment.setdefault("OMP_NUM_THREADS", "1")
            if job.device == "cuda":
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            process = subprocess.Popen([sys.executable, *job.command], env=environment)
            ranks.append(_Rank(number=number, process=process))
        return _watch(ranks, told)
    finally:
        _stop(ranks)
        shutil.rmtree(told, ignore_errors=True)


def _watch(ranks: list[_Rank], told: Path) -> _Outcome:
    """Until all are done, or until some failed and the others had a moment to say why."""
    end: float | None = None
    look = time.monotonic() + LOOK_S
    while any(rank.process.poll() is None for rank in ranks) and (end is None or time.monotonic() < end):
        if time.monotonic() >= look:
            look = time.monotonic() + LOOK_S
            for rank in ranks:
                rank.is_stopped_for_good |= rank.process.poll() is None and rank.stopped.seen(rank.process.pid)
        if end is None and any(rank.process.returncode or rank.is_stopped_for_good for rank in ranks):
            end = time.monotonic() + GRACE_S
        time.sleep(POLL_S)
    faults = {rank.number: _fault(rank, told) for rank in ranks if rank.process.poll() or rank.is_stopped_for_good}
    if not faults:
        return _Outcome()
    gone = [number for number, fault in faults.items() if isinstance(fault, RankFault) and fault.action == "lost"]
    own = gone or [number for number, fault in faults.items() if not is_peer_failure(fault)]
    if own:
        code = ranks[own[0]].process.returncode
        return _Outcome(fault=faults[own[0]], code=_FAILED if code is None else code, failed=tuple(own))
    silent = [rank.number for rank in ranks if rank.process.returncode is None]
    fault = silent_fault(silent, next(iter(faults.values())), told)
    return _Outcome(fault=fault, code=_FAILED, failed=tuple(silent or faults))


def _fault(rank: _Rank, told: Path) -> AutoplanError:
    """What a failed rank left behind, or what its end says."""
    code = rank.process.returncode
    path = told / f"{rank.number}{FAULT_SUFFIX}"
    if path.exists():
        return pickle.loads(path.read_bytes())
    if code is not None and code > 0:  # it has said why, or meant to
        return RankFault(f"rank {rank.number} left with exit code {code}", rank=rank.number)
    return lost(rank.number, code, told)


def _stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            if rank.stopped.stopped:
                rank.process.kill()  # it does not hear anything else
            else:
                rank.process.terminate()
    end = time.monotonic() + LEAVE_S
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
