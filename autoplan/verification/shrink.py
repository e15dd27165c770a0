"""A model small enough to run: fewer identical blocks, and narrower where a Hugging Face config says how.

What the split depends on stays: attention heads and key-value heads divide over the tensor axis as they did, a
vocabulary that divides still does and one that doesn't still doesn't, packed and tied tensors are as they were.
Weights are random and none is zero: a bias or a norm that is left at its first value would hide what happens to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from autoplan.errors import AutoplanError, ModelError
from autoplan.models.huggingface import example_inputs_for
from autoplan.plan import Strategy
from autoplan.verification.reduce import wanted_layers

SMALL = 2_000_000  # parameters up to which a model runs as it is
LARGEST = 60_000_000  # and up to which one that can't be made narrower is run all the same
SEQUENCE = 12
HEAD_DIM = 8
SPREAD = 0.05  # of what is added to every weight

_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size")
_INNER = (
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "n_inner",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A float64 model on the CPU in train mode without dropout, a batch for it, and what was made smaller."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None
    reductions: tuple[str, ...]


def shrink(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    before: Strategy,
    after: Strategy,
) -> Small:
    """``model`` for the degrees ``after`` instead of ``before``, with a batch for them.

    A model of real, few weights is copied as it is. Raises :class:`ModelError` for one that stays too large, or
    whose values are on ``meta`` and can't be made.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    made: nn.Module
    notes: tuple[str, ...] = ()
    if count <= SMALL and not on_meta:
        made = _copied(model)
    elif isinstance(model, PreTrainedModel):
        made, notes = _narrow(model, before=before, after=after)
    else:
        made, notes = _cut(model, after)
    total = sum(parameter.numel() for parameter in made.parameters())
    if total > LARGEST:
        raise ModelError(
            f"the model has {total:,} parameters and can't be made smaller",
            where=type(model).__name__,
            legal=f"at most {LARGEST:,} parameters, or a Hugging Face model, whose config says how",
            attempt="verify a smaller copy of the model under the same strategy, or --static alone",
        )
    made = _random(made.double().train())
    if made is not model and isinstance(made, PreTrainedModel) and (notes or example_inputs is None):
        example_inputs = _tokens(made, after)
    return Small(model=made, example_inputs=example_inputs, loss_fn=loss_fn, reductions=notes)


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # whatever an attribute of the user's raises
        raise ModelError(
            f"a copy of the model is what is run, and it cannot be copied: {type(error).__name__}: {error}",
            where=type(model).__name__,
            legal="attributes that copy.deepcopy copies",
            attempt="keep what cannot be copied (generators, files, locks) out of the model's attributes",
        ) from None


