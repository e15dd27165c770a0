"""Start one process a GPU, and bring all of them down when one fails.

Under ``torchrun`` the ranks are there already: :func:`ensure_process_group` makes the group from its environment. From
a script or a notebook :func:`launch` starts them: forked for CPU (0.3 s for four ranks; spawning costs 16 s), spawned
for CUDA, which does not survive a fork. A fork gives each rank private copies of the model's tensors; spawned ranks
would *share* a CPU model's memory, so its tensors are cloned before ``fn`` runs.

A rank's exception reaches the caller as a :class:`RankFault` with the original traceback's text; the others are
terminated at once, and killed if they do not leave.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from autoplan.errors import AutoplanError, StrategyError
from autoplan.runtime.faults import RankFault, is_peer_failure
from autoplan.runtime.progress import DIRECTORY_VARIABLE, LAUNCHER_VARIABLE, WATCH, last_place, tell

CPU_TIMEOUT_S = 60.0  # how long a rank waits for another before it gives up
CUDA_TIMEOUT_S = 600.0  # a first step compiles kernels and fills caches, unevenly over the ranks
COMPILE_S = 600.0  # how much longer where stages are compiled at their first run: one rank's may take that much longer
GRACE_S = 1.5  # after a failure: how long to wait for the report of the rank that really failed
LOOK_S = 1.0  # how often to look for stopped ranks
STOPPED_LOOKS = 5  # after how many looks in a row a stopped rank is a fault
LEAVE_S = 5.0  # between asking a process to leave and killing it
WRITER_NAME = "autoplan-checkpoint"  # threads that a rank which has done its work waits for
NEVER = datetime.timedelta(days=365)
_DONE_KEY = "autoplan/done"
_TIMEOUT_VARIABLE = "AUTOPLAN_TIMEOUT_S"


def how_to_launch(gpus: int, device: str) -> str:
    """The ways to start ``gpus`` ranks on ``device``, in words."""
    kind = device.split(":")[0]
    return (
        f"torchrun --nproc-per-node {gpus} script.py; or `autoplan run script.py --gpus {gpus} --device {kind}`; or, "
        f'from a script or a notebook, autoplan.launch(train, gpus={gpus}, device="{kind}")'
    )


def group_timeout(device_type: str) -> datetime.timedelta:
    """How long a rank waits for another; never torch's default of half an hour."""
    default = CUDA_TIMEOUT_S if device_type == "cuda" else CPU_TIMEOUT_S
    return datetime.timedelta(seconds=float(os.environ.get(_TIMEOUT_VARIABLE, default)))


def compile_timeout(device_type: str) -> datetime.timedelta:
    """:func:`group_timeout` of ranks that compile their stages, which a hang can't be told from."""
    return group_timeout(device_type) + datetime.timedelta(seconds=COMPILE_S)


def wait_longer(timeout: datetime.timedelta) -> None:
    """Let the group of all ranks, which the user or torchrun may have made, wait as long from now on."""
    dist.distributed_c10d._set_pg_timeout(timeout)


