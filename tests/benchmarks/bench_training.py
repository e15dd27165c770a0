"""Training steps of a small GPT against hand-written torch: time, memory, and time to the first step.

Run: ``OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_training``, or ``pytest -m benchmark`` on this file with
``-s``. Each case is one plan of autoplan's and the same by hand, on gloo processes:

- DDP: ``DistributedDataParallel``;
- FSDP2: ``fully_shard`` of each block and of the rest;
- 1F1B: ``PipelineStage`` and ``Schedule1F1B``;
- PP x TP and DP x TP: blocks in Megatron's manner (:mod:`tests.support.by_hand`), the vocabulary split too, inside
  ``Schedule1F1B`` and inside ``DistributedDataParallel``.

Both start from the same weights and must find the same losses. A step is forward, backward, AdamW and dropping the
gradients; the two take turns on the same ranks. Prints medians of the slowest rank's clock and of the ranks' processor
time; peak memory of the worst rank by torch's allocator, of a run of its own; and the seconds from the plain model to
the end of the first step. Asserts no clock. By hand nobody adds up the ranks' losses; autoplan's step returns the
global batch's on every rank.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import autoplan
from tests.support.allocated import peak_bytes
from tests.support.by_hand import GPT, GPTShape, GPTStage, Group, adamw, cross_entropy, share
from tests.support.turns import Step, Timed, over_ranks, take_turns

TURNS = 30
SHAPE = GPTShape(vocabulary=512, length=64, width=128, depth=4, heads=8)
BATCH, MICRO_BATCHES = 16, 8
STEP_TARGET, MEMORY_TARGET = 1.00, 1.05

Weights = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``strategy`` is forced on autoplan; ``by_hand`` gives the step of the calling rank."""

    name: str
    ranks: int
    strategy: dict[str, Any]
    by_hand: Callable[[Case, Weights, Batch], Step]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.ranks} ranks"


# ------------------------------------------------------------------------------------------------------------ by hand


def filled(module: nn.Module, weights: Weights, group: Group, prefix: str = "") -> nn.Module:
    own = {name: weights[prefix + name] for name in module.state_dict()}
    module.load_state_dict(share(own, GPTStage.split, group))
    return module


def rows_of(batch: Batch, index: int, count: int) -> Batch:
    text, target = batch
    return text.chunk(count)[index], target.chunk(count)[index]


def stepping(run: Callable[[], float], module: nn.Module) -> Step:
    """Forward and backward by ``run``, the optimizer, and gradients dropped."""
    optimizer = adamw(module.parameters())

    def step() -> float:
        loss = run()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def whole_batch(module: nn.Module, batch: Batch) -> Step:
    def run() -> float:
        loss = module(*batch)
        loss.backward()
        return loss.item()

    return stepping(run, module)


def ddp(case: Case, weights: Weights, batch: Batch) -> Step:
    tensor, data = case.strategy.get("tensor", 1), case.strategy["data"]
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    model = filled(GPT(SHAPE, mesh.get_group("tensor") if tensor > 1 else None), weights, model_group(mesh, tensor))
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    return whole_batch(wrapped, rows_of(batch, mesh.get_local_rank("data"), data))


def model_group(mesh: Any, tensor: int) -> Group:
    return mesh.get_group("tensor") if tensor > 1 else None


def fsdp(case: Case, weights: Weights, batch: Batch) -> Step:
    model = GPT(SHAPE)
    filled(model, weights, None)
    mesh = init_device_mesh("cpu", (case.ranks,))
    for block in model.stage.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return whole_batch(model, rows_of(batch, dist.get_rank(), case.ranks))


def pipeline(case: Case, weights: Weights, batch: Batch) -> Step:
    tensor, stages = case.strategy.get("tensor", 1), case.strategy["pipeline"]
    mesh = init_device_mesh("cpu", (stages, tensor), mesh_dim_names=("pipeline", "tensor"))
    at, group = mesh.get_local_rank("pipeline"), model_group(mesh, tensor)
    each = SHAPE.depth // stages
    module = GPTStage(SHAPE, range(at * each, (at + 1) * each), group)
    filled(module, weights, group, prefix="stage.")
    stage = PipelineStage(module, at, stages, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda logits, target: cross_entropy(logits, target, group))
    text, target = batch

    def run() -> float:
        losses: list[Tensor] = []
        if at == 0:
            schedule.step(text)
        elif at == stages - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        return torch.stack(losses).mean().item() if losses else math.nan

    return stepping(run, module)


CASES = (
    Case(name="DDP", ranks=2, strategy={"data": 2, "zero_stage": 0}, by_hand=ddp),
    Case(name="FSDP2", ranks=2, strategy={"data": 2, "zero_stage": 3}, by_hand=fsdp),
    Case(name="1F1B", ranks=2, strategy={"pipeline": 2}, by_hand=pipeline),
    Case(name="DDP", ranks=4, strategy={"data": 4, "zero_stage": 0}, by_hand=ddp),
    Case(name="FSDP2", ranks=4, strategy={"data": 4, "zero_stage": 3}, by_hand=fsdp),
    Case(name="1F1B", ranks=4, strategy={"pipeline": 4}, by_hand=pipeline),
    Case(name="PP x TP", ranks=4, strategy={"pipeline": 2, "tensor": 2}, by_hand=pipeline),
    Case(name="DP x TP", ranks=4, strategy={"data": 2, "tensor": 2, "zero_stage": 0}, by_hand=ddp),
)

# ----------------------------------------------------------------------------------------------------------- autoplan


