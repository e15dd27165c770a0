"""Time the probes on every rank at once, and collectives between the ranks.

A CPU's operators are timed by the processor time of their thread, which other programs on the machine lengthen little,
and the lower quartile of the rounds counts: ranks run the same probe together, and the few rounds that met an idle
neighbour are no better than the others, while those that met a busy machine are worse. All probes are run twice, so
that a disturbance of some seconds spoils half of a probe's rounds and not all. Dispatch is timed as a step meets it:
before every call some memory is gone over, so that its code comes from no cache. A GPU's operators are timed by the
clock around calls that fill its queue.

Transfers are timed by the clock, the least of the rounds: whatever else runs can only add. On a CPU a training step
comes to them from computing, its buffers in no cache and the threads that carry them asleep (on a Zen 5 core an
all-reduce of 2 MiB then takes 1.5 times what it takes in a row of them): so before every one some memory is gone over.
What it costs a rank is from when it came until the last is done, on the clock that the host's processes share: the
mean of the ranks, so that their waiting for one another, which a step pays too, is in it. A round is several, because a
step has many and never meets the least of each.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.calibration.probes import Probe, probes
from autoplan.cluster import Cluster, local_device_count
from autoplan.cost_models.calibration import Fit, OperatorSample, Sample, TransferSample, fit
from autoplan.errors import ClusterError
from autoplan.runtime.launch import launch

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
_MOST_DEFAULT_RANKS = 8
_A_CORE, _ENOUGH = 4, 16  # processes on a core, and on any machine: more only wait for each other
_CALLS = 4  # transfers of a round
_MOST_TRANSFERS = 1000
_LARGE_BYTES = (2**26, 2**28)  # what NVLink needs to reach its rate
_SWEPT_BYTES = 48 * 2**20  # more than a last-level cache of a core's share
_CACHED_BYTES = 4 * 2**20  # more than a core's own caches
_PASSES = 2  # over all probes
_LARGEST_KEPT_BYTES = 31 * 2**20
_CUDA_REPEATS = 20  # calls that fill the queue, so that the clock sees the device and not the launch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """``probe_s``: how long one probe is repeated, within ``rounds``. ``bytes``: sizes of the transfers."""

    probe_s: float
    rounds: tuple[int, int]
    bytes: tuple[int, ...]
    transfer_s: float


_THOROUGH = _Effort(probe_s=0.25, rounds=(5, 60), bytes=tuple(4**k for k in range(6, 13)), transfer_s=0.4)
_QUICK = _Effort(probe_s=0.03, rounds=(3, 10), bytes=(2**14, 2**18, 2**21), transfer_s=0.12)


def default_ranks(device: str) -> int:
    """A rank a GPU; on CPU one a core that this process may use, up to 8."""
    if device == "cuda":
        return max(1, local_device_count())
    return max(1, min(_MOST_DEFAULT_RANKS, len(os.sched_getaffinity(0))))


def calibrate(
    *, device: str = "cpu", gpus: int | None = None, quick: bool = False, note: Callable[[str], None] = lambda _: None
) -> Fit:
    """Measure ``gpus`` ranks of this machine and fit their device and link.

    ``note`` is told, in words, what comes next. Raises ClusterError for ranks that this machine cannot have.
    """
    ranks = default_ranks(device) if gpus is None else gpus
    start = _starting_point(device, ranks)
    note(f"measuring {ranks} {'processes' if device == 'cpu' else 'GPUs'} together: {_list(device, ranks, quick)} ...")
    by_rank = launch(_measure_rank, device, quick, gpus=ranks, device=device)
    note("fitting ...")
    return fit(start, _together(by_rank))


def _list(device: str, ranks: int, quick: bool) -> str:
    operators = f"{len(probes(device, quick=quick))} operators, forward and backward"
    transfers = f", then {', '.join(name.replace('_', '-') for name in COLLECTIVES)}"
    return operators + (transfers if ranks > 1 else "")


def most_processes() -> int:
    """Processes that may measure on this machine's cores together: some a core, and enough to try things out."""
    return max(_ENOUGH, _A_CORE * (os.cpu_count() or 1))


