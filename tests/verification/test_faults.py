"""Mutation test: every planted compiler fault is caught, and the layer that it was planted in is the one named."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.passes.lint import check_placements
from autoplan.plan import Stage
from autoplan.runtime import Program, launch
from autoplan.verification import locate
from autoplan.verification.numeric import Subject, compare, subject_of
from autoplan.verification.precision import float64_throughout
from autoplan.verification.shrink import Small
from autoplan.verification.static import check_static
from tests.support import models
from tests.support.plans import hand_plan
from tests.verification import faulty, faulty_state
from tests.zoo.families import FAMILIES


class TwoStreams(nn.Module):
    """Two tensors of one shape cross every cut, and a parameter that the loss does not need gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.right = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = x, 2 * x
        for left, right in zip(self.left, self.right, strict=True):
            a, b = torch.tanh(left(a)) + b, torch.relu(right(b)) - a
        return F.mse_loss(a * b, y) + 0 * self.idle.detach().sum()


def two_streams(*, samples: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return TwoStreams(), {"x": torch.randn(samples, 8), "y": torch.randn(samples, 8)}


def mixtral(*, samples: int = 8) -> tuple[nn.Module, Any]:
    """Two blocks with four experts each."""
    built = next(entry for entry in FAMILIES if entry.name == "Mixtral").build()
    return built[0], built[1]


BUILDERS: dict[str, Any] = {
    "nanogpt": functools.partial(models.nano_gpt, layers=2),
    "cnn": models.batch_norm_cnn,
    "streams": two_streams,
    "mixtral": mixtral,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2, "micro_batch_size": 4, "micro_batches": 2},
    "sequence": {"tensor": 2, "micro_batch_size": 4, "micro_batches": 2, "sequence_parallel": True},
    "data": {"data": 2, "micro_batch_size": 2, "micro_batches": 2},
    "pipeline": {"pipeline": 2, "micro_batch_size": 2, "micro_batches": 4},
    "zero_bubble": {"pipeline": 2, "micro_batch_size": 2, "micro_batches": 4, "schedule": "zero_bubble"},
    "context": {"context": 2, "micro_batch_size": 4, "micro_batches": 2},
    "context_tensor": {"context": 2, "tensor": 2, "micro_batch_size": 8},
    "expert": {"data": 2, "expert": 2, "micro_batch_size": 2, "micro_batches": 1},
    "model": {"pipeline": 2, "micro_batch_size": 8},
    "zero_1": {"data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 1},
    "zero_3": {"data": 2, "micro_batch_size": 2, "micro_batches": 2, "zero_stage": 3},
    "recompute": {"pipeline": 2, "micro_batch_size": 8},
}


@functools.cache
def subject(model_name: str, strategy_name: str) -> Subject:
    model, batch = BUILDERS[model_name]()
    model = model.double()
    batch = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    with float64_throughout():
        layers = build_layers(capture(model, batch))
        plan = hand_plan(layers, **STRATEGIES[strategy_name])
        if strategy_name == "recompute":
            plan = dataclasses.replace(plan, stages=tuple(map(_recomputed, plan.stages)))
        small = Small(model=model, example_inputs=batch, loss_fn=None, reductions=())
        return subject_of(small, plan, plan.strategy, None, Cluster.parse("8xcpu"))


def _recomputed(stage: Stage) -> Stage:
    count = stage.last_layer - stage.first_layer + 1
    return dataclasses.replace(stage, recompute={"full": count}, layer_recompute=("full",) * count)


FAULTS: list[tuple[str, str, str, str]] = [
    # fault, model, strategy, the layer that must be named ("" where the fault is in no layer)
    ("dropped_all_reduce", "nanogpt", "tensor", "h.1"),
    ("averaged_data_gradient", "nanogpt", "data", "lm_head"),
    ("swapped_stage_values", "streams", "pipeline", "left.2"),
    ("stale_buffer", "cnn", "model", "conv_1"),
    ("dropped_gradient_all_reduce", "nanogpt", "tensor", "h.1"),
    ("doubled_all_reduce", "nanogpt", "tensor", "h.1"),
    ("wrong_head_order", "nanogpt", "tensor", "h.1"),
    ("swapped_shards", "nanogpt", "tensor", "h.1"),
    ("missing_loss_scale", "nanogpt", "pipeline", "lm_head"),
    ("wrong_micro_batch_weight", "nanogpt", "tensor", "lm_head"),
    ("totals_of_one_rank", "nanogpt", "data", "lm_head"),
    ("unsynchronised_parameter", "nanogpt", "data", "h.1"),
    ("same_rows_on_every_rank", "nanogpt", "data", "wte"),
    ("forgotten_micro_batches", "nanogpt", "pipeline", "h.1"),
    ("doubled_stage_gradient", "nanogpt", "pipeline", "h.0"),
    ("missing_tied_sum", "nanogpt", "pipeline", "wte"),
    ("untied_copy", "nanogpt", "data", "wte"),
    ("norm_counted_twice", "nanogpt", "tensor", ""),
    ("gathered_gradient_not_summed", "nanogpt", "sequence", "h.1"),
    ("forgotten_norm_gradients", "nanogpt", "sequence", "h.1"),
    ("gradient_of_zeros", "streams", "pipeline", "right.3"),
    ("lost_weight_gradients", "nanogpt", "zero_bubble", "h.0"),
    ("labels_of_another_micro_batch", "nanogpt", "pipeline", "lm_head"),
    ("norm_of_own_stage", "nanogpt", "pipeline", ""),
    ("wrong_position_share", "nanogpt", "context", "wte"),
    ("keys_in_order_of_ranks", "nanogpt", "context", "h.0"),
    ("missing_reduce_scatter", "nanogpt", "context", "h.1"),
    ("rows_returned_in_another_order", "mixtral", "expert", "model.layers.0"),
    ("dropped_count", "mixtral", "expert", "model.layers.0"),
    ("experts_of_another_rank", "mixtral", "expert", "model.layers.0"),
    ("shares_in_another_order", "nanogpt", "zero_3", "h.1"),
    ("stale_gather", "nanogpt", "zero_3", "h.1"),
    ("gradient_not_scattered", "nanogpt", "zero_3", "h.1"),
    ("norm_of_own_slices", "nanogpt", "zero_1", ""),
    ("update_not_shared", "nanogpt", "zero_1", "h.1"),
    ("recomputed_from_other_inputs", "nanogpt", "recompute", "h.1"),
    ("lost_gradient_of_a_recomputed_layer", "nanogpt", "recompute", "h.0"),
    ("tied_copies_updated_apart", "nanogpt", "pipeline", "wte"),
    ("statistics_updated_twice", "cnn", "recompute", "conv_1"),
]
CASES = [
    pytest.param(*fault, id=fault[0], marks=() if index < 4 else pytest.mark.wide) for index, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize(("fault", "model", "strategy", "layer"), CASES)
def test_a_planted_fault_is_caught_in_its_layer(
    fault: str, model: str, strategy: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = subject(model, strategy)
    planted = faulty if hasattr(faulty, fault) else faulty_state
    getattr(planted, fault)(monkeypatch)
    with float64_throughout():
        found, _ = compare(chosen)
    assert found.status == "differs"
    assert found.first is not None
    assert found.first.layer == layer, found.first.describe()
    assert not layer or ".py:" in found.first.where


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("nanogpt", "tensor"),
        ("nanogpt", "sequence"),
        ("streams", "pipeline"),
        ("cnn", "model"),
        pytest.param("nanogpt", "zero_bubble", marks=pytest.mark.wide),
        pytest.param("nanogpt", "context", marks=pytest.mark.wide),
        pytest.param("nanogpt", "context_tensor", marks=pytest.mark.wide),
        pytest.param("mixtral", "expert", marks=pytest.mark.wide),
        pytest.param("nanogpt", "zero_1", marks=pytest.mark.wide),
        pytest.param("nanogpt", "zero_3", marks=pytest.mark.wide),
        pytest.param("nanogpt", "recompute", marks=pytest.mark.wide),
        pytest.param("cnn", "recompute", marks=pytest.mark.wide),
    ],
)
def test_without_a_fault_all_is_equal(model: str, strategy: str) -> None:
    with float64_throughout():
        found, checks = compare(subject(model, strategy))
    assert found.status == "equal", found.first
    assert all(check.ok for check in checks if check.name != "memory"), checks
    assert max(row.worst for row in found.layers) < 1.0


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "strategy"),
    [("nanogpt", "tensor"), ("nanogpt", "context"), ("nanogpt", "context_tensor"), ("mixtral", "expert")],
)
def test_every_value_of_a_sound_program_is_its_share_of_the_single_processs(model: str, strategy: str) -> None:
    chosen = subject(model, strategy)
    with float64_throughout():
        _, programs = check_static(chosen.capture, chosen.layers, chosen.plan, chosen.cluster)
        assert programs is not None
        degree, placements = chosen.plan.strategy.tensor, {}
        if degree > 1:
            placements = check_placements(programs.sharded, programs.whole, programs.placements, degree=degree)
        batch = chosen.small.example_inputs
        recorded = locate.record(chosen.capture, batch)
        program = Program(
            chosen.capture,
            chosen.plan,
            chosen.layers,
            cluster=chosen.cluster,
            sharding=chosen.sharding,
            device="cpu",
        )
        found = launch(
            lambda: locate.compare_rank(program, batch, recorded, placements, programs.positions),
            gpus=chosen.plan.strategy.gpus,
            device="cpu",
            timeout_s=60.0,
        )
    assert recorded
    assert not [wrong for own in found for wrong in own]