def ensure_process_group(device: str | torch.device) -> int:
    """The number of ranks: of the process group there is, or of one made from ``torchrun``'s environment; 1 without.

    Raises StrategyError where ranks were launched on a machine without GPUs and CPU ranks were not asked for.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "RANK" not in os.environ:
        return 1
    kind = str(device).split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise StrategyError(
            f"{world} ranks were launched and this machine has no GPU",
            legal='device="cpu": gloo processes, for tests and demonstrations',
            attempt='autoplan.compile(..., device="cpu"), or `autoplan run --device cpu`',
        )
    if kind == "cuda":
        local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", timeout=group_timeout(kind), device_id=local)
    else:
        dist.init_process_group("gloo", timeout=group_timeout(kind))
    _obey_launcher()
    return world


def _obey_launcher() -> None:
    """A rank of `autoplan run` dies with it, and leaves its fault to it, which shows one of all ranks'."""
    launcher = os.environ.get(LAUNCHER_VARIABLE)
    if launcher is None:
        return
    _die_with_parent()
    if os.getppid() != int(launcher):
        os._exit(3)
    rank, show = dist.get_rank(), sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            show(kind, error, trace)
            return
        tell(as_fault(error, rank, "".join(traceback.format_exception(kind, error, trace))), rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no destructors: a process group that waits for a dead peer would hang here

    sys.excepthook = leave


def launch(
    fn: Callable[..., Any],
    *args: Any,
    gpus: int = 4,
    device: str = "cpu",
    timeout_s: float | None = None,
    deadline_s: float | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on ``gpus`` ranks of this machine and return what each returned, by rank.

    Each rank has ``torchrun``'s environment variables and an initialised process group (gloo for ``device="cpu"``, nccl
    for ``"cuda"``). ``timeout_s``: how long a rank waits for another (60 s on CPU, 600 s on CUDA where not given);
    ``deadline_s``: how long the whole run may take (no limit where not given). What ranks return must be picklable; for
    CUDA so must ``fn``, as a function of an importable module.

    Raises RuntimeFault (:class:`RankFault`) when a rank raised, was killed or overran the deadline; an AutoplanError
    that a rank raised is raised as it is.
    """
    _check(gpus, device)
    if device == "cuda":
        _check_importable(fn)
    seconds = timeout_s or (CUDA_TIMEOUT_S if device == "cuda" else CPU_TIMEOUT_S)
    # The meeting point is rank 0's, never this process's: a store's thread here would be forked in mid-air, and one
    # launch in twelve then hangs. Its socket is bound here, so that no other program can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    workers: list[_Worker] = []
    progress = tempfile.mkdtemp(prefix="autoplan-")  # where ranks say what they do
    try:
        for rank in range(gpus):
            here, there = context.Pipe(duplex=False)
            seat = _Seat(
                rank=rank,
                world=gpus,
                port=port,
                listener=listener.fileno() if device == "cpu" and rank == 0 else None,
                device=device,
                timeout_s=seconds,
                progress=progress,
            )
            process = context.Process(target=_work, args=(seat, there, fn, args), name=f"autoplan-rank-{rank}")
            if rank == 0 and device != "cpu":
                listener.close()  # a spawned rank inherits no socket: it binds the port itself
            process.start()
            there.close()  # later children must not inherit it, else a dead rank's pipe never ends
            workers.append(_Worker(rank=rank, process=process, connection=here))
        return _collect(workers, deadline_s, Path(progress))
    except BaseException:
        _ask_to_leave(workers)
        raise
    finally:
        listener.close()
        _see_off(workers)
        shutil.rmtree(progress, ignore_errors=True)


def _check_importable(fn: Callable[..., Any]) -> None:
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        raise StrategyError(
            f"`{getattr(fn, '__qualname__', fn)}` cannot be sent to new processes",
            legal="a function at the top of an importable module: CUDA ranks are new processes and import it",
            attempt="move it to a file of its own and import it, or run a script under torchrun",
        ) from None


def _check(gpus: int, device: str) -> None:
    if gpus < 1:
        raise StrategyError(f"cannot launch on {gpus} GPUs", legal="1 or more")
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise StrategyError(
            "autoplan.launch was called by a rank that is launched already",
            legal="one of both: torchrun (or `autoplan run`), or autoplan.launch",
            attempt="call the function itself under torchrun",
        )
    if device not in ("cpu", "cuda"):
        raise StrategyError(f"no ranks can be launched on device {device!r}", legal='"cpu" or "cuda"')
    if device == "cuda" and torch.cuda.device_count() < gpus:
        raise StrategyError(
            f"{gpus} ranks were asked for and this machine has {torch.cuda.device_count()} GPUs",
            legal="one rank a GPU",
            attempt=f'gpus={torch.cuda.device_count()}, or device="cpu" for a demonstration',
        )


# ------------------------------------------------------------------------------------------------------ inside a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """What a worker needs to become a rank."""

    rank: int
    world: int
    port: int
    listener: int | None
    device: str
    timeout_s: float
    progress: str


def _work(seat: _Seat, connection: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    code = 0

    def report_hang(fault: RankFault) -> None:
        connection.send(("error", pickle.dumps(fault)))
        os._exit(3)

    WATCH.report = report_hang
    store = None
    try:
        store = _take_seat(seat)
        _own_memory(args)
        report = ("result", pickle.dumps(fn(*args)))
        _finish_writing()
    except BaseException as error:
        code = 3
        report = ("error", pickle.dumps(as_fault(error, seat.rank, traceback.format_exc())))
    connection.send(report)
    connection.close()
    if store is not None and code == 0:
        _leave(seat, store)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no destructors: a process group that waits for a dead peer would hang here


def _leave(seat: _Seat, store: dist.TCPStore) -> None:
    """Say that this rank is done; rank 0, whose store the others still meet at, waits until all are.

    A rank that fails never says so: the launching process then ends this one.
    """
    try:
        store.set(f"{_DONE_KEY}/{seat.rank}", "")
        if seat.rank == 0:
            store.wait([f"{_DONE_KEY}/{rank}" for rank in range(seat.world)], NEVER)
    except RuntimeError:  # the store is gone, or nobody came: there is nothing left to wait for
        return


def _take_seat(seat: _Seat) -> dist.TCPStore:
    """Become a rank: its environment and its process group. The store where the ranks meet."""
    _die_with_parent()
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(seat.world),
        LOCAL_WORLD_SIZE=str(seat.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.port),
        AUTOPLAN_DEVICE=seat.device,
    )
    os.environ[_TIMEOUT_VARIABLE] = str(seat.timeout_s)
    os.environ[DIRECTORY_VARIABLE] = seat.progress
    timeout = datetime.timedelta(seconds=seat.timeout_s)
    store = dist.TCPStore(
        "127.0.0.1",
        seat.port,
        world_size=seat.world,
        is_master=seat.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=seat.listener,
    )
    if seat.device == "cuda":
        device = torch.device("cuda", seat.rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=seat.rank, world_size=seat.world, timeout=timeout, device_id=device
        )
    else:
        torch.set_num_threads(1)  # a forked process cannot use the threads that its parent's OpenMP had
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.world, timeout=timeout)
    return store


def _finish_writing() -> None:
    """Let checkpoints that are being written be written: the process ends without waiting for threads."""
    for thread in threading.enumerate():
        if thread.name.startswith(WRITER_NAME):
            thread.join()


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the launching one is gone, however it went."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _own_memory(args: tuple[Any, ...]) -> None:
    """Undo the sharing of CPU tensors that were sent to a spawned process: ranks must not train one memory."""
    for value in args:
        if isinstance(value, torch.nn.Module):
            for tensor in (*value.parameters(), *value.buffers()):
                if tensor.is_shared():
                    tensor.data = tensor.data.clone()


def as_fault(error: BaseException, rank: int, text: str) -> AutoplanError:
    """The error of a rank, with its traceback's text where it is none of ours that explains itself."""
    if isinstance(error, RankFault):
        error.traceback_text = error.traceback_text or text
        error.rank = rank if error.rank is None else error.rank
    if isinstance(error, AutoplanError):
        return error
    return RankFault(
        f"rank {rank} raised {type(error).__name__}: {error}", rank=rank, traceback_text=text, action="train"
    )


# ------------------------------------------------------------------------------------------ in the launching process


@dataclass(slots=True, kw_only=True)
class _Worker:
    rank: int
    process: Any
    connection: Connection
    result: Any = None
    done: bool = False
    stopped: StopClock = field(default_factory=lambda: StopClock())


def _collect(workers: list[_Worker], deadline_s: float | None, progress: Path) -> list[Any]:
    end = time.monotonic() + deadline_s if deadline_s else None
    failures: list[AutoplanError] = []
    while any(not worker.done for worker in workers):
        if failures and end is not None and time.monotonic() >= end:
            break
        _take_reports(workers, failures, end, progress)
        if failures and (end is None or end > time.monotonic() + GRACE_S):
            end = time.monotonic() + GRACE_S
        if not failures and end is not None and time.monotonic() >= end:
            busy = ", ".join(str(w.rank) for w in workers if not w.done)
            raise RankFault(
                f"the run took longer than its deadline of {deadline_s:g} s; ranks not done: {busy}",
                attempt="a larger deadline_s, or look for a rank that waits for itself",
            )
    if failures:
        silent = [worker.rank for worker in workers if not worker.done]
        raise first_cause(failures, silent, progress)
    return [worker.result for worker in workers]


def _take_reports(workers: list[_Worker], failures: list[AutoplanError], end: float | None, progress: Path) -> None:
    """Wait a while, at most to the end of the patience, for the next reports, and note them; look for the stopped."""
    busy = {worker.connection: worker for worker in workers if not worker.done}
    patience = LOOK_S if end is None else max(0.0, min(LOOK_S, end - time.monotonic()))
    sentinels = {worker.process.sentinel: worker for worker in busy.values()}
    ready = multiprocessing.connection.wait([*busy, *sentinels], timeout=patience)
    for worker in {id(w): w for w in (busy.get(r) or sentinels[r] for r in ready)}.values():  # type: ignore[call-overload]
        worker.done = True
        try:
            kind, content = worker.connection.recv() if worker.connection.poll() else ("lost", b"")
        except EOFError:
            kind, content = "lost", b""
        if kind == "result":
            worker.result = pickle.loads(content)
        elif kind == "error":
            failures.append(pickle.loads(content))
        else:
            worker.process.join(LEAVE_S)
            failures.append(lost(worker.rank, worker.process.exitcode, progress))
    if not ready:
        for worker in busy.values():
            if worker.stopped.seen(worker.process.pid):
                failures.append(lost(worker.rank, None, progress))


class StopClock:
    """Whether a process has been stopped (SIGSTOP) at several looks in a row, which a mere job control is not."""

    def __init__(self) -> None:
        self._seen, self.stopped = 0, False

    def seen(self, process: int) -> bool:
        """Look at it, and say whether it has been stopped for long; True once."""
        try:
            self.stopped = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        except (OSError, IndexError):  # gone, or no Linux
            self.stopped = False
        self._seen = self._seen + 1 if self.stopped else 0
        return self._seen == STOPPED_LOOKS


def lost(rank: int, code: int | None, progress: Path) -> RankFault:
    """A rank that left with ``code`` and said nothing, or that was stopped (None)."""
    how = "is stopped (SIGSTOP)" if code is None else f"left with exit code {code} and said nothing"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name} and said nothing"
    where = last_place(progress, rank)
    return RankFault(
        f"rank {rank} {how}" + (f"; last seen: {where}" if where else ""),
        rank=rank,
        action="lost",
        attempt="" if code is None else "out of memory? see the system's log (dmesg)",
    )


