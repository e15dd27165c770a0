"""Hugging Face models from their config alone: the class, built on meta, and a training batch that suits it.

The class is the config's first ``architectures`` entry where that has a training loss; else its ``model_type``'s class
for, in this order, sequence-to-sequence, masked, causal language modelling and image classification.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from autoplan.errors import ModelError

SEQUENCE_CAP = 4096
IMAGE_SIZE = 224
_MOST_LAYERS = 10_000  # of a config's: more are a mistake, and building them takes hours
_LEARNED_POSITIONS = ("wpe", "position_embeddings", "embed_positions", "position_embedding")


def parse_config(text: str, *, where: str) -> Any:
    """A config.json's text as a PretrainedConfig with the cache off; raises :class:`ModelError` with the line."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(
            f"malformed config, not JSON: {error.msg}",
            where=f"{where}:{error.lineno}:{error.colno}",
            attempt="mend that line, or start from a preset's config (`autoplan models`)",
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise ModelError(f"malformed config: {error}", where=where) from None
    if not isinstance(data, dict):
        raise ModelError(
            f"malformed config: it holds a {type(data).__name__}, not an object",
            where=where,
            legal='{"model_type": "llama", "hidden_size": 4096, ...}',
        )
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(transformers.CONFIG_MAPPING), n=3)
        raise ModelError(
            "malformed config: it has no `model_type`" if model_type is None else f"unknown model_type {model_type!r}",
            where=where,
            legal=f"a model_type of transformers {transformers.__version__}, such as gpt2, llama, t5, vit",
            attempt=f"did you mean {', '.join(near)}?" if near else "",
        )
    with _silent():
        try:
            config = transformers.CONFIG_MAPPING[model_type].from_dict(data)
        except Exception as error:  # transformers validates with many types of its own
            raise _unbuildable(error, where) from None
    _turn_cache_off(config)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ModelError(f"malformed config: {layers:,} layers", where=where, legal=f"at most {_MOST_LAYERS:,}")
    return config


def build_on_meta(config: Any, *, dtype: torch.dtype, where: str) -> nn.Module:
    """The config's model in train mode, parameters on meta in ``dtype``; raises :class:`ModelError`."""
    return build(config, dtype=dtype, where=where, within=torch.device("meta"))


def build(config: Any, *, dtype: torch.dtype, where: str, within: contextlib.AbstractContextManager[Any]) -> nn.Module:
    """The config's model in train mode, built within a context; raises :class:`ModelError`."""
    model_class = _model_class(config, where)
    with _silent(), within:
        try:
            return model_class._from_config(config, dtype=dtype).train()
        except Exception as error:  # a wrong size may surface anywhere in the user's config
            raise _unbuildable(error, where) from None


