"""A step under tensor parallelism against DTensor's ``parallelize_module`` and a module in Megatron's manner, by hand.

Run: ``OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_tensor``, or ``pytest -m benchmark`` on this file with ``-s``.
Two blocks of a GPT and two of a Llama (:mod:`tests.support.by_hand`) learn a target on 2 and 4 gloo processes: forward,
backward and AdamW. The three ways start from the same weights, take turns on the same ranks, and must find the same
losses. Prints a table; asserts no clock. Columns: medians of the slowest rank's clock, of the ranks' processor time,
and autoplan's parts of the other two's. Sizes are printed because they decide: DTensor costs the host a fixed time an
operator, which is most of a small block's step and little of a large one's. Four ranks on two cores wait for each
other besides; the processor's time tells what each had to do.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoplan
from tests.support.by_hand import GPTBlock, Group, LlamaBlock, adamw, share
from tests.support.turns import Step, Timed, Turns, over_ranks, take_turns

TURNS = 30
BLOCKS: dict[str, type[GPTBlock] | type[LlamaBlock]] = {"GPT": GPTBlock, "Llama": LlamaBlock}
HEADS, DEPTH = 8, 2
DTENSOR_TARGET, BY_HAND_TARGET = 0.50, 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    batch: int
    length: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.length} x {self.width}"


SIZES = (
    Size(batch=2, length=64, width=128),
    Size(batch=4, length=64, width=256),
    Size(batch=4, length=128, width=512),
)


class Learner(nn.Module):
    """Blocks, and their mean square distance from a target."""

    def __init__(self, kind: str, size: Size, group: Group = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[kind](size.width, HEADS, group) for _ in range(DEPTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def by_dtensor(learner: Learner) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in learner.blocks:
        plan = {
            name: RowwiseParallel() if name in ("out", "down") else ColwiseParallel()
            for name, module in block.named_children()
            if isinstance(module, nn.Linear)
        }
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]


def stepping(run: Callable[[], Any], parameters: Any) -> Step:
    """Forward and backward by ``run``, the optimizer, and gradients dropped."""
    optimizer = adamw(parameters)

    def step() -> float:
        loss = float(run())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ways(kind: str, size: Size) -> dict[str, Step]:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    learner = Learner(kind, size)
    batch = torch.randn(2, size.batch, size.length, size.width).unbind()
    alike = copy.deepcopy(learner)
    local = Learner(kind, size, dist.group.WORLD)
    local.load_state_dict(share(learner.state_dict(), BLOCKS[kind].split, dist.group.WORLD))
    program = autoplan.compile(
        learner,
        gpus=ranks,
        device="cpu",
        example_inputs=batch,
        strategy={"tensor": ranks, "sequence_parallel": False},
    )
    by_dtensor(alike)

    def forward_backward(module: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            loss = module(*batch)
            loss.backward()
            return loss.detach()

        return run

    return {
        "autoplan": stepping(lambda: program.step(batch), program.parameters()),
        "DTensor": stepping(forward_backward(alike), alike.parameters()),
        "by hand": stepping(forward_backward(local), local.parameters()),
    }


def measured(kind: str, size: Size, turns: int) -> dict[str, Turns]:
    torch.set_num_threads(1)
    return take_turns(ways(kind, size), turns=turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    kind: str
    size: Size
    ranks: int
    ways: dict[str, Timed]

    def of(self, other: str) -> float:
        """autoplan's part of another's clock."""
        return self.ways["autoplan"].clock_s / self.ways[other].clock_s

    def busy_of(self, other: str) -> float:
        return self.ways["autoplan"].process_s / self.ways[other].process_s

    def apart(self) -> float:
        """The largest relative difference of the three ways' losses."""
        first = self.ways["by hand"].losses
        return max(abs(a - b) / abs(b) for way in self.ways.values() for a, b in zip(way.losses, first, strict=True))


def compare(turns: int, ranks: tuple[int, ...] = (2, 4), sizes: tuple[Size, ...] = SIZES) -> list[Row]:
    return [
        Row(
            kind=kind,
            size=size,
            ranks=count,
            ways=over_ranks(autoplan.launch(measured, kind, size, turns, gpus=count, device="cpu")),
        )
        for count in ranks
        for size in sizes
        for kind in BLOCKS
    ]


def show(rows: list[Row], turns: int) -> None:
    print(f"a step of {DEPTH} blocks of {HEADS} heads, AdamW, fp32; medians of {turns} turns; ms: clock (processor)")
    print(
        f"{'block':<6} {'samples x length x width':<24} {'ranks':>5}  {'autoplan':>14}  {'DTensor':>14}  "
        f"{'by hand':>14}  {'of DTensor':>15}  {'of by hand':>15}"
    )
    for row in rows:
        cells = [
            f"{way.clock_s * 1e3:6.1f} ({way.process_s * 1e3:5.1f})"
            for way in (row.ways["autoplan"], row.ways["DTensor"], row.ways["by hand"])
        ]
        parts = [f"{row.of(other):6.2f} ({row.busy_of(other):6.2f})" for other in ("DTensor", "by hand")]
        print(
            f"{row.kind:<6} {row.size!s:<24} {row.ranks:>5}  " + "  ".join(cells) + "  " + "  ".join(parts), flush=True
        )
    below = sum(row.of("DTensor") <= DTENSOR_TARGET for row in rows)
    alike = sum(row.of("by hand") <= BY_HAND_TARGET for row in rows)
    print(
        f"at most {DTENSOR_TARGET} of DTensor's: {below} of {len(rows)}; at most {BY_HAND_TARGET} of by hand: {alike}"
    )
    print(f"losses of the three ways differ by at most {max(row.apart() for row in rows):.1e} of them")


@pytest.mark.benchmark
def test_tensor_parallel_steps() -> None:
    rows = compare(TURNS)
    show(rows, TURNS)
    assert all(row.apart() < 1e-4 for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--width", type=int, help="of this width alone, with 8 x 128 positions")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = SIZES if arguments.width is None else (Size(batch=8, length=128, width=arguments.width),)
    show(compare(arguments.turns, tuple(arguments.ranks), chosen), arguments.turns)
