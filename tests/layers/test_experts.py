"""Parameters of experts are marked, stacked or in a list of experts; routers and shared experts are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.layers import build_layers
from tests.support.models import HEADS, HIDDEN, VOCABULARY, token_batch

EXPERTS = 4


def marked(model: nn.Module, batch: object) -> dict[str, bool]:
    graph = build_layers(capture(model, batch))
    return {
        name: parameter.expert
        for layer in graph.layers
        for name, parameter in zip(layer.parameters, graph.kinds[layer.kind].parameters, strict=True)
    }


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).relu()


class Mixture(nn.Module):
    """Every expert sees every token, weighted: the plainest mixture there is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.parts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.shared_expert = Expert()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        mixed = self.shared_expert(x)
        for index, part in enumerate(self.parts):
            mixed = mixed + weights[..., index : index + 1] * part(x)
        return nn.functional.mse_loss(mixed, y)


def test_a_list_of_experts() -> None:
    found = marked(Mixture(), (torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)))
    assert {name for name, expert in found.items() if expert} == {
        f"parts.{index}.up.{leaf}" for index in range(EXPERTS) for leaf in ("weight", "bias")
    }
    assert {"router.weight", "shared_expert.up.weight"} <= found.keys()


def test_stacked_experts_of_transformers() -> None:
    """DeepSeek-V3: experts behind a router, and one shared by all tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    found = marked(transformers.DeepseekV3ForCausalLM(config).train(), token_batch(2))
    experts = {name for name, expert in found.items() if expert}
    assert experts == {f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"} <= found.keys()