def first_cause(failures: list[AutoplanError], silent: list[int], progress: Path) -> AutoplanError:
    """The failure that the others echo: a lost rank, else the first that does not blame a peer, else ranks that said
    nothing while the others waited for them."""
    gone = [f for f in failures if isinstance(f, RankFault) and f.action == "lost"]
    own = [f for f in failures if not is_peer_failure(f)]
    return (gone or own or [silent_fault(silent, failures[0], progress)])[0]


def silent_fault(silent: list[int], echo: AutoplanError, progress: Path) -> AutoplanError:
    """``echo``, a failure for want of others, with those that it must have waited for, where they are known."""
    if not silent:
        return echo
    seen = [f"rank {rank}, last seen: {last_place(progress, rank) or 'before its first step'}" for rank in silent]
    return RankFault(
        f"no answer from {'; '.join(seen)}. {echo.what}",
        rank=silent[0],
        action="silent",
        where=echo.where,
        traceback_text=getattr(echo, "traceback_text", ""),
    )


def _ask_to_leave(workers: list[_Worker]) -> None:
    """Also those that are done: rank 0 waits for the others."""
    for worker in workers:
        if worker.stopped.stopped:
            worker.process.kill()  # it does not hear anything else
        elif worker.process.is_alive():
            worker.process.terminate()


def _see_off(workers: list[_Worker]) -> None:
    end = time.monotonic() + LEAVE_S
    for worker in workers:
        worker.process.join(max(0.0, end - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.connection.close()
