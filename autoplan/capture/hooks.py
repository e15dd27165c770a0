"""Hooks of the backward, which a trace of the forward does not see: they are refused where they are registered.

Forward hooks run in the forward and are traced like all else. Hooks on gradients, on a module's backward, on saved
tensors are Python that autograd calls later; the program has its own backward, without them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as modules

from autoplan.capture.errors import current_line, definition_line, frame_behind, is_model_file, is_ours
from autoplan.errors import CaptureError

_GRAD_FN: Any = Tensor.grad_fn
# What a forward may call on a tensor, by what torch hands to __torch_function__; the last gives what hooks are put on.
_CALLS: dict[Any, str] = {
    Tensor.register_hook: "registers a hook on a tensor's gradient: it would be lost, and gradients would be others",
    Tensor.register_post_accumulate_grad_hook: "registers a hook on a parameter's gradient: it would be lost",
    _GRAD_FN.__get__: "looks at a tensor's grad_fn: the program has none, nor what is hooked to it",
}


_LOST = "it would be lost, and gradients would be others"


def check_registered(model: nn.Module) -> None:
    """Raise CaptureError for backward hooks that the model already has."""
    for path, module in model.named_modules():
        for hook in _users((*module._backward_hooks.values(), *module._backward_pre_hooks.values())):
            raise _refusal(f"{_named(path)} has a backward hook: {_LOST}", definition_line(hook))
    for hook in _users((*modules._global_backward_hooks.values(), *modules._global_backward_pre_hooks.values())):
        raise _refusal(f"every module has a backward hook: {_LOST}", definition_line(hook))
    for name, parameter in model.named_parameters():
        registered = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
        for hook in _users(hook for hooks in registered if hooks for hook in hooks.values()):
            raise _refusal(f"the parameter {name} has a hook on its gradient: {_LOST}", definition_line(hook))


def _users(hooks: Iterable[Any]) -> Iterator[Any]:
    """Those that neither torch nor this package put there."""
    for hook in hooks:
        if (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "autoplan"):
            yield hook


def _named(path: str) -> str:
    return f"the module {path}" if path else "the model"


def refused_call(function: Any) -> CaptureError | None:
    """The error of a forward that calls ``function`` of torch's; None where that is harmless."""
    try:
        what = _CALLS.get(function)
    except TypeError:
        return None
    if what and not (function == _GRAD_FN.__get__ and _asked_by_a_module()):
        return _refusal(f"forward {what}", current_line())
    return None


def _asked_by_a_module() -> bool:
    """Whether the caller is torch's nn.Module, which looks at what is assigned to a parameter's name."""
    frame = frame_behind(sys._getframe(1), is_ours)
    return frame is not None and frame.f_code.co_filename == modules.__file__


@contextlib.contextmanager
def saving_watched(refuse: Callable[[CaptureError], NoReturn], notes: list[str]) -> Iterator[None]:
    """While inside, a forward's own hooks on saved tensors are refused; saving them on the CPU is left out and said."""
    enter = saved_tensors_hooks.__enter__

    def entered(self: Any) -> None:
        if is_model_file(sys._getframe(1).f_code.co_filename):
            if not isinstance(self, save_on_cpu):
                refuse(_refusal(f"forward has hooks on saved tensors: {_LOST}", current_line()))
            notes.append(f"save_on_cpu at {current_line()} is left out: where activations lie is the plan's to say")
        enter(self)

    with mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", entered):
        yield


def _refusal(what: str, where: str) -> CaptureError:
    return CaptureError(
        what,
        where=where,
        legal="forward hooks; gradients changed after program.step() and before optimizer.step()",
        attempt="remove the hook and change .grad between the two, or write the change as an operator with "
        "torch.library.custom_op and register_autograd",
    )
