"""The small model and the data of the examples beside this file."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

GLOBAL_BATCH, TOKENS, SAMPLES = 8, 32, 64


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
        )
    )


def dataset() -> list[dict[str, Tensor]]:
    """Sentences that count upwards from anywhere: something to learn."""
    starts = torch.randint(256, (SAMPLES, 1), generator=torch.Generator().manual_seed(1))
    tokens = (starts + torch.arange(TOKENS)) % 256
    return [{"input_ids": row, "labels": row} for row in tokens]


def batch() -> dict[str, Tensor]:
    return torch.utils.data.default_collate(dataset()[:GLOBAL_BATCH])
