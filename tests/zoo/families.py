"""transformers' families, two blocks each (encoder-decoders one and one).

Four heads; two of keys and values where a family groups them.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.zoo.entry import HEADS, HIDDEN, SAMPLES, SEQUENCE, VOCABULARY, Built, Entry, seeded, token_batch

LAYERS = 2
SPECIAL = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos")}
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 2 * SEQUENCE,
    "attention_dropout": 0.0,
    **SPECIAL,
}
PLAIN = {key: value for key, value in DECODER.items() if key not in ("head_dim", "num_key_value_heads")}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 2 * SEQUENCE,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "max_position_embeddings": 2 * SEQUENCE,
    "dropout": 0.0,
    "decoder_start_token_id": 0,
    **SPECIAL,
}
VISION = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * HIDDEN,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 7,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": HEADS,
}
OPT = {"word_embed_proj_dim": HIDDEN, "ffn_dim": 2 * HIDDEN, "layerdrop": 0.0, "dropout": 0.0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * SEQUENCE}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, **SPECIAL}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _model(config: Any, head: str) -> Any:
    name = type(config).__name__.removesuffix("TextConfig").removesuffix("Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}{head}")(config).train()


def _config(name: str, settings: dict[str, Any]) -> Any:
    return getattr(transformers, f"{name}Config")(**settings)


def causal(name: str, base: dict[str, Any] = DECODER, *, head: str = "ForCausalLM", **settings: Any) -> Built:
    return _model(_config(name, {**base, **settings}), head), token_batch(), None


def masked(name: str, **settings: Any) -> Built:
    return _model(_config(name, {**ENCODER, **settings}), "ForMaskedLM"), token_batch(), None


def translating(name: str, **settings: Any) -> Built:
    model = _model(_config(name, {**BOTH, **settings}), "ForConditionalGeneration")
    return model, token_batch(), None


def seeing(name: str, **settings: Any) -> Built:
    config = _config(name, {**VISION, **settings})
    pixels = torch.randn(SAMPLES, 3, config.image_size, config.image_size, generator=seeded())
    return _model(config, "ForImageClassification"), {"pixel_values": pixels, "labels": torch.arange(SAMPLES)}, None


def t5() -> Built:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=HIDDEN // HEADS,
        d_ff=2 * HIDDEN,
        num_layers=1,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _model(config, "ForConditionalGeneration"), token_batch(), None


def whisper() -> Built:
    settings = {key: value for key, value in BOTH.items() if key != "max_position_embeddings"}
    config = transformers.WhisperConfig(
        **settings, max_source_positions=SEQUENCE, max_target_positions=SEQUENCE, num_mel_bins=4
    )
    features = torch.randn(SAMPLES, 4, 2 * SEQUENCE, generator=seeded())
    batch = {"input_features": features, "labels": token_batch()["labels"]}
    return _model(config, "ForConditionalGeneration"), batch, None


def clip() -> Built:
    """Its own loss compares every text with every image: samples of the batch meet."""
    text = {**ENCODER, "projection_dim": HIDDEN, **SPECIAL}
    vision = {**VISION, "projection_dim": HIDDEN}
    del vision["num_labels"]
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=HIDDEN)
    batch = {
        "input_ids": token_batch()["input_ids"],
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=seeded()),
        "return_loss": True,
    }
    return _model(config, "Model"), batch, None


def swin() -> Built:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2],
        num_heads=[4],
        window_size=2,
        drop_path_rate=0.0,
        hidden_dropout_prob=0.0,
        num_labels=7,
    )
    pixels = torch.randn(SAMPLES, 3, 32, 32, generator=seeded())
    return _model(config, "ForImageClassification"), {"pixel_values": pixels, "labels": torch.arange(SAMPLES)}, None


def _decoder(name: str, build: Any, **more: Any) -> Entry:
    return Entry(name=name, kind="transformers", build=build, sequence=True, causal=True, **more)


def _encoder(name: str, build: Any, **more: Any) -> Entry:
    return Entry(name=name, kind="transformers", build=build, sequence=True, **more)


FAMILIES = (
    _decoder("GPT-2", lambda: causal("GPT2", {**GPT2, **NO_DROPOUT, **SPECIAL}, head="LMHeadModel")),
    _decoder("OPT", lambda: causal("OPT", PLAIN, **OPT)),
    _decoder("GPT-NeoX", lambda: causal("GPTNeoX", PLAIN)),
    _decoder("BLOOM", lambda: causal("Bloom", BLOOM)),
    _decoder("Falcon", lambda: causal("Falcon", PLAIN)),
    _decoder("Llama", lambda: causal("Llama")),
    _decoder("Mistral", lambda: causal("Mistral", sliding_window=4)),
    _decoder("Qwen2", lambda: causal("Qwen2")),
    _decoder("Qwen3", lambda: causal("Qwen3")),
    _decoder("Gemma2", lambda: causal("Gemma2", sliding_window=4)),
    _decoder("Gemma3", lambda: causal("Gemma3Text", sliding_window=4)),
    _decoder("Phi3", lambda: causal("Phi3")),
    _decoder("Mixtral", lambda: causal("Mixtral", **SPARSE), experts=4),
    _decoder("Qwen3-MoE", lambda: causal("Qwen3Moe", **SPARSE), experts=4),
    _decoder("DeepSeek-V3", lambda: causal("DeepseekV3", **DEEPSEEK), experts=4),
    Entry(
        name="Mamba",
        kind="transformers",
        build=lambda: causal(
            "Mamba",
            {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, **SPECIAL},
            state_size=4,
            expand=2,
            time_step_rank=4,
            use_mambapy=False,
        ),
        sequence=True,
    ),
    _encoder("BERT", lambda: masked("Bert")),
    _encoder("RoBERTa", lambda: masked("Roberta", max_position_embeddings=2 * SEQUENCE)),
    _encoder("ALBERT", lambda: masked("Albert", embedding_size=HIDDEN)),
    _encoder(
        "DistilBERT",
        lambda: masked(
            "DistilBert",
            dim=HIDDEN,
            hidden_dim=2 * HIDDEN,
            n_heads=HEADS,
            n_layers=LAYERS,
            dropout=0.0,
            attention_dropout=0.0,
        ),
    ),
    _encoder("T5", t5),
    _encoder("BART", lambda: translating("Bart")),
    _encoder("Whisper", whisper),
    _encoder("ViT", lambda: seeing("ViT")),
    _encoder("Swin", swin),
    _encoder("CLIP", clip),
)