def _starting_point(device: str, ranks: int) -> Cluster:
    if device not in ("cpu", "cuda"):
        raise ClusterError(f"unknown device {device!r}", legal="cuda, cpu")
    if ranks < 1:
        raise ClusterError(f"number of GPUs: {ranks}", legal="1 or more", attempt="autoplan calibrate --gpus 2")
    if device == "cpu" and ranks > (most := most_processes()):
        raise ClusterError(
            f"{ranks} processes on {os.cpu_count() or 1} cores would measure each other",
            legal=f"1 to {most}",
            attempt="autoplan calibrate --device cpu --gpus 2",
        )
    if device == "cpu":
        return Cluster.parse(f"{ranks}xcpu")
    found = local_device_count()
    if found < ranks:
        raise ClusterError(
            f"{ranks} GPUs were asked for and this machine has {found}",
            legal=f"1 to {found}" if found else "--device cpu, since there is none",
            attempt="autoplan calibrate --device cpu",
        )
    return Cluster.parse(ranks)


def _together(by_rank: list[list[Sample]]) -> list[Sample]:
    """One sample of each probe: the mean of the ranks for operators, the slowest rank for transfers."""
    merged: list[Sample] = []
    for of_ranks in zip(*by_rank, strict=True):
        seconds = [sample.seconds for sample in of_ranks]
        whole = max(seconds) if isinstance(of_ranks[0], TransferSample) else statistics.fmean(seconds)
        merged.append(dataclasses.replace(of_ranks[0], seconds=whole))
    return merged


# ------------------------------------------------------------------------------------------------------ inside a rank


def _measure_rank(device_type: str, quick: bool) -> list[Sample]:
    effort = _QUICK if quick else _THOROUGH
    place = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    _settle_allocator()
    made = probes(device_type, quick=quick)
    wanted = [(probe, backward) for probe in made for backward in (False, True)[: 1 + probe.backward]]
    rounds: list[list[float]] = [[] for _ in wanted]
    for _ in range(_PASSES):
        for (probe, backward), of_probe in zip(wanted, rounds, strict=True):
            of_probe += _timed(probe, place, effort, backward=backward)
    samples: list[Sample] = [
        OperatorSample(
            family=probe.family, operator=probe.operator, backward=backward, seconds=_lower_quartile(of_probe)
        )
        for (probe, backward), of_probe in zip(wanted, rounds, strict=True)
    ]
    if dist.get_world_size() > 1:
        sizes = (*effort.bytes, *_LARGE_BYTES) if device_type == "cuda" else effort.bytes
        samples += [_transfer(name, size, place, effort) for name in COLLECTIVES for size in sizes]
    return samples


def _settle_allocator() -> None:
    """glibc gives freed memory back to the system, to be mapped again page by page, until it has seen a large block
    freed once (its limits are twice that, at most 64 MiB). A training step has seen one."""
    torch.empty(_LARGEST_KEPT_BYTES, dtype=torch.uint8)


def _timed(probe: Probe, device: torch.device, effort: _Effort, *, backward: bool) -> list[float]:
    """Seconds of one call in each round of one pass."""
    once = _backward_s if backward else _forward_s
    operands = probe.operands(device, gradients=backward or probe.family == "dispatch")
    swept = torch.zeros(_CACHED_BYTES // 4) if probe.swept else None
    once(probe, operands)
    if dist.get_world_size() > 1:
        dist.barrier()  # ranks measure the same probe at the same time
    least, most = effort.rounds
    end = time.perf_counter() + effort.probe_s / _PASSES
    rounds: list[float] = []
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() < end):
        if swept is not None:
            swept.add_(1.0)
        rounds.append(once(probe, operands))
    return rounds


