"""Activation checkpointing that a model asks for is kept: its layers are recomputed, whatever else is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoplan
from autoplan.capture import capture, capture_folded
from autoplan.layers import build_layers
from tests.support.captures import line_of

transformers = pytest.importorskip("transformers")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Eight equal blocks; every ``every``-th is checkpointed."""

    def __init__(self, *, use_reentrant: bool = False, every: int = 1) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(8))
        self.use_reentrant, self.every = use_reentrant, every

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            asked = index % self.every == 0
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if asked else block(x)  # recomputes
        return x.square().mean()


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def policies(plan: autoplan.Plan) -> dict[str, str]:
    named = (policy for stage in plan.stages for policy in stage.layer_recompute)
    return dict(zip(plan.model.layers, named, strict=True))


@pytest.mark.parametrize("take", [capture, capture_folded])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_operators_of_a_region_keep_the_line_that_asks_for_it(take: Any, use_reentrant: bool) -> None:
    found = take(Stack(use_reentrant=use_reentrant), torch.randn(4, 4))
    marked = [node for node in found.graph_module.graph.nodes if "checkpointed" in node.meta]
    assert len(marked) == 8 * 5  # norm, two products, gelu, sum
    assert {line_of(__file__, "recomputes") in node.meta["checkpointed"] for node in marked} == {True}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_those_of_the_model(use_reentrant: bool) -> None:
    model, batch = Stack(use_reentrant=use_reentrant), torch.randn(4, 4)
    model(batch).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    capture(model, batch).graph_module(batch).backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def test_a_reentrant_region_given_no_gradient_trains_nothing_as_in_torch() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=True)).square().mean()  # cuts

    model, batch = First(), torch.randn(4, 4)
    found = capture(model, batch)
    assert any("use_reentrant=False" in note and line_of(__file__, "cuts") in note for note in found.notes)
    found.graph_module(batch).backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None
    model.zero_grad()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model(batch).backward()
    assert model.first.weight.grad is None and model.second.weight.grad is not None


@pytest.mark.parametrize("strategy", [{}, {"pipeline": 2}, {"pipeline": 2, "schedule": "zero_bubble"}, {"tensor": 2}])
def test_the_plan_recomputes_what_the_model_asks_for_and_prices_it(strategy: dict[str, Any]) -> None:
    batch = {"input_ids": torch.zeros(8, 16, dtype=torch.long), "labels": torch.zeros(8, 16, dtype=torch.long)}
    model = llama()
    plan = autoplan.plan(model, gpus="2xA100-80GB", example_inputs=batch, strategy=strategy)
    forced = autoplan.plan(model, gpus="2xA100-80GB", example_inputs=batch, strategy={**strategy, "recompute": "none"})
    assert {name: policy for name, policy in policies(plan).items() if ".layers." in name} == {
        f"model.layers.{index}": "full" for index in range(6)
    }
    assert set(policies(forced).values()) == {"none"}
    assert plan.predicted.time_terms["recompute"] > 0 == forced.predicted.time_terms.get("recompute", 0)
    saved = [sum(stage.memory_terms.get("saved_activations", 0) for stage in each.stages) for each in (plan, forced)]
    assert plan.strategy != forced.strategy or saved[0] < saved[1]
    assert "asked for by the model" in plan.explain()
    assert "in place of the model's own activation checkpointing" in forced.explain().replace("\n  ", " ")


def test_blocks_that_are_checkpointed_and_blocks_that_are_not_are_of_two_kinds() -> None:
    found = capture_folded(Stack(every=2), torch.randn(4, 4))
    layers = build_layers(found)
    asked = [layers.kinds[layer.kind].checkpointed for layer in layers.layers if layer.name.startswith("blocks.")]
    assert asked == [True, False] * 4


def test_a_small_part_of_a_layer_is_left_to_the_plan_and_said() -> None:
    class Part(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(F.gelu, self.up(self.norm(x)), use_reentrant=False)  # a part
            return x + self.down(y)

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Part() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    plan = autoplan.plan(Parts(), gpus="1xA100-80GB", example_inputs=torch.randn(4, 8))
    said = next(text for text in plan.assumptions if "activation checkpointing" in text)
    assert line_of(__file__, "a part") in said and "left to the plan" in said
    assert set(policies(plan).values()) == {"none"}
