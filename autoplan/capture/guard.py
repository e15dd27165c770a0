"""Tracing leaves the user's model, and the process, as they were; and notices what tracing would lose.

``untouched`` puts back every module's attributes, parameters, buffers and hooks, and the random states, whatever the
forward did to them under trace. ``watched`` and ``ForeignTensors`` see what torch.export inlines without a word: an
own autograd.Function, whose backward would be lost (a straight-through estimator's gradient becomes 0); and a trainable
tensor that the model does not own (a module in a plain list, a parameter in a closure), which would become a constant.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from autoplan.capture import hooks, modes
from autoplan.capture.errors import current_line, is_data_dependent
from autoplan.capture.swallowed import Raised
from autoplan.capture.tracked import note_operands
from autoplan.capture.unkept import Unkept, trains
from autoplan.errors import CaptureError


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore model and random states on the way out."""
    saved = [(module, _snapshot(module)) for module in model.modules()]
    states = _random_states()
    try:
        yield
    finally:
        _restore_random_states(states)
        for module, snapshot in saved:
            _restore(module, snapshot)


def _snapshot(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes, and copies of those that can be changed in place."""
    attributes = dict(module.__dict__)
    copies = {key: value.copy() for key, value in attributes.items() if isinstance(value, (dict, list, set))}
    return attributes, copies


def _restore(module: nn.Module, snapshot: tuple[dict[str, Any], dict[str, Any]]) -> None:
    attributes, copies = snapshot
    for key in module.__dict__.keys() - attributes.keys():
        del module.__dict__[key]
    module.__dict__.update(attributes)
    for key, copy in copies.items():
        value = attributes[key]
        if not _same(value, copy):
            value.clear()
            value.extend(copy) if isinstance(value, list) else value.update(copy)


def _same(value: Any, copy: Any) -> bool:
    """Whether a container holds the very objects that it held; compares no tensors' values."""
    if len(value) != len(copy):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is item for key, item in copy.items())
    if isinstance(value, set):
        return value == copy
    return all(mine is other for mine, other in zip(value, copy, strict=True))


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), devices, random.getstate(), numpy.random.get_state() if numpy else None


def _restore_random_states(states: tuple[Any, ...]) -> None:
    own, devices, python, numpy = states
    torch.set_rng_state(own)
    if devices is not None:
        torch.cuda.set_rng_state_all(devices)
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


@contextmanager
def watched(notes: list[str]) -> Iterator[list[CaptureError]]:
    """Yields a list that fills with refusals while the forward is traced; the first is the one to raise."""
    refusals: list[CaptureError] = []

    def refuse(error: CaptureError) -> NoReturn:
        refusals.append(error)
        raise error

    with _functions_watched(refuse), modes.watched(refuse), hooks.saving_watched(refuse, notes):
        yield refusals


@contextmanager
def _functions_watched(refuse: Callable[[CaptureError], NoReturn]) -> Iterator[None]:
    """While inside, calls of the user's own autograd Functions are refused: where every ``apply``, also one that was
    bound to a name before, hands on to autograd."""
    base = torch.autograd.function._SingleLevelFunction

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.partition(".")[0] != "torch" and any(isinstance(arg, Tensor) for arg in args):
            refuse(_custom_function(cls))
        return super(base, cls).apply(*args, **kwargs)  # type: ignore[misc]

    with mock.patch.object(base, "apply", classmethod(apply), create=True):
        yield


class Watch(contextlib.ExitStack):
    """Around a forward under trace; raises on the way out what was refused and what the forward swallowed."""

    def __init__(self, refusals: list[CaptureError], model: nn.Module) -> None:
        super().__init__()
        self._refusals, self._model, self._raised = refusals, model, Raised()

    def __enter__(self) -> Self:
        super().__enter__()
        self._raised.clear()
        self.enter_context(self._raised.noted())
        self.enter_context(ForeignTensors(self._refusals, self._raised))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        super().__exit__(kind, error, trace)
        swallowed = None if error is not None else self._raised.swallowed(self._model)
        self._raised.clear()
        if swallowed is not None:
            self._refusals.append(swallowed)
        if error is None and self._refusals:
            raise self._refusals[0]
        return None


class ForeignTensors(TorchFunctionMode):
    """Around a forward under trace: refuses operators on real tensors that need a gradient, since all that the model
    owns is fake then, and hooks of the backward. Torch's own work before and after the forward is on real ones."""

    def __init__(self, refusals: list[CaptureError], raised: Raised) -> None:
        super().__init__()
        self._refusals, self._raised, self._unkept = refusals, raised, Unkept()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        note_operands((*args, *kwargs.values()))
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor) and _is_foreign(item):
                    self._refusals.append(_foreign_tensor(item))
                    raise self._refusals[-1]
        refused = hooks.refused_call(function) or self._unkept.refused(function, args, kwargs)
        if refused is not None:
            self._refusals.append(refused)
            raise refused
        try:
            result = self._unkept.call(function, args, kwargs)
        except Exception as error:
            if is_data_dependent(error):
                self._raised.add(error)
            raise
        return result


def _is_foreign(tensor: Tensor) -> bool:
    """Whether it is a real one that needs a gradient."""
    if isinstance(tensor, FakeTensor) or not trains(tensor):
        return False
    with torch._C.DisableTorchFunction():
        return not torch._is_functional_tensor(tensor)


def _foreign_tensor(tensor: Tensor) -> CaptureError:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
    return CaptureError(
        f"a trainable {kind} of shape {list(tensor.shape)} is used here that the model does not own: "
        "its gradient would be lost",
        where=current_line(),
        legal="parameters reached through the model's attributes: nn.Module, nn.ModuleList, nn.ParameterList",
        attempt="register it: nn.ModuleList instead of a list, self.weight instead of a variable outside, an nn.Module "
        "as loss_fn for its own parameters; or .detach() it",
    )


def _custom_function(cls: type) -> CaptureError:
    return CaptureError(
        f"{cls.__qualname__} is an autograd.Function: tracing keeps its forward and would lose its backward",
        where=current_line(),
        legal="operators of torch, or operators registered with torch.library.custom_op and register_autograd",
        attempt=f"register {cls.__qualname__} with torch.library.custom_op, or write it in differentiable operators "
        "(a straight-through estimator: x + (x.round() - x).detach())",
    )