def _lower_quartile(rounds: list[float]) -> float:
    return max(statistics.quantiles(rounds, n=4, method="inclusive")[0], 1e-9)


def _forward_s(probe: Probe, operands: list[list[Tensor]]) -> float:
    first = operands[0][0]
    with torch.set_grad_enabled(first.requires_grad):
        return _seconds(lambda: _outputs(probe, operands), first.device) / probe.calls


def _backward_s(probe: Probe, operands: list[list[Tensor]]) -> float:
    device = operands[0][0].device
    outputs = _outputs(probe, operands)
    gradient = torch.ones_like(outputs[-1])
    again = device.type == "cuda"  # there the clock sees several backwards of the one graph

    def run() -> None:
        if probe.chained:
            wanted = operands[0] if probe.operator.gemm else operands[0][:1]
            torch.autograd.grad(outputs[-1], wanted, gradient, retain_graph=again)
            return
        for output, of_call in zip(reversed(outputs), reversed(operands), strict=True):
            torch.autograd.grad(output, of_call, gradient, retain_graph=again)

    return _seconds(run, device) / probe.calls


def _outputs(probe: Probe, operands: list[list[Tensor]]) -> list[Tensor]:
    """The outputs of all calls, all kept."""
    if not probe.chained:
        return [probe.function(*of_call) for of_call in operands]
    first, *others = operands[0]
    outputs = []
    for _ in range(probe.calls):
        first = probe.function(first, *others)
        outputs.append(first)
    return outputs


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one ``run``."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(_CUDA_REPEATS):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / _CUDA_REPEATS
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _transfer(name: str, size: int, device: torch.device, effort: _Effort) -> TransferSample:
    ranks = dist.get_world_size()
    elements = max(ranks, size // 4 // ranks * ranks)
    run = _transfers(name, elements, device)
    run()
    once = _queued_s(run, size) if device.type == "cuda" else _woken_s(run)
    least = effort.rounds[0]
    best = float("inf")
    end = time.perf_counter() + effort.transfer_s
    for done in range(_MOST_TRANSFERS):
        enough = torch.tensor(float(done >= least and time.perf_counter() > end), device=device)
        dist.broadcast(enough, src=0)  # all ranks stop together, and start together
        if enough.item():
            break
        best = min(best, once())
    return TransferSample(collective=name, ranks=ranks, bytes=4.0 * elements, seconds=best)


def _queued_s(run: Callable[[], object], size: int) -> Callable[[], float]:
    """Seconds of one of several transfers in a row, on the slowest rank."""
    calls = max(1, min(_CALLS, 2**20 // size))

    def once() -> float:
        started = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        taken = torch.tensor((time.perf_counter() - started) / calls, device="cuda")
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken.item()

    return once


def _woken_s(run: Callable[[], object]) -> Callable[[], float]:
    """Mean seconds of a round's transfers, each from when ranks come to it from computing until the last is done."""
    swept = torch.zeros(_SWEPT_BYTES // 4)

    def one() -> float:
        swept.add_(1.0)
        came = time.perf_counter()
        run()
        done = torch.tensor(time.perf_counter(), dtype=torch.float64)
        dist.all_reduce(done, op=dist.ReduceOp.MAX)
        taken = done - came
        dist.all_reduce(taken)
        return taken.item() / dist.get_world_size()

    return lambda: statistics.fmean(one() for _ in range(_CALLS))


def _transfers(name: str, elements: int, device: torch.device) -> Callable[[], object]:
    """A call of the collective as the runtime makes it, on buffers of ``elements`` fp32 in all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(elements, device=device)
    mine = torch.zeros(elements // ranks, device=device)

    def send() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather(list(whole.chunk(ranks)), mine),
        "reduce_scatter": lambda: dist.reduce_scatter(mine, list(whole.chunk(ranks))),
        "send": send,
    }[name]
