"""Hugging Face families: the captured graph is the untouched eager model's loss and gradients, at any batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.capture import capture
from autoplan.errors import CaptureError
from tests.support.captures import captured, eager, first_samples, largest_difference, seeded, to_float64
from tests.support.models import HEADS, HIDDEN, SEQUENCE, VOCABULARY, tiny_gpt2, tiny_llama, tiny_t5, token_batch

transformers = pytest.importorskip("transformers")

DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 2 * SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def gpt2() -> tuple[nn.Module, Any]:
    return tiny_gpt2(layers=2)


def llama() -> tuple[nn.Module, Any]:
    return tiny_llama(layers=2)


def t5() -> tuple[nn.Module, Any]:
    return tiny_t5(layers=1)


def bert() -> tuple[nn.Module, Any]:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return seeded(transformers.BertForMaskedLM, config), token_batch()


def mixtral() -> tuple[nn.Module, Any]:
    """Eager experts are a Python loop over who was sent where: the oracle. Captured, they are a grouped product."""
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    return seeded(transformers.MixtralForCausalLM, config), token_batch()


def vit() -> tuple[nn.Module, Any]:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=7,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    batch = {"pixel_values": torch.randn(8, 3, 16, 16), "labels": torch.arange(8) % 7}
    return seeded(transformers.ViTForImageClassification, config), batch


def qwen3() -> tuple[nn.Module, Any]:
    return seeded(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**DECODER)), token_batch()


def gemma2() -> tuple[nn.Module, Any]:
    """Soft-capped scores: attention stays written out."""
    config = transformers.Gemma2Config(**DECODER, sliding_window=8)
    return seeded(transformers.Gemma2ForCausalLM, config), token_batch()


def mistral() -> tuple[nn.Module, Any]:
    """A sliding window: the mask means something and stays."""
    config = transformers.MistralConfig(**DECODER, sliding_window=8)
    return seeded(transformers.MistralForCausalLM, config), token_batch()


def opt() -> tuple[nn.Module, Any]:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        ffn_dim=64,
        max_position_embeddings=2 * SEQUENCE,
        dropout=0.0,
        pad_token_id=1,
    )
    return seeded(transformers.OPTForCausalLM, config), token_batch()


def whisper() -> tuple[nn.Module, Any]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=2 * SEQUENCE,
        num_mel_bins=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        dropout=0.0,
    )
    batch = {"input_features": torch.randn(8, 8, 40), "labels": token_batch()["labels"]}
    return seeded(transformers.WhisperForConditionalGeneration, config), batch


FAMILIES: list[Callable[[], tuple[nn.Module, Any]]] = [
    gpt2, llama, t5, bert, mixtral, vit, qwen3, gemma2, mistral, opt, whisper,
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_captured_loss_and_gradients_equal_eager_ones_at_any_batch_size(family: Any) -> None:
    model, batch = family()
    model, batch = model.train().double(), to_float64(batch)
    result = capture(model, batch)
    assert result.dynamic_batch
    assert result.batch_size == 8
    for samples in (8, 3, 1):
        part = first_samples(batch, samples)
        assert largest_difference(captured(result, model, part), eager(model, part)) <= 1e-10


def attention(model: nn.Module, batch: Any) -> list[Any]:
    graph = capture(model, batch).graph_module.graph
    return [n for n in graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]


@pytest.mark.parametrize("family", [gpt2, llama, mixtral, qwen3, opt], ids=lambda family: family.__name__)
def test_plain_causal_attention_has_no_mask(family: Any) -> None:
    nodes = attention(*family())
    assert nodes
    for node in nodes:
        assert node.args[3] is None  # attn_mask
        assert node.args[5] is True  # is_causal


def test_padding_and_windows_keep_their_masks() -> None:
    model, batch = tiny_llama(layers=1)
    padding = torch.ones_like(batch["input_ids"])
    padding[:, -4:] = 0
    assert all(node.args[3] is not None for node in attention(model, {**batch, "attention_mask": padding}))
    assert all(node.args[3] is not None for node in attention(*mistral()))


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_sequences_are_told_apart_where_the_eager_model_does(use_cache: bool) -> None:
    model, batch = tiny_llama(layers=1, use_cache=use_cache)
    model = model.double()
    unpacked = eager(model, batch)
    batch["position_ids"] = torch.cat([torch.arange(10), torch.arange(6)]).expand(8, 16).clone()
    result = capture(model, batch)
    expected = eager(model, batch)
    assert largest_difference(captured(result, model, batch), expected) <= 1e-10
    assert largest_difference(unpacked, expected) > 1e-3 or use_cache


def test_configs_and_registries_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    model, batch = tiny_t5(layers=1)
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    before = [dict(c.__dict__) for c in configs]
    functions = masking_utils.find_packed_sequence_indices, masking_utils.is_torchdynamo_exporting
    capture(model, batch)
    with pytest.raises(CaptureError, match="loss"):
        capture(model, {"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"]})
    assert [dict(c.__dict__) for c in configs] == before
    assert (masking_utils.find_packed_sequence_indices, masking_utils.is_torchdynamo_exporting) == functions


def test_attention_that_needs_a_gpu_is_traced_as_sdpa() -> None:
    model, batch = tiny_llama(layers=1)
    model = model.double()
    expected = eager(model, batch)
    model.config._attn_implementation = "flex_attention"
    result = capture(model, batch)
    assert model.config._attn_implementation == "flex_attention"
    assert any("flex_attention" in note for note in result.notes)
    assert largest_difference(captured(result, model, batch), expected) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_capture_in_their_dtype(dtype: torch.dtype) -> None:
    model, batch = tiny_llama(layers=1)
    result = capture(model.to(dtype), batch)
    assert result.dtype == dtype
    loss = captured(result, model, batch)[0]
    assert torch.equal(loss, eager(model, batch)[0])