def planned(case: Case, weights: Weights, batch: Batch) -> Step:
    with torch.device("meta"):
        model = GPT(SHAPE)
    pieces = MICRO_BATCHES if "pipeline" in case.strategy else case.strategy["data"]
    program = autoplan.compile(
        model,
        gpus=case.ranks,
        device="cpu",
        example_inputs=batch,
        strategy={
            "data": 1,
            "tensor": 1,
            "pipeline": 1,
            "micro_batch_size": BATCH // pieces,
            "schedule": "1f1b",
            "recompute": "none",
            "sequence_parallel": False,
            **case.strategy,
        },
    )
    program.load_state_dict(weights)
    optimizer = adamw(program.parameters())

    def step() -> float:
        loss = program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# ---------------------------------------------------------------------------------------------------------- measuring


def _given() -> tuple[Weights, Batch]:
    """The same on every rank; nobody's memory counts it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.randint(SHAPE.vocabulary, (BATCH, SHAPE.length + 1))
    return dict(GPT(SHAPE).state_dict()), (text[:, :-1].contiguous(), text[:, 1:].contiguous())


def _timed(case: Case, turns: int) -> tuple[dict[str, Any], dict[str, float]]:
    weights, batch = _given()
    first_step_s: dict[str, float] = {}
    steps: dict[str, Step] = {}
    for name, build in (("autoplan", planned), ("by hand", case.by_hand)):
        dist.barrier()
        started = time.perf_counter()
        steps[name] = build(case, weights, batch)
        steps[name]()
        first_step_s[name] = time.perf_counter() - started
    return take_turns(steps, turns=turns), first_step_s


def _peak_bytes(case: Case, build: Callable[[Case, Weights, Batch], Step]) -> int:
    weights, batch = _given()
    return peak_bytes(lambda: build(case, weights, batch), steps=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: Case
    ways: dict[str, Timed]
    first_step_s: dict[str, float]
    peak_bytes: dict[str, int]

    @property
    def step_ratio(self) -> float:
        return self.ways["autoplan"].clock_s / self.ways["by hand"].clock_s

    @property
    def busy_ratio(self) -> float:
        return self.ways["autoplan"].process_s / self.ways["by hand"].process_s

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes["autoplan"] / self.peak_bytes["by hand"]

    @property
    def apart(self) -> float:
        """The largest relative difference of the losses."""
        pairs = zip(self.ways["autoplan"].losses, self.ways["by hand"].losses, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)


def measure(case: Case, turns: int) -> Row:
    timed = autoplan.launch(_timed, case, turns, gpus=case.ranks, device="cpu")
    peaks = {
        name: max(autoplan.launch(_peak_bytes, case, build, gpus=case.ranks, device="cpu"))
        for name, build in (("autoplan", planned), ("by hand", case.by_hand))
    }
    return Row(
        case=case,
        ways=over_ranks([turns_of_rank for turns_of_rank, _ in timed]),
        first_step_s={name: max(seconds[name] for _, seconds in timed) for name in peaks},
        peak_bytes=peaks,
    )


def show_head(turns: int) -> None:
    print(
        f"GPT of {SHAPE.depth} blocks of width {SHAPE.width}, vocabulary {SHAPE.vocabulary}; {BATCH} x {SHAPE.length} "
        f"tokens a step, {MICRO_BATCHES} micro-batches in a pipeline; fp32, AdamW; medians of {turns} turns"
    )
    print("step in ms: clock (processor); peak in MiB; first: seconds from the model to the end of the first step")
    print(
        f"{'case':<16}  {'autoplan':>14}  {'by hand':>14}  {'ratio':>13}  {'peak':>6} {'by hand':>7} {'ratio':>5}"
        f"  {'first':>5} {'by hand':>7}"
    )


def show_row(row: Row) -> None:
    ours, theirs = row.ways["autoplan"], row.ways["by hand"]
    mib = {name: peak / 2**20 for name, peak in row.peak_bytes.items()}
    print(
        f"{row.case.label:<16}  {ours.clock_s * 1e3:6.1f} ({ours.process_s * 1e3:5.1f})  "
        f"{theirs.clock_s * 1e3:6.1f} ({theirs.process_s * 1e3:5.1f})  {row.step_ratio:5.2f} ({row.busy_ratio:4.2f})  "
        f"{mib['autoplan']:6.1f} {mib['by hand']:7.1f} {row.memory_ratio:5.2f}  "
        f"{row.first_step_s['autoplan']:5.2f} {row.first_step_s['by hand']:7.2f}",
        flush=True,
    )


def show_sum(rows: list[Row]) -> None:
    faster = sum(row.step_ratio <= STEP_TARGET for row in rows)
    smaller = sum(row.memory_ratio <= MEMORY_TARGET for row in rows)
    print(
        f"steps at most {STEP_TARGET} of by hand: {faster} of {len(rows)}, ratios' mean "
        f"{statistics.fmean(row.step_ratio for row in rows):.2f}; memory at most {MEMORY_TARGET}: {smaller}"
    )
    print(f"losses differ by at most {max(row.apart for row in rows):.1e} of them")


def main(turns: int, cases: tuple[Case, ...] = CASES) -> list[Row]:
    show_head(turns)
    rows = []
    for case in cases:
        rows.append(measure(case, turns))
        show_row(rows[-1])
    show_sum(rows)
    return rows


@pytest.mark.benchmark
def test_training_steps() -> None:
    rows = main(TURNS)
    assert all(row.apart < 1e-4 for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--case", nargs="+", help="cases by name, all of them unless given")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(arguments.turns, tuple(c for c in CASES if arguments.case is None or c.name in arguments.case))