def _tokens(model: PreTrainedModel, strategy: Strategy) -> Any:
    shares = strategy.tensor if strategy.sequence_parallel else 1  # of the sequence, all alike
    shares *= 2 * strategy.context if strategy.context > 1 else 1
    learned = {"sequence": -(-SEQUENCE // shares) * shares} if model.main_input_name == "input_ids" else {}
    inputs, _ = example_inputs_for(model, batch=strategy.global_batch, device="cpu", **learned)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            inputs[name] = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        elif tensor.dim() == 2:
            vocabulary = model.config.get_text_config().vocab_size
            inputs[name] = torch.randint(vocabulary, tensor.shape, generator=generator)
    return inputs


# ---------------------------------------------------------------------------------------------------- Hugging Face


def _narrow(model: PreTrainedModel, *, before: Strategy, after: Strategy) -> tuple[nn.Module, tuple[str, ...]]:
    """The same class from a smaller config; only with fewer layers where a narrower one does not build."""
    settings = model.config.to_dict()
    fewer, said = _fewer_layers(settings, wanted_layers(after))
    narrow, also = _narrower(fewer, before=before, after=after)
    for candidate, notes in ((narrow, (*said, *also)), (fewer, said)):
        try:
            return _build(model, candidate), notes
        except AutoplanError:
            raise
        except Exception:  # a config may tie its widths in ways of its own: the wider one is tried next
            continue
    raise ModelError(
        f"no smaller {type(model).__name__} can be built from its config",
        attempt="verify a smaller config of the same family, or --static alone",
    )


def _build(model: PreTrainedModel, settings: dict[str, Any]) -> nn.Module:
    config = type(model.config).from_dict(settings)
    config.use_cache = False
    config._attn_implementation = model.config._attn_implementation
    made = type(model)._from_config(config, dtype=torch.float64)
    if sum(parameter.numel() for parameter in made.parameters()) > LARGEST:
        raise ValueError("too large")
    return made


def _fewer_layers(settings: dict[str, Any], layers: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    changed, notes = dict(settings), []
    for key in _LAYERS:
        count = settings.get(key)
        if not isinstance(count, int) or count <= layers:
            continue
        changed[key] = layers
        notes.append(f"{key} {count} -> {layers}")
        for name, value in settings.items():  # a list with an entry a layer
            if isinstance(value, list) and len(value) == count:
                changed[name] = [value[index * count // layers] for index in range(layers)]
    return changed, tuple(notes)


def _narrower(settings: dict[str, Any], *, before: Strategy, after: Strategy) -> tuple[dict[str, Any], tuple[str, ...]]:
    heads = next((settings[key] for key in _HEADS if isinstance(settings.get(key), int)), None)
    if heads is None:
        return settings, ()
    tensor = after.tensor
    key_value = settings.get("num_key_value_heads")
    grouped = isinstance(key_value, int) and key_value < heads
    new_key_value = 0
    if grouped:
        assert isinstance(key_value, int)
        # More ranks than key-value heads share them; as many or fewer hold one or two each.
        new_key_value = max(1, tensor * min(key_value, 2 * before.tensor) // before.tensor)
        new_heads = max(tensor, new_key_value) * 2
    else:
        new_heads = tensor * (2 if heads >= 2 * before.tensor else 1)
    wanted: dict[str, int] = dict.fromkeys(_HEADS, new_heads)
    wanted["num_key_value_heads"] = new_key_value if grouped else new_heads
    wanted |= dict.fromkeys(_HIDDEN, new_heads * HEAD_DIM)
    wanted |= dict.fromkeys(("head_dim", "d_kv"), HEAD_DIM)
    wanted |= dict.fromkeys(_INNER, 12 * tensor)
    wanted |= dict.fromkeys(_EXPERTS, 4)
    vocabulary = settings.get("vocab_size")
    if isinstance(vocabulary, int):
        wanted["vocab_size"] = 11 * tensor if vocabulary % before.tensor == 0 and tensor > 1 else 11 * tensor + 86
        wanted["vocab_size"] += 1 if vocabulary % before.tensor and wanted["vocab_size"] % tensor == 0 else 0
    if isinstance(settings.get("patch_size"), int):
        wanted["image_size"] = 2 * settings["patch_size"]
    changed = dict(settings)
    for key, value in wanted.items():
        if isinstance(settings.get(key), int) and settings[key] > value:
            changed[key] = value
    notes = tuple(f"{key} {settings[key]} -> {changed[key]}" for key in changed if changed[key] != settings[key])
    for key in _TOKENS:
        if isinstance(changed.get(key), int) and changed[key] >= changed.get("vocab_size", changed[key] + 1):
            changed[key] = 0
    return changed, notes


# ------------------------------------------------------------------------------------------------------ any module


def _cut(model: nn.Module, after: Strategy) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy whose lists of identical blocks are shorter. Raises :class:`ModelError` for values on ``meta``."""
    lost = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if lost:
        raise ModelError(
            f"the model's tensors are on meta and have no values, `{lost[0]}` first",
            where=type(model).__name__,
            attempt="pass a factory, or the model built on the CPU",
        )
    made, notes, limit = _copied(model), [], wanted_layers(after)
    for name, module in made.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > limit and _identical(module):
            notes.append(f"{name}: {len(module)} -> {limit} blocks")
            del module[limit:]
    return made, tuple(notes)


def _identical(blocks: nn.ModuleList) -> bool:
    shapes = [[(name, tuple(p.shape)) for name, p in block.named_parameters()] for block in blocks]
    return all(each == shapes[0] for each in shapes) and len({type(block) for block in blocks}) == 1


def _random(model: nn.Module) -> nn.Module:
    """Something of its own in every weight, and no dropout."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(SPREAD * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():  # modules that hand a rate to a function
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)
    for name, value in vars(config).items() if config is not None else ():
        if isinstance(value, float) and ("drop" in name):
            setattr(config, name, 0.0)
    return model


def resample(example: Any, samples: int, *, seed: int) -> Any:
    """A batch of ``samples`` rows like ``example``'s: rows in another order, integers rolled, floats with noise."""
    from autoplan.capture.batch import batch_size, replace_leaves, tensors

    found = tensors(example)
    size = batch_size(found)
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randperm(max(size, samples), generator=generator) % size)[:samples]
    made: dict[Any, Tensor] = {}
    for path, tensor in found.items():
        if tensor.dim() == 0 or tensor.shape[0] != size:
            made[path] = tensor.double() if tensor.is_floating_point() else tensor
            continue
        value = tensor.detach()[rows].clone()
        if value.is_floating_point():
            value = value.double()
            value += 0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        elif value.dim() > 1 and value.dtype != torch.bool:
            value = torch.stack([row.roll(index, 0) for index, row in enumerate(value)])
        made[path] = value
    return replace_leaves(example, made)
