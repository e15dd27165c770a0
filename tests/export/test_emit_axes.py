"""Emitted programs of plans whose context axis deals out sequences, and whose expert axis spreads experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autoplan.verification.precision import float64_throughout
from tests.support import models
from tests.support.emitted import assert_trains_alike, compiled
from tests.zoo.families import FAMILIES

ALONE: dict[str, Any] = {"data": 1, "tensor": 1, "pipeline": 1}


def family(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: next(entry for entry in FAMILIES if entry.name == name).build()[:2]


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": lambda: models.tiny_gpt2(layers=2),
    "llama": lambda: models.tiny_llama(layers=2),
    "nanogpt": lambda: models.nano_gpt(layers=2),
    "mixtral": family("Mixtral"),
    "qwen3-moe": family("Qwen3-MoE"),
    "deepseek-v3": family("DeepSeek-V3"),
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "cp2": {**ALONE, "context": 2},
    "cp4": {**ALONE, "context": 4},
    "cp2-dp2-zero1": {**ALONE, "context": 2, "data": 2, "zero_stage": 1},
    "cp2-dp2-zero3": {**ALONE, "context": 2, "data": 2, "zero_stage": 3, "recompute": "full"},
    "cp2-pp2": {**ALONE, "context": 2, "pipeline": 2, "micro_batch_size": 2},
    "cp2-tp2": {**ALONE, "context": 2, "tensor": 2},
    "cp2-recompute": {**ALONE, "context": 2, "micro_batch_size": 4, "recompute": "full"},
    "dp2": {**ALONE, "data": 2},
    "ep2": {**ALONE, "data": 2, "expert": 2},
    "ep4": {**ALONE, "data": 4, "expert": 4},
    "dp4-ep2-zero1": {**ALONE, "data": 4, "expert": 2, "zero_stage": 1},
    "ep2-zero2": {**ALONE, "data": 2, "expert": 2, "zero_stage": 2},
    "ep2-pp2-recompute": {
        "tensor": 1,
        "data": 2,
        "pipeline": 2,
        "expert": 2,
        "micro_batch_size": 1,
        "recompute": "full",
    },
}
DEFAULT = {("llama", "cp2-tp2"), ("gpt2", "cp2-recompute"), ("mixtral", "dp4-ep2-zero1")}
WIDE = {  # the models take turns
    ("llama", "cp2"),
    ("llama", "cp4"),
    ("gpt2", "cp2-pp2"),
    ("gpt2", "cp2-dp2-zero1"),
    ("llama", "cp2-dp2-zero3"),
    ("nanogpt", "cp2"),
    ("mixtral", "dp2"),
    ("qwen3-moe", "ep2"),
    ("deepseek-v3", "ep4"),
    ("mixtral", "ep2-zero2"),
    ("qwen3-moe", "ep2-pp2-recompute"),
}
CASES = [
    pytest.param(*case, id="-".join(case), marks=[] if case in DEFAULT else [pytest.mark.wide])
    for case in sorted(DEFAULT | WIDE)
]


@pytest.fixture(autouse=True)
def nothing_rounds_to_float32() -> Iterator[None]:
    with float64_throughout():
        yield


@pytest.mark.parametrize(("model_name", "strategy_name"), CASES)
def test_a_program_of_every_axis_trains_to_the_single_process_numbers(
    model_name: str, strategy_name: str, tmp_path: Path
) -> None:
    program, model, batch = compiled(MODELS[model_name], STRATEGIES[strategy_name])
    assert program.plan.strategy.context == STRATEGIES[strategy_name].get("context", 1)
    assert program.plan.strategy.expert == STRATEGIES[strategy_name].get("expert", 1)
    assert_trains_alike(program, model, batch, tmp_path / "emitted")
