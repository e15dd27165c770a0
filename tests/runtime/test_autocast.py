"""A model with regions of torch.autocast trains as a program to the single process's numbers under the same regions.

Where the program runs the operators that eager runs (a pipeline of whole batches) every number is equal to the last
bit. Other splits sum in another order, and bfloat16 keeps 8 bits of each sum: gradients are then held to 3% of their
norm (or of a tenth of the whole gradient's norm, for those that are rounding alone), after two steps of AdamW.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoplan.runtime import Program
from tests.support.processes import run_ranks
from tests.support.training import LEARNING_RATE, program_forced

STEPS = 2
WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).split(width, dim=-1)
        q, k, v = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.output(attended.reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Mixed(nn.Module):
    """One region over tied embeddings and four blocks, the third of them an island in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
            for index, block in enumerate(self.blocks):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=index != 2):
                    x = block(x.float())
            logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Steps(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, Tensor]]


def alone(model: nn.Module, batch: dict[str, Tensor]) -> Steps:
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    steps = Steps([], [])
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        steps.losses.append(loss.item())
        steps.gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
    return steps


def steps_of(rank: int, world: int, program: Program, batch: dict[str, Tensor]) -> Steps:
    optimizer = torch.optim.AdamW(program.parameters(), lr=LEARNING_RATE)
    steps = Steps([], [])
    for _ in range(STEPS):
        optimizer.zero_grad()
        steps.losses.append(program.step(batch))
        steps.gradients.append(program.gradients())
        optimizer.step()
    return steps


WHOLE = {"data": 1, "tensor": 1, "pipeline": 2, "micro_batch_size": 8}
SPLITS = {
    "data": {"data": 2, "tensor": 1, "pipeline": 1},
    "tensor": {"data": 1, "tensor": 2, "pipeline": 1},
    "pipeline": {"data": 1, "tensor": 1, "pipeline": 2, "micro_batch_size": 2},
    "context": {"data": 1, "tensor": 1, "pipeline": 1, "context": 2},
    "zero3-recompute": {"data": 2, "tensor": 1, "pipeline": 1, "zero_stage": 3, "recompute": "full"},
    "zero-bubble": {"data": 1, "tensor": 1, "pipeline": 2, "schedule": "zero_bubble", "micro_batch_size": 2},
    "pipeline-tensor-sequence": {
        "data": 1, "tensor": 2, "pipeline": 2, "micro_batch_size": 2, "sequence_parallel": True,
    },
}  # fmt: skip
WIDE = ("data", "pipeline", "context", "zero3-recompute", "zero-bubble", "pipeline-tensor-sequence")


def trained(strategy: dict[str, Any]) -> tuple[Steps, list[Steps]]:
    torch.manual_seed(0)
    model = Mixed()
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(VOCABULARY, (8, LENGTH), generator=generator) for name in ("ids", "labels")}
    world = strategy["data"] * strategy["tensor"] * strategy["pipeline"] * strategy.get("context", 1)
    program = program_forced(model, batch, strategy, gpus=world)
    return alone(model, batch), run_ranks(steps_of, world, program, batch)


def test_stages_cut_inside_a_region_are_equal_to_the_last_bit() -> None:
    expected, ranks = trained(WHOLE)
    for found in ranks:
        assert found.losses == expected.losses
        for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
            for name, gradient in theirs.items():
                assert torch.equal(ours[name], gradient), name


@pytest.mark.parametrize(
    "split", [pytest.param(name, marks=[pytest.mark.wide] if name in WIDE else []) for name in SPLITS]
)
def test_every_axis_trains_to_the_numbers_of_the_same_region(split: str) -> None:
    expected, ranks = trained(SPLITS[split])
    for found in ranks:
        assert found.losses == pytest.approx(expected.losses, rel=3e-3)
        for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
            whole = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
            for name, gradient in theirs.items():
                assert (ours[name] - gradient).norm() <= 0.03 * max(gradient.norm(), 0.1 * whole), name
