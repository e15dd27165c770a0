"""What a Hugging Face model needs while it is traced, put back afterwards.

- ``use_cache`` off: training keeps no keys and values, and a cache in the output would stay in the graph.
- The plain causal mask becomes ``is_causal`` again. While exporting, transformers writes out a [batch, 1, query, key]
  mask (an export may later run at a query length of one, where ``is_causal`` would be wrong). This capture fixes the
  sequence length, so the reason falls away; without it flash kernels are ruled out and memory is quadratic. Masks that
  mean something (padding, sliding windows, position biases) stay. Only transformers' own skip is used: with no
  attention_mask, for causal and bidirectional attention.
- The test for packed sequences (several in a row, told apart by ``position_ids``) is a mask too. transformers makes it
  only for a model without cache, and it has an effect only where the user gives ``position_ids``: there it stays.
- Attention kernels that cannot be traced (flash_attention_*, flex_attention, paged) give way to scaled dot-product
  attention, or to "eager" where the model class says that it needs what that cannot do (soft-capping, sinks).
- Experts as a Python loop over what each was sent branch on data ("eager"): traced as a grouped product instead.

Models without a transformers config are untouched, and transformers is not imported for them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TRACEABLE_ATTENTION = ("sdpa", "eager", None)


def configs(model: nn.Module) -> list[Any]:
    """Every transformers config in the model, each once; sub-configs included."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedConfig

    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            for key in config.sub_configs:
                add(getattr(config, key, None))

    for module in model.modules():
        add(module.__dict__.get("config"))
    return list(found.values())


def model_name(model: nn.Module) -> str:
    """The checkpoint's name where the config holds one, else the class's."""
    found = configs(model)
    path = str(getattr(found[0], "_name_or_path", "") or "") if found else ""
    return path.rstrip("/").rsplit("/", 1)[-1] or type(model).__name__


@contextmanager
def prepared(model: nn.Module, arguments: Mapping[str, Any], notes: list[str]) -> Iterator[None]:
    """Trace inside this. ``arguments``: what forward is called with, by name."""
    found = configs(model)
    if not found:
        yield
        return
    from transformers import masking_utils

    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = any(getattr(config, "use_cache", False) for config in found)
    packed = arguments.get("position_ids") is not None and not use_cache
    with ExitStack() as stack:
        for config in found:
            _set(stack, config, "use_cache", False)
        _choose_attention(stack, model, found, notes)
        _choose_experts(stack, found, notes)
        stack.enter_context(mock.patch.object(masking_utils, "is_torchdynamo_exporting", lambda: False))
        if not packed:
            stack.enter_context(mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None))
        yield


def _set(stack: ExitStack, config: Any, key: str, value: Any) -> None:
    """Set one entry of a config until the stack unwinds, past the setters, which recurse and validate."""
    entries = config.__dict__
    if key in entries and entries[key] != value:
        stack.callback(entries.__setitem__, key, entries[key])
        entries[key] = value


def _choose_attention(stack: ExitStack, model: nn.Module, found: list[Any], notes: list[str]) -> None:
    replaced = {
        config._attn_implementation for config in found if config._attn_implementation not in _TRACEABLE_ATTENTION
    }
    if not replaced:
        return
    supported = all(getattr(module, "_supports_sdpa", True) for module in model.modules() if hasattr(module, "config"))
    choice = "sdpa" if supported else "eager"
    for config in found:
        if config._attn_implementation in replaced:
            _set(stack, config, "_attn_implementation_internal", choice)
    notes.append(f"attention {', '.join(sorted(replaced))} cannot be traced: captured as {choice}, the same numbers")


def _choose_experts(stack: ExitStack, found: list[Any], notes: list[str]) -> None:
    for config in found:
        has_experts = any(hasattr(config, key) for key in _EXPERT_COUNTS)
        if has_experts and config.__dict__.get("_experts_implementation_internal") == "eager":
            _set(stack, config, "_experts_implementation_internal", "grouped_mm")
            notes.append("experts run as a grouped product: their Python loop depends on the routing")
