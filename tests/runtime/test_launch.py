"""Ranks start, return, and go down together with the message of the one that failed first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoplan.errors import RuntimeFault, StrategyError
from autoplan.runtime import RankFault, launch

PATIENCE_S = 30.0  # the promise: all ranks gone within this time


def test_results_come_by_rank_and_closures_and_arguments_arrive() -> None:
    offset = 10

    def work(factor: int) -> tuple[int, int, float]:
        total = torch.ones(2)
        dist.all_reduce(total)
        return dist.get_rank() * factor + offset, int(os.environ["WORLD_SIZE"]), total[0].item()

    assert launch(work, 3, gpus=2) == [(10, 2, 2.0), (13, 2, 2.0)]


def test_tensors_come_back() -> None:
    first, second = launch(lambda: torch.full((2,), float(dist.get_rank())), gpus=2)
    assert torch.equal(first, torch.zeros(2))
    assert torch.equal(second, torch.ones(2))


def test_the_rank_whose_store_the_others_meet_at_leaves_last() -> None:
    def work() -> str:
        if dist.get_rank() == 0:
            return "done at once"
        time.sleep(0.3)
        store = dist.distributed_c10d._get_default_store()
        store.set("late", "still there")
        return str(store.get("late").decode())

    assert launch(work, gpus=2) == ["done at once", "still there"]


def test_a_rank_that_waits_for_others_to_leave_does_not_outlive_their_failure(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        if dist.get_rank() == 1:
            time.sleep(0.3)
            raise ValueError("late")

    with pytest.raises(RuntimeFault, match="rank 1 raised ValueError: late"):
        launch(work, gpus=2)
    assert not any(is_alive(int(file.read_text())) for file in tmp_path.iterdir())


def failing_run(tmp_path: Path, fail: Callable[[int], None], **options: Any) -> tuple[RankFault, float, list[int]]:
    """Rank 1 fails while the others wait for it; the error, the seconds it took and the ranks' process ids."""

    def work() -> None:
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        dist.barrier()
        fail(dist.get_rank())
        dist.barrier()

    started = time.monotonic()
    with pytest.raises(RuntimeFault) as caught:
        launch(work, gpus=3, **options)
    assert isinstance(caught.value, RankFault)
    seconds = time.monotonic() - started
    return caught.value, seconds, [int(file.read_text()) for file in sorted(tmp_path.iterdir())]


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def boom(rank: int) -> None:
    if rank == 1:
        raise ValueError("boom")


def test_a_rank_that_raises_takes_the_others_down(tmp_path: Path) -> None:
    fault, seconds, processes = failing_run(tmp_path, boom)
    assert fault.rank == 1
    assert "rank 1 raised ValueError: boom" in str(fault)
    assert 'raise ValueError("boom")' in fault.traceback_text
    assert seconds < PATIENCE_S
    assert len(processes) == 3
    assert not any(is_alive(process) for process in processes)


def die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_is_named_not_those_that_missed_it(tmp_path: Path) -> None:
    fault, seconds, processes = failing_run(tmp_path, die)
    assert fault.rank == 1
    assert "rank 1 was killed by SIGKILL" in str(fault)
    assert seconds < PATIENCE_S
    assert not any(is_alive(process) for process in processes)


def hang(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_a_rank_that_hangs_is_ended_after_the_others_patience(tmp_path: Path) -> None:
    fault, seconds, processes = failing_run(tmp_path, hang, timeout_s=2.0)
    assert "Timed out" in str(fault)
    assert seconds < PATIENCE_S
    assert not any(is_alive(process) for process in processes)


def test_a_deadline_ends_a_run_that_waits_for_itself(tmp_path: Path) -> None:
    fault, seconds, _ = failing_run(tmp_path, lambda rank: time.sleep(600), deadline_s=2.0)
    assert "longer than its deadline of 2 s; ranks not done: 0, 1, 2" in str(fault)
    assert seconds < PATIENCE_S


def test_an_error_of_ours_stays_what_it_is() -> None:
    def work() -> None:
        raise StrategyError("not legal", legal="something else")

    with pytest.raises(StrategyError, match="not legal") as caught:
        launch(work, gpus=2)
    assert caught.value.legal == "something else"


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RuntimeFault, match="pickle"):
        launch(lambda: lambda: 1, gpus=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "cannot launch on 0 GPUs"),
        ({"gpus": 2, "device": "tpu"}, "no ranks can be launched on device 'tpu'"),
        ({"gpus": 2, "device": "cuda"}, "this machine has 0 GPUs"),
    ],
)
def test_what_cannot_be_launched_is_said(options: dict[str, Any], message: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    with pytest.raises(StrategyError, match=message):
        launch(lambda: None, **options)


def test_a_rank_does_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StrategyError, match="launched already"):
        launch(lambda: None, gpus=2)


UNDER_TORCHRUN = """
import sys, torch, torch.distributed as dist
from autoplan.runtime import ensure_process_group
world = ensure_process_group("cpu")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"total {world} {int(total)}\\n")  # one write, which another rank's cannot cut in two
"""


@pytest.mark.wide
def test_torchruns_environment_makes_the_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.stdout.count("total 2 2") == 2, done.stderr
