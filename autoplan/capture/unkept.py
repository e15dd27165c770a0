"""What a forward may do to tensors that a trace does not keep: changes past autograd, by ``.data``; parameters that it
freezes or thaws; gradients that it takes; generators of random numbers of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoplan.capture.errors import current_line
from autoplan.errors import CaptureError

_GET_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_FREEZING: Any = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class Unkept:
    """Looks at every call of torch's in one forward."""

    def __init__(self) -> None:
        self._data: list[Tensor] = []  # what .data gave; held, so that no other tensor gets its identity

    def refused(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError | None:
        """The error of this call; None where it is harmless."""
        if function == _SET_DATA or (_is_in_place(function) and any(args and args[0] is kept for kept in self._data)):
            return _refusal(
                "forward changes a tensor through .data, which a trace does not see",
                legal="changes of buffers in place, under torch.no_grad() where they hold no gradient",
                attempt="change the tensor itself, without .data, inside `with torch.no_grad():`",
            )
        if args and type(args[0]) is Tensor and _is_in_place(function) and not torch._is_functional_tensor(args[0]):
            return plain_tensor(current_line())  # all that the model owns or makes is fake while it is traced
        if function in _FREEZING and isinstance(args[0], nn.Parameter):
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if bool(wanted) != trains(args[0]):
                return _refusal(
                    "forward sets requires_grad of a parameter: the program trains what is trained when it is built",
                    legal="parameters that train, or do not, from the first step on",
                    attempt="freeze it before, or .detach() it where it is used",
                )
        if function in _DIFFERENTIATING:
            return _refusal(
                "forward takes gradients itself: they would not be part of the program",
                legal="a loss from which program.step() takes the gradients",
                attempt="write the gradient out in differentiable operators, or train this part without autoplan",
            )
        if kwargs.get("generator") is not None:
            return _refusal(
                "forward draws from a torch.Generator of its own: the program draws from torch's default one",
                legal="torch's own random operators without generator=",
                attempt="leave generator= out and seed with torch.manual_seed, or draw outside and pass the value",
            )
        return None

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``function`` returns; of ``.data`` the tensor detached, which is the same but for changes in place."""
        if function != _GET_DATA:
            return function(*args, **kwargs)
        self._data.append(args[0].detach())
        return self._data[-1]


def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name in ("__setitem__",) or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def trains(tensor: Tensor) -> bool:
    """Whether it needs a gradient, without asking any mode that is watching."""
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def plain_tensor(where: str) -> CaptureError:
    """The error of a forward that changes a tensor of nobody's in place, at the line ``where``."""
    return CaptureError(
        "forward changes a tensor in place that is neither a buffer nor an input: the program would keep a copy of it, "
        "in no state dict",
        where=where,
        legal="buffers, which the program keeps, saves and hands to every rank",
        attempt="self.register_buffer('name', tensor) in __init__",
    )


def _refusal(what: str, legal: str, attempt: str) -> CaptureError:
    return CaptureError(what, where=current_line(), legal=legal, attempt=attempt)
