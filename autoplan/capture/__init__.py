"""nn.Module -> :class:`Capture`: one fx graph from the batch's tensors to the scalar loss.

Nothing is executed: the model is traced by torch.export with the batch dimension free, on its own device, or on meta
where its parameters are there. Its parameters, buffers, mode, configs and the random state are as before afterwards.
What cannot be traced, or would silently lose numbers, is a CaptureError at the user's file and line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autoplan.capture import batch as batches
from autoplan.capture.alike import find_alike
from autoplan.capture.batch import gather_inputs
from autoplan.capture.clean import Names, clean, retarget
from autoplan.capture.custom_operators import check_formulas
from autoplan.capture.errors import forward_line, node_line
from autoplan.capture.folding import SPARE, Folding, folded
from autoplan.capture.huggingface import model_name
from autoplan.capture.loss import analyse
from autoplan.capture.reassigned import check_parameters
from autoplan.capture.shapes import batch_symbol, is_data_dependent, shape_at, size_at
from autoplan.capture.shared_memory import check_memory
from autoplan.capture.trace import needs_shadow, stand_ins, trace
from autoplan.capture.types import Capture, Coupling, InputSpec, LossTerm
from autoplan.errors import CaptureError

__all__ = [
    "Capture",
    "Coupling",
    "InputSpec",
    "LossTerm",
    "batch_symbol",
    "capture",
    "capture_folded",
    "gather_inputs",
    "is_data_dependent",
    "retarget",
    "shape_at",
    "size_at",
]

_LOG = logging.getLogger(__name__)


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Capture:
    """Trace ``model`` on ``example_inputs`` to its loss, in the mode (train or eval) it is in.

    ``example_inputs``: a tuple of positional arguments, a dict of keyword arguments, or one tensor; dimension 0 is
    the batch. ``loss_fn(output)`` or ``loss_fn(output, *targets)`` makes the loss of a model that returns none; the
    last elements of a tuple, or the dict's keys that forward does not take, are its targets. ``dtype`` traces a
    stand-in on meta cast to that floating dtype: to plan, not to run. ``device`` ("cpu" or "cuda"): where the program
    will run, if not where the model is; regions of ``torch.autocast`` act by it (see :mod:`.autocast`).

    Raises CaptureError, with the user's file and line.
    """
    return _capture(_bare(model), example_inputs, loss_fn, dtype, None, device)


def capture_folded(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Capture:
    """What :func:`capture` gives, sooner: of blocks that are alike a few are traced and the others written after them.

    Where blocks cannot be shown to be alike (see :mod:`.folding`), every one is traced. For planning: programs are
    compiled from :func:`capture`, which takes nothing on trust.
    """
    model = _bare(model)
    alike = find_alike(model)
    for spare in (SPARE, len(alike.members)) if alike.members else ():
        with folded(alike, spare=spare) as folding:
            try:
                return _capture(model, example_inputs, loss_fn, dtype, folding, device)
            except Exception as error:  # whatever it was, the whole trace is what tells
                _LOG.info("not folded: %s", error)
        if not folding.starved:
            break
    return _capture(model, example_inputs, loss_fn, dtype, None, device)


def _capture(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    dtype: torch.dtype | None,
    folding: Folding | None,
    device: str | None,
) -> Capture:
    found = batches.tensors(example_inputs)
    size = batches.batch_size(found)
    batches.bind(model, example_inputs, loss_fn)
    check_memory(model)
    traced = trace(model, example_inputs, found, loss_fn, dtype, folding, device)
    names = Names(model)
    tensors = _user_tensors(model, loss_fn, names)
    if dtype is not None and needs_shadow(model, dtype):
        tensors = stand_ins(tensors, dtype)
    placeholders = [_placeholder_name(model, path) for path in found]
    graph_module = clean(traced.graph_module, model, tensors, placeholders, names, folding)
    check_formulas(graph_module)
    check_parameters(graph_module)
    inputs = _input_specs(graph_module, found, size)
    loss_terms, couplings = analyse(graph_module, inputs)
    return Capture(
        name=model_name(model),
        graph_module=graph_module,
        inputs=inputs,
        batch_size=size,
        dynamic_batch=traced.dynamic_batch and batch_symbol(graph_module) is not None,
        tokens_per_sample=batches.tokens_per_sample(found),
        dtype=dtype or _main_dtype(tensors),
        tied=_tied(tensors),
        loss_terms=loss_terms,
        couplings=couplings,
        notes=(*traced.notes, *_data_dependent_notes(graph_module)),
        constants=tuple((path, leaf) for path, leaf in batches.leaves(example_inputs) if not isinstance(leaf, Tensor)),
    )


def _bare(model: nn.Module) -> nn.Module:
    """The user's own module, out of torch.compile's wrapper; other wrappers are refused."""
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"the model is a {type(model).__name__}, not an nn.Module",
            where="model",
            legal="an instance of torch.nn.Module",
            attempt="pass the model itself" + (" (an instance, not the class)" if isinstance(model, type) else ""),
        )
    compiled = model._modules.get("_orig_mod")
    if compiled is not None:
        return compiled
    if type(model).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
        raise CaptureError(
            f"the model is already wrapped in {type(model).__name__}",
            where=forward_line(model),
            legal="the bare model: autoplan places its parameters and synchronises gradients itself",
            attempt="pass model.module",
        )
    scripted = next((name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise CaptureError(
            f"{f'the module {scripted}' if scripted else 'the model'} was compiled by torch.jit: it cannot be traced",
            where=forward_line(model),
            legal="modules in Python",
            attempt="pass the module as it was before torch.jit.script or torch.jit.trace",
        )
    lazy = [name for name, parameter in model.named_parameters() if type(parameter).__name__.startswith("Uninit")]
    if lazy:
        raise CaptureError(
            f"parameter {lazy[0]} has no shape yet (a lazy module)",
            where=forward_line(model),
            legal="parameters with shapes",
            attempt="run the model once on the example inputs before",
        )
    return model


def _user_tensors(model: nn.Module, loss_fn: Any, names: Names) -> dict[str, Tensor]:
    """Parameters and buffers by the user's names, tied ones under each of theirs."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    if isinstance(loss_fn, nn.Module):
        tensors |= {names.loss(name): tensor for name, tensor in loss_fn.named_parameters(remove_duplicate=False)}
        tensors |= {names.loss(name): tensor for name, tensor in loss_fn.named_buffers(remove_duplicate=False)}
    return tensors


def _placeholder_name(model: nn.Module, path: batches.Path) -> str:
    head, *rest = path or (0,)
    first = batches.parameter_name(model, head) if isinstance(head, int) else head
    return "_".join(str(part) for part in (first, *rest)).replace(".", "_")


def _input_specs(graph_module: GraphModule, found: Mapping[batches.Path, Tensor], size: int) -> tuple[InputSpec, ...]:
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    return tuple(
        InputSpec(
            placeholder=node.name,
            path=path,
            shape=tuple(tensor.shape),
            dtype=node.meta["val"].dtype,
            batched=tensor.dim() > 0 and tensor.shape[0] == size,
        )
        for node, (path, tensor) in zip(placeholders, found.items(), strict=True)
    )


def _main_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Of most floating-point parameters, by elements."""
    elements: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.numel()
    return max(elements, key=elements.__getitem__) if elements else torch.get_default_dtype()


def _tied(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            groups.setdefault(id(tensor), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _data_dependent_notes(graph_module: GraphModule) -> list[str]:
    for node in graph_module.graph.nodes:
        if is_data_dependent(node.meta.get("val")):
            return [f"sizes that depend on data, priced at their upper bounds, first at {node_line(node)}"]
    return []
