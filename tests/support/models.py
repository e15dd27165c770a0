"""Small models with a batch each, for every room's tests.

Each builder returns ``(model, batch)``: float32, seeded, dropout off, in train mode; the batch is a dict of keyword
arguments with eight samples, and ``model(**batch)`` gives the loss. Labels of language models hold ignore_index -100
unevenly: sample i ignores its last i tokens, and the last sample but one ignores all, so that a mean over tokens is
not a mean of the samples' means, and a micro-batch of one may count no tokens at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 8
SEQUENCE = 16
VOCABULARY = 96
HIDDEN = 32
HEADS = 4
LAYERS = 4

Batch = dict[str, Tensor]


def _generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def token_batch(samples: int = SAMPLES, *, sequence: int = SEQUENCE, seed: int = 1) -> Batch:
    """``input_ids`` and ``labels`` [samples, sequence]; labels ignored unevenly, see the module."""
    generator = _generator(seed)
    tokens = torch.randint(VOCABULARY, (samples, sequence), generator=generator)
    labels = torch.randint(VOCABULARY, (samples, sequence), generator=generator)
    for sample in range(samples):
        labels[sample, sequence - sample % sequence :] = -100
    if samples > 2:
        labels[samples - 2] = -100
    return {"input_ids": tokens, "labels": labels}


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(hidden)
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden)
        self.c_fc = nn.Linear(hidden, 4 * hidden)
        self.mlp_proj = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        query, key, value = self.c_attn(self.ln_1(x)).split(hidden, dim=2)
        query, key, value = (
            part.view(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2) for part in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, sequence, hidden))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """As karpathy/nanoGPT lays it out: fused query-key-value, learned positions, the head tied to the embedding."""

    def __init__(self, layers: int = LAYERS, hidden: int = HIDDEN, heads: int = HEADS) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, hidden)
        self.wpe = nn.Embedding(SEQUENCE, hidden)
        self.h = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        for table in (self.wte, self.wpe):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


class CNN(nn.Module):
    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if batch_norm else nn.GroupNorm(2, 8)
        self.conv_2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.conv_3 = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16 * 4, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv_1(images)))
        x = F.max_pool2d(F.relu(self.conv_2(x)), 2)
        x = x + F.relu(self.conv_3(x))
        return F.cross_entropy(self.head(x.flatten(1)), labels)


class MLP(nn.Module):
    """Returns the mean squared error."""

    def __init__(self, features: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(features, features) for _ in range(layers)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def nano_gpt(*, samples: int = SAMPLES, layers: int = LAYERS) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return NanoGPT(layers), token_batch(samples)


def _image_batch(samples: int) -> Batch:
    generator = _generator()
    return {
        "images": torch.randn(samples, 3, 8, 8, generator=generator),
        "labels": torch.randint(10, (samples,), generator=generator),
    }


def small_cnn(*, samples: int = SAMPLES) -> tuple[nn.Module, Batch]:
    """No batch statistics: GroupNorm, so its batch may be split."""
    torch.manual_seed(0)
    return CNN(), _image_batch(samples)


def batch_norm_cnn(*, samples: int = SAMPLES) -> tuple[nn.Module, Batch]:
    """With BatchNorm in train mode: its samples meet, and its running statistics are mutated buffers."""
    torch.manual_seed(0)
    return CNN(batch_norm=True), _image_batch(samples)


def mlp(*, samples: int = SAMPLES) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    generator = _generator()
    return MLP(), {
        "x": torch.randn(samples, 16, generator=generator),
        "y": torch.randn(samples, 16, generator=generator),
    }


def tiny_gpt2(*, samples: int = SAMPLES, layers: int = LAYERS, **config: Any) -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=2 * SEQUENCE,
        n_embd=HIDDEN,
        n_layer=layers,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        **config,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(settings).train(), token_batch(samples)


def tiny_llama(*, samples: int = SAMPLES, layers: int = LAYERS, **config: Any) -> tuple[nn.Module, Batch]:
    """Grouped-query attention: four heads of queries over two of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": 2 * SEQUENCE,
        "attention_dropout": 0.0,
        **config,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings)).train(), token_batch(samples)


def tiny_t5(*, samples: int = SAMPLES, layers: int = LAYERS, **config: Any) -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    settings = {
        "vocab_size": VOCABULARY,
        "d_model": HIDDEN,
        "d_kv": HIDDEN // HEADS,
        "d_ff": 2 * HIDDEN,
        "num_layers": layers,
        "num_heads": HEADS,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        **config,
    }
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**settings)).train(), token_batch(samples)
