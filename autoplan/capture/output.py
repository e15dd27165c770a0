"""The scalar loss in what a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autoplan.capture.errors import definition_line, forward_line
from autoplan.errors import CaptureError


def pick_loss(output: Any, model: nn.Module, loss_fn: Any = None) -> Tensor:
    """The loss in the output of ``loss_fn``, or of ``model`` where there is none.

    A scalar tensor is the loss; an object's ``loss`` (a Hugging Face ModelOutput, a dataclass); a dict's "loss"; of a
    tuple the one element that is a scalar floating tensor.

    Raises CaptureError, at the line of forward (or loss_fn), where there is none or more than one.
    """
    if isinstance(output, Tensor):
        if _is_loss(output):
            return output
        raise _no_loss(f"a tensor of shape {_shape(output)} and {output.dtype}, not a scalar loss", model, loss_fn)
    if isinstance(output, Mapping) or hasattr(output, "loss"):
        loss = output.get("loss") if isinstance(output, Mapping) else output.loss
        if isinstance(loss, Tensor):
            if _is_loss(loss):
                return loss
            raise _no_loss(f"a loss of shape {_shape(loss)} and {loss.dtype}, not a scalar", model, loss_fn)
        raise _no_loss(f"{_name(output)} without a loss", model, loss_fn)
    if isinstance(output, (tuple, list)):
        found = [item for item in output if isinstance(item, Tensor) and _is_loss(item)]
        if len(found) == 1:
            return found[0]
        how_many = "no scalar" if not found else f"{len(found)} scalars"
        raise _no_loss(f"a {type(output).__name__} that holds {how_many}: which is the loss?", model, loss_fn)
    raise _no_loss(f"{_name(output)}, which holds no loss", model, loss_fn)


def _is_loss(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.is_floating_point()


def _shape(tensor: Tensor) -> str:
    return "[" + ", ".join(str(size) if type(size) is int else "batch" for size in tensor.shape) + "]"


def _name(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with {', '.join(map(str, output)) or 'nothing'}"
    return "None" if output is None else f"a {type(output).__name__}"


def _no_loss(what: str, model: nn.Module, loss_fn: Any) -> CaptureError:
    legal = 'a scalar floating-point tensor, an output with .loss, a dict with "loss", a tuple with one scalar'
    if loss_fn is not None:
        callee = type(loss_fn).forward if isinstance(loss_fn, nn.Module) else loss_fn
        return CaptureError(
            f"loss_fn returns {what}", where=definition_line(callee), legal=legal, attempt="reduce it with .mean()"
        )
    attempt = "return the loss from forward, or give loss_fn=lambda output, target: ..."
    if hasattr(getattr(model, "config", None), "model_type"):
        attempt = "put labels in example_inputs (Hugging Face models then return a loss), or give loss_fn="
    return CaptureError(f"the model returns {what}", where=forward_line(model), legal=legal, attempt=attempt)