def example_inputs_for(
    model: Any, *, batch: int, sequence: int | None = None, device: torch.device | str = "meta"
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """A training batch for a PreTrainedModel, and what was assumed to make it.

    Token ids and labels are [batch, sequence]; images [batch, channels, height, width]. There is no attention mask:
    it would make every causal attention a masked one. ``sequence`` None: the model's maximum, at most 4096. Raises
    :class:`ModelError` for a sequence beyond learned positions, and for a model whose batch is not known.
    """
    name = type(model).__name__
    if batch < 1:
        raise ModelError(f"a batch of {batch} samples", legal="at least 1")
    if _is_image_model(model):
        return _image_batch(model, batch=batch, sequence=sequence, device=device)
    takes_labels = name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"))
    if model.main_input_name != "input_ids" or not takes_labels:
        raise ModelError(
            f"the batch of {name} is not known",
            legal="causal, masked and sequence-to-sequence language models and image classifiers",
            attempt="give example_inputs= (from a shell: file.py:factory that returns model, example_inputs)",
        )
    length, assumptions = _sequence_for(model, sequence)
    count = batch * length
    ids = (torch.arange(count, device=device) % model.config.get_text_config().vocab_size).reshape(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}, assumptions


def _image_batch(
    model: Any, *, batch: int, sequence: int | None, device: torch.device | str
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    if sequence is not None:
        raise ModelError(f"{type(model).__name__} reads images: a sequence length means nothing to it")
    vision = getattr(model.config, "vision_config", None) or model.config
    size = getattr(vision, "image_size", None)
    assumptions = () if size else (f"images of {IMAGE_SIZE} x {IMAGE_SIZE} (the config says no size)",)
    size = size or IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.zeros(batch, vision.num_channels, height, width, dtype=model.dtype, device=device)
    labels = torch.arange(batch, device=device) % model.config.num_labels
    return {"pixel_values": pixels, "labels": labels}, assumptions


def _sequence_for(model: Any, sequence: int | None) -> tuple[int, tuple[str, ...]]:
    """The length to use and what to tell the user about it."""
    config = model.config.get_text_config()
    maximum = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    learned = _learned_positions(model)
    limit = min(filter(None, (maximum, learned)), default=None)
    if sequence is None:
        chosen = min(limit or SEQUENCE_CAP, SEQUENCE_CAP)
        cut = f", of the model's {limit}" if limit and limit > chosen else ""
        return chosen, (f"sequence length {chosen}{cut} (none was given)",)
    if sequence < 1:
        raise ModelError(f"a sequence of {sequence} tokens", legal="at least 1", attempt="--seq 1024")
    if learned is not None and limit is not None and sequence > limit:
        raise ModelError(
            f"a sequence of {sequence} tokens: {type(model).__name__} has learned positions for {limit}",
            legal=f"1 to {limit}",
            attempt=f"--seq {limit}, or a config with more positions",
        )
    if maximum is not None and sequence > maximum:
        return sequence, (f"sequence length {sequence} is beyond the config's {maximum}",)
    return sequence, ()


def _learned_positions(model: nn.Module) -> int | None:
    """How many positions the model has a learned vector for, or None: rotary and relative ones have no end."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in _LEARNED_POSITIONS:
            reserved = module.padding_idx + 1 if module.padding_idx is not None else getattr(module, "offset", 0)
            return module.num_embeddings - reserved
    return None


def _is_image_model(model: Any) -> bool:
    return model.main_input_name == "pixel_values" and type(model).__name__.endswith("ForImageClassification")


def _model_class(config: Any, where: str) -> Any:
    named = (config.architectures or [None])[0]
    bare = named is None or (named.endswith("Model") and not named.endswith("LMHeadModel"))
    if not bare:
        found = getattr(transformers, named, None)
        if found is None:
            raise ModelError(
                f"unknown architecture {named!r}",
                where=where,
                legal=f"a class of transformers {transformers.__version__}",
                attempt="mend `architectures`, or leave it out to choose by model_type",
            )
        if not named.endswith("ForPreTraining"):
            return found
    mappings = [
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ]
    if getattr(config, "is_encoder_decoder", False):
        mappings.insert(0, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    for mapping in mappings:
        if config.model_type in mapping:
            found = mapping[config.model_type]
            return getattr(transformers, found if isinstance(found, str) else found[0])
    raise ModelError(
        f"model_type {config.model_type!r} has no training loss that is known here",
        where=where,
        legal="causal, masked and sequence-to-sequence language models and image classifiers",
        attempt="write a factory that returns (model, example inputs) and give file.py:factory",
    )


def _turn_cache_off(config: Any) -> None:
    """A key-value cache is of no use in training, and its container cannot be traced."""
    config.use_cache = False
    for name in getattr(config, "sub_configs", None) or ():
        inner = getattr(config, name, None)
        if inner is not None:
            _turn_cache_off(inner)


def _unbuildable(error: Exception, where: str) -> ModelError:
    reason = " ".join(str(error).split())
    if len(reason) > 300:
        reason = reason[:297] + "..."
    return ModelError(
        f"this config builds no model: {reason or type(error).__name__}",
        where=where,
        attempt="compare it with a preset's config of the same family",
    )


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' advice on generation, caches and attention kernels."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
