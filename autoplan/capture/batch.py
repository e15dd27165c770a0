"""The user's batch: which tensors it holds, where, and how model and loss take it.

``example_inputs`` is a tuple or list of positional arguments, a dict of keyword arguments, or one tensor. Tensors are
found at any depth of dicts, lists and tuples; each has a *path*, ``("images", 0)`` for ``batch["images"][0]``.
What is no tensor (None, numbers, strings) is part of the program: a later batch must hold the same.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoplan.capture.errors import definition_line, forward_line
from autoplan.capture.types import Capture, InputSpec
from autoplan.errors import CaptureError

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one batch is fed: the model's arguments, and those of the loss after the model's output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_args: tuple[Any, ...] = ()
    loss_kwargs: dict[str, Any] | None = None


def leaves(batch: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path, depth first in the batch's own order."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from leaves(value, (*path, key))
    elif isinstance(batch, (tuple, list)):
        for index, value in enumerate(batch):
            yield from leaves(value, (*path, index))
    else:
        yield path, batch


def replace_leaves(batch: Any, values: Mapping[Path, Any], path: Path = ()) -> Any:
    """The same structure with the leaves at ``values``' paths replaced."""
    if isinstance(batch, Mapping):
        return {key: replace_leaves(value, values, (*path, key)) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        items = [replace_leaves(value, values, (*path, index)) for index, value in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return values.get(path, batch)


def tensors(batch: Any) -> dict[Path, Tensor]:
    """The batch's tensors by path.

    Raises CaptureError for what looks like data and is no tensor, and where there is no tensor at all.
    """
    found: dict[Path, Tensor] = {}
    for path, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            found[path] = leaf
        elif type(leaf).__module__.partition(".")[0] in ("numpy", "pandas", "jax"):
            raise CaptureError(
                f"example_inputs hold a {type(leaf).__module__}.{type(leaf).__name__} where a tensor is needed",
                where=path_name(path),
                legal="torch tensors in dicts, lists and tuples",
                attempt="torch.as_tensor(...) on it",
            )
    if not found:
        raise CaptureError(
            f"example_inputs hold no tensor: {type(batch).__name__}",
            where="example_inputs",
            legal="a tuple of positional arguments, a dict of keyword arguments, or one tensor",
            attempt="example_inputs=next(iter(loader))",
        )
    return found


def batch_size(found: Mapping[Path, Tensor]) -> int:
    """Dimension 0 that most tensors share; of the first tensor, when several are equally common."""
    sizes = [tensor.shape[0] for tensor in found.values() if tensor.dim()]
    if not sizes:
        raise CaptureError(
            "example_inputs hold only scalars: there is no batch dimension",
            where="example_inputs",
            legal="tensors whose dimension 0 is the batch",
            attempt="add it with .unsqueeze(0)",
        )
    if 0 in sizes:
        raise CaptureError(
            "example_inputs hold an empty batch", where="example_inputs", legal="at least one sample", attempt="a batch"
        )
    return Counter(sizes).most_common(1)[0][0]


def tokens_per_sample(found: Mapping[Path, Tensor]) -> int:
    """Dimension 1 of the first tensor of token ids (integers, rank 2); 1 where there is none."""
    for tensor in found.values():
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return tensor.shape[1]
    return 1


def path_name(path: Path) -> str:
    """``example_inputs["images"][0]``."""
    return "example_inputs" + "".join(f"[{key!r}]" for key in path)


def bind(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> Call:
    """Split a batch between the model and ``loss_fn``.

    ``loss_fn`` with one required positional parameter is called with the output. With n of them, the last n-1
    elements of a tuple are its targets; of a dict, what forward's signature names goes to the model and the rest to
    ``loss_fn``: by name, or in order where no name fits.
    """
    targets = _required(loss_fn)[1:] if loss_fn is not None else []
    if isinstance(batch, Mapping):
        call = _bind_keywords(model, dict(batch), loss_fn, targets)
    else:
        arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        call = _bind_positions(model, arguments, loss_fn, targets)
    _check_signature(model, call)
    return call


def arguments(model: nn.Module, call: Call) -> dict[str, Any]:
    """What forward is called with, by its parameters' names."""
    return dict(_signature(model).bind(*call.args, **call.kwargs).arguments)


def parameter_name(model: nn.Module, position: int) -> str:
    """What forward calls its argument at ``position``."""
    named = [
        name
        for name, parameter in _signature(model).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return named[position] if position < len(named) else f"input_{position}"


def gather_inputs(capture: Capture, batch: Any) -> list[Tensor]:
    """The tensors of a batch in the order of the graph's placeholders.

    The batch has the form of the example; its batch size may differ where ``capture.dynamic_batch``.

    Raises CaptureError for a missing key, a wrong type, shape or dtype, batch sizes that disagree, and another
    constant than the one captured.
    """
    found = dict(leaves(batch))
    gathered = [_gather_one(spec, found, batch) for spec in capture.inputs]
    _check_batch(capture, gathered)
    for path, value in capture.constants:
        if path not in found or found[path] != value:
            raise CaptureError(
                f"the program was captured with {value!r} here, not {found.get(path)!r}",
                where=path_name(path),
                legal="tensors may change from batch to batch, other values are part of the program",
                attempt="compile again with the new value, or pass a tensor",
            )
    return gathered


def _gather_one(spec: InputSpec, found: Mapping[Path, Any], batch: Any) -> Tensor:
    where = path_name(spec.path).replace("example_inputs", "batch", 1)
    if spec.path not in found:
        have = ", ".join(path_name(path).replace("example_inputs", "batch", 1) for path in found) or repr(batch)
        raise CaptureError(
            f"the batch has no {where}",
            where=where,
            legal=f"the form of example_inputs; this batch holds {have}",
            attempt="pass batches of the same form as example_inputs",
        )
    value = found[spec.path]
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"{where} is a {type(value).__name__}, not a tensor",
            where=where,
            legal=f"a tensor of shape {_expected(spec)} and {spec.dtype}",
            attempt="torch.as_tensor(...) on it",
        )
    fits = value.dim() == len(spec.shape) and tuple(value.shape[spec.batched :]) == spec.shape[spec.batched :]
    if not fits:
        raise CaptureError(
            f"{where} has shape {list(value.shape)}, the program was captured for {_expected(spec)}",
            where=where,
            legal="the example's shape; only the batch dimension may differ",
            attempt="pad or cut to the captured length, or compile again with an example of this shape",
        )
    if value.dtype != spec.dtype:
        raise CaptureError(
            f"{where} is {value.dtype}, the program was captured for {spec.dtype}",
            where=where,
            legal=str(spec.dtype),
            attempt=f".to({spec.dtype})",
        )
    return value


def _expected(spec: InputSpec) -> str:
    sizes = [str(size) for size in spec.shape]
    return "[" + ", ".join(["batch", *sizes[1:]] if spec.batched else sizes) + "]"


def _check_batch(capture: Capture, gathered: Sequence[Tensor]) -> None:
    sizes = {
        path_name(spec.path).replace("example_inputs", "batch", 1): tensor.shape[0]
        for spec, tensor in zip(capture.inputs, gathered, strict=True)
        if spec.batched
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{where}: {size}" for where, size in sizes.items())
        raise CaptureError(
            f"the batch's tensors disagree on how many samples there are ({listed})",
            where="batch",
            legal="one size of dimension 0 for all batched tensors",
            attempt="check how the batch is put together",
        )
    if not capture.dynamic_batch and any(size != capture.batch_size for size in sizes.values()):
        raise CaptureError(
            f"this program runs at {capture.batch_size} samples only, the batch has {next(iter(sizes.values()))}",
            where="batch",
            legal=f"{capture.batch_size} samples: the model fixes its batch size",
            attempt="drop the last incomplete batch, or compile with an example of the size wanted",
        )


def _bind_positions(
    model: nn.Module, arguments: tuple[Any, ...], loss_fn: Callable[..., Any] | None, targets: list[str]
) -> Call:
    if not targets:
        return Call(args=arguments, kwargs={})
    if len(arguments) <= len(targets):
        raise CaptureError(
            f"loss_fn takes the output and {len(targets)} more ({', '.join(targets)}), but example_inputs has only "
            f"{len(arguments)} element{'s' if len(arguments) > 1 else ''} for model and loss together",
            where=_loss_line(loss_fn),
            legal=f"a tuple of the model's inputs followed by {len(targets)} for the loss",
            attempt="example_inputs=(inputs, targets)",
        )
    return Call(args=arguments[: -len(targets)], kwargs={}, loss_args=arguments[-len(targets) :])


def _bind_keywords(
    model: nn.Module, batch: dict[Any, Any], loss_fn: Callable[..., Any] | None, targets: list[str]
) -> Call:
    wrong = [key for key in batch if not isinstance(key, str)]
    if wrong:
        raise CaptureError(
            f"example_inputs is a dict with the key {wrong[0]!r}; its keys are names of forward's arguments",
            where="example_inputs",
            legal="string keys",
            attempt="name the batch's entries as forward does, or pass a tuple",
        )
    model_names, takes_any = _names(_signature(model))
    loss_names, loss_takes_any = _names(_loss_signature(loss_fn)) if loss_fn is not None else ([], False)
    kwargs = {key: value for key, value in batch.items() if key in model_names}
    rest = {key: value for key, value in batch.items() if key not in kwargs}
    for_loss = {key: value for key, value in rest.items() if key in loss_names}
    for_loss |= {key: batch[key] for key in targets if key in batch}
    rest = {key: value for key, value in rest.items() if key not in for_loss}
    missing = [name for name in targets if name not in for_loss]
    loss_args: tuple[Any, ...] = ()
    if missing and len(missing) == len(targets) == len(rest):
        loss_args, rest = tuple(rest.values()), {}
    elif missing:
        raise CaptureError(
            f"loss_fn needs {', '.join(missing)}, which example_inputs does not hold (it has {', '.join(batch)})",
            where=_loss_line(loss_fn),
            legal="keys named as loss_fn's parameters",
            attempt=f"add {missing[0]!r} to example_inputs, or rename loss_fn's parameter",
        )
    if rest and takes_any:
        kwargs |= rest
    elif rest and loss_takes_any:
        for_loss |= rest
    elif rest:
        taker = "neither forward nor loss_fn takes" if loss_fn is not None else "forward does not take"
        raise CaptureError(
            f"{taker} {', '.join(rest)}",
            where=forward_line(model),
            legal=f"forward takes {', '.join(model_names) or 'no keyword'}",
            attempt="drop the key, rename it" + ("" if loss_fn is not None else ", or give loss_fn= that takes it"),
        )
    return Call(args=(), kwargs=kwargs, loss_args=loss_args, loss_kwargs=for_loss)


def _check_signature(model: nn.Module, call: Call) -> None:
    signature = _signature(model)
    try:
        signature.bind(*call.args, **call.kwargs)
    except TypeError as error:
        given = [f"{len(call.args)} positional"] if call.args else []
        given += list(call.kwargs)
        raise CaptureError(
            f"example_inputs do not fit forward: {error}",
            where=forward_line(model),
            legal=f"forward{signature}",
            attempt=f"give what forward needs; example_inputs gave {', '.join(given) or 'nothing'}",
        ) from None


def _signature(model: nn.Module) -> inspect.Signature:
    return inspect.signature(model.forward)


def _names(signature: inspect.Signature) -> tuple[list[str], bool]:
    """Names that may be given by keyword, and whether any other may."""
    parameters = signature.parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _loss_signature(loss_fn: Callable[..., Any]) -> inspect.Signature:
    """What loss_fn takes; torch's built-in functions do not say, and are given the output alone."""
    try:
        return inspect.signature(_callee(loss_fn))
    except (TypeError, ValueError):
        return inspect.Signature([inspect.Parameter("output", inspect.Parameter.POSITIONAL_ONLY)])


def _required(loss_fn: Callable[..., Any]) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = _loss_signature(loss_fn).parameters.values()
    required = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    if not required:
        raise CaptureError(
            "loss_fn takes no argument: it needs the model's output",
            where=_loss_line(loss_fn),
            legal="loss_fn(output) or loss_fn(output, target, ...)",
            attempt="lambda output, target: F.cross_entropy(output, target)",
        )
    return required


def _callee(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    return loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn


def _loss_line(loss_fn: Callable[..., Any] | None) -> str:
    return definition_line(_callee(loss_fn)) if loss_fn is not None else "loss_fn"
