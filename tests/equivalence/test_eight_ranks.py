"""Eight ranks, whatever they split: loss, clipped norm, gradients and weights of four AdamW steps equal the single
process in float64.

The product of ZeRO stages, schedules, tensor degrees and recompute on GPT-2 (tied weights) and Llama has 160 members.
Those that pytest runs show every value of each factor; the whole product, a line each, or the members whose names hold
an argument:

    PYTHONPATH=. OMP_NUM_THREADS=1 python tests/equivalence/test_eight_ranks.py [gpt2-zero3 ...]

All 160 equal the single process (torch 2.13 on a CPU, one run of the whole product, 2 to 15 seconds a member).
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from torch import nn

from autoplan.capture import Capture
from autoplan.cluster import Cluster
from autoplan.layers import LayerGraph, build_layers
from autoplan.runtime import Program
from autoplan.verification.precision import float64_throughout
from tests.support import models
from tests.support.plans import hand_plan, with_recompute
from tests.support.processes import run_ranks
from tests.support.training import Trained, assert_same_numbers, capture_double, train_alone, train_program

RANKS, SAMPLES, STEPS = 8, 16, 4

MODELS: dict[str, Callable[..., tuple[nn.Module, Any]]] = {"gpt2": models.tiny_gpt2, "llama": models.tiny_llama}
SCHEDULES: dict[str, dict[str, Any]] = {
    "no-pp": {"pipeline": 1},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "1f1b": {"pipeline": 2, "schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "virtual_stages": 2, "schedule": "interleaved"},
    "zero-bubble": {"pipeline": 2, "schedule": "zero_bubble"},
}


class Case(NamedTuple):
    model: str
    zero_stage: int
    schedule: str
    tensor: int
    recompute: str

    def __str__(self) -> str:
        return f"{self.model}-zero{self.zero_stage}-{self.schedule}-tp{self.tensor}-{self.recompute}"


CASES = [Case(*values) for values in itertools.product(MODELS, range(4), SCHEDULES, (1, 2), ("none", "full"))]
# Every value of every factor, and every schedule on one model.
CHOSEN = [
    Case("gpt2", 0, "no-pp", 2, "none"),
    Case("llama", 1, "gpipe", 1, "full"),
    Case("gpt2", 2, "1f1b", 2, "full"),
    Case("llama", 3, "interleaved", 2, "none"),
    Case("gpt2", 3, "zero-bubble", 1, "full"),
]


@functools.cache
def traced(name: str) -> tuple[Any, Capture, LayerGraph, Trained]:
    model, batch, captured = capture_double(*MODELS[name](samples=SAMPLES, layers=2))
    return batch, captured, build_layers(captured), train_alone(model, [batch] * STEPS)


def compare(case: Case) -> None:
    batch, captured, layers, expected = traced(case.model)
    degrees = {**SCHEDULES[case.schedule], "tensor": case.tensor, "zero_stage": case.zero_stage}
    data = RANKS // (degrees["pipeline"] * case.tensor)
    plan = hand_plan(layers, **degrees, data=data, micro_batch_size=1, micro_batches=SAMPLES // data)
    program = Program(
        captured,
        with_recompute(plan, case.recompute),
        layers,
        cluster=Cluster.parse(f"{RANKS}xcpu"),
        device="cpu",
    )
    for rank in range(RANKS):  # the passes run here once, and the ranks are forked with what they made
        program.code(rank)
    found = run_ranks(lambda rank, world: train_program(program, [batch] * STEPS), RANKS)
    for numbers in (found[0], found[-1]):
        assert_same_numbers(numbers, expected)


@pytest.mark.wide
@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_four_steps_on_eight_ranks_equal_the_single_process(case: Case) -> None:
    compare(case)


def main() -> None:
    """Every member in turn, or those whose names hold an argument."""
    chosen = [case for case in CASES if not sys.argv[1:] or any(word in str(case) for word in sys.argv[1:])]
    failed = 0
    with float64_throughout():
        for case in chosen:
            started = time.perf_counter()
            try:
                compare(case)
                outcome = "equal"
            except Exception as error:
                failed, outcome = failed + 1, f"DIFFERS: {str(error).splitlines()[0]}"
            print(f"{case!s:45} {outcome}  {time.perf_counter() - started:.1f} s", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} equal the single process")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
