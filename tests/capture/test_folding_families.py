"""Folded captures of transformers' families, with blocks that only look alike: the graph of the whole trace, and its
layers. Widths are small, depths are those that show a family's pattern."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autoplan
import autoplan.capture
from autoplan.models import resolve
from tests.capture.test_folding import assert_same
from tests.support.captures import seeded
from tests.support.models import HEADS, HIDDEN, SEQUENCE, VOCABULARY, tiny_gpt2, token_batch

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.wide

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 6,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 2 * SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 6,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": 2 * SEQUENCE,
}
BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": 6,
    "decoder_layers": 5,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 2 * SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 6,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 7,
}
SPECIAL_TOKENS = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def causal(name: str, **settings: Any) -> tuple[nn.Module, Any]:
    config = getattr(transformers, f"{name}Config")(**{**DECODER, **settings})
    return seeded(getattr(transformers, f"{name}ForCausalLM"), config).train(), token_batch(2)


def masked(name: str, **settings: Any) -> tuple[nn.Module, Any]:
    config = getattr(transformers, f"{name}Config")(**{**ENCODER, **settings})
    return seeded(getattr(transformers, f"{name}ForMaskedLM"), config).train(), token_batch(2)


def translating(name: str, **settings: Any) -> tuple[nn.Module, Any]:
    config = getattr(transformers, f"{name}Config")(**{**BOTH, **settings})
    return seeded(getattr(transformers, f"{name}ForConditionalGeneration"), config).train(), token_batch(2)


def seeing(name: str, **settings: Any) -> tuple[nn.Module, Any]:
    config = getattr(transformers, f"{name}Config")(**{**VISION, **settings})
    model = seeded(getattr(transformers, f"{name}ForImageClassification"), config).train()
    size = config.image_size
    return model, {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.arange(2)}


def gemma3() -> tuple[nn.Module, Any]:
    """Five blocks with a window, one without; the last period is cut short."""
    config = transformers.Gemma3TextConfig(**{**DECODER, "sliding_window": 8, "num_hidden_layers": 11})
    return seeded(transformers.Gemma3ForCausalLM, config).train(), token_batch(2)


def falcon() -> tuple[nn.Module, Any]:
    settings = {key: value for key, value in DECODER.items() if key not in ("head_dim", "num_key_value_heads")}
    return seeded(transformers.FalconForCausalLM, transformers.FalconConfig(**settings)).train(), token_batch(2)


def swin() -> tuple[nn.Module, Any]:
    """Blocks with plain and shifted windows take turns."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 10], num_heads=[2, 4], window_size=2, drop_path_rate=0.0
    )
    model = seeded(transformers.SwinForImageClassification, config).train()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.arange(2)}


def t5() -> tuple[nn.Module, Any]:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=8, d_ff=64, num_layers=6, num_heads=HEADS, decoder_start_token_id=0
    )
    return seeded(transformers.T5ForConditionalGeneration, config).train(), token_batch(2)


def whisper() -> tuple[nn.Module, Any]:
    settings = {**BOTH, "max_source_positions": 8, "max_target_positions": SEQUENCE, "num_mel_bins": 4}
    del settings["max_position_embeddings"]
    model = seeded(transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(**settings))
    return model.train(), {"input_features": torch.randn(2, 4, 16), "labels": token_batch(2)["labels"]}


# family -> (model and batch, blocks folded: of each kind and way of being called, all but the first two and the last)
FAMILIES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], int]] = {
    "gpt2 with dropout": (lambda: tiny_gpt2(layers=6, attn_implementation="sdpa"), 3),
    "gpt2 that scales by depth": (lambda: tiny_gpt2(layers=6, scale_attn_by_inverse_layer_idx=True), 0),
    "gpt2 eager": (lambda: tiny_gpt2(layers=6, attn_implementation="eager"), 3),
    "llama": (lambda: causal("Llama"), 3),
    "mistral": (lambda: causal("Mistral", sliding_window=8), 3),
    "qwen2": (lambda: causal("Qwen2"), 3),
    "qwen2, the last four with windows": (
        lambda: causal("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=4, num_hidden_layers=8),
        3,
    ),
    "qwen3": (lambda: causal("Qwen3"), 3),
    "phi3": (lambda: causal("Phi3"), 3),
    "gemma2": (lambda: causal("Gemma2", sliding_window=8, num_hidden_layers=10), 5),
    "gemma3": (lambda: gemma3(), 7),
    "gpt_neox": (lambda: causal("GPTNeoX"), 3),
    "falcon, whose blocks hold constants of their own": (falcon, 0),
    "opt": (lambda: causal("OPT", word_embed_proj_dim=HIDDEN, ffn_dim=64, layerdrop=0.0), 3),
    "mixtral": (lambda: causal("Mixtral", **SPARSE), 3),
    "qwen3 moe": (lambda: causal("Qwen3Moe", **SPARSE), 3),
    "deepseek v3, the first two dense": (
        lambda: causal(
            "DeepseekV3",
            num_hidden_layers=7,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=2,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            num_key_value_heads=HEADS,
        ),
        2,
    ),
    "mamba": (
        lambda: causal("Mamba", state_size=4, expand=2, time_step_rank=4, num_hidden_layers=5, use_mambapy=False),
        2,
    ),
    "bert": (lambda: masked("Bert"), 3),
    "roberta": (lambda: masked("Roberta"), 3),
    "modernbert": (lambda: masked("ModernBert", num_hidden_layers=8, **SPECIAL_TOKENS), 2),
    "albert, one block called again and again": (lambda: masked("Albert", embedding_size=16), 0),
    "vit": (lambda: seeing("ViT"), 3),
    "swin": (swin, 5),
    "t5": (t5, 4),
    "bart": (lambda: translating("Bart"), 4),
    "whisper": (whisper, 4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_folded_is_whole(family: str) -> None:
    build, folds = FAMILIES[family]
    assert assert_same(*build()) == folds


@pytest.mark.parametrize("preset", ["gpt2", "vit-large"])
def test_presets_small_enough_to_trace_whole(preset: str) -> None:
    """gpt2 has 12 blocks, vit-large 24."""
    resolved = resolve(preset, precision="bf16", batch=2)
    assert assert_same(resolved.model, resolved.example_inputs) == {"gpt2": 9, "vit-large": 21}[preset]


def test_the_plan_is_the_same_byte_for_byte() -> None:
    def planned() -> str:
        plan = autoplan.plan("gpt2", gpus="2x8xA100-80GB", global_batch=64, strategy={"tensor": 2, "pipeline": 2})
        return json.dumps(plan.to_dict(), sort_keys=True)

    folded = planned()
    with mock.patch.object(autoplan.capture, "capture_folded", autoplan.capture.capture):
        assert planned() == folded
