"""What a forward switches in torch while it is under trace, and a trace does not keep.

Seeds of torch's own generator and transforms of functions are refused; ``inference_mode`` is traced as ``no_grad``,
which gives the same numbers and gradients.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._functorch import eager_transforms as transforms
from torch._functorch import vmap as vmaps
from torch.autograd.grad_mode import inference_mode

from autoplan.capture.errors import current_line, frame_behind, in_forward_now, is_model_file, is_torchs
from autoplan.errors import CaptureError

_TRANSFORMS = (
    (vmaps, "_vmap_increment_nesting"),
    (transforms, "_grad_increment_nesting"),
    (transforms, "_jvp_increment_nesting"),
    (transforms, "_func_increment_nesting"),
)
# Of torch's files, those whose functions a user calls to seed, and what is wrapped around them.
_HANDING_ON = ("random.py", "_compile.py", "eval_frame.py")
_SETTING = frozenset({"manual_seed", "seed", "set_state"})


@contextlib.contextmanager
def watched(refuse: Callable[[CaptureError], NoReturn]) -> Iterator[None]:
    """Around a trace."""
    generator = _Generator(torch.default_generator, refuse)
    patches = [
        (torch, "default_generator", generator),
        (torch.random, "default_generator", generator),
        (inference_mode, "__enter__", _enter),
        (inference_mode, "__exit__", _exit),
        *((module, name, _transform(getattr(module, name), refuse)) for module, name in _TRANSFORMS),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, instead in patches:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


class _Generator:
    """torch's generator, which a forward may not seed or put elsewhere."""

    def __init__(self, own: torch.Generator, refuse: Callable[[CaptureError], NoReturn]) -> None:
        self._own, self._refuse = own, refuse

    def __getattr__(self, name: str) -> Any:
        if name in _SETTING and in_forward_now() and _asked_by_model(sys._getframe(1)):
            self._refuse(
                CaptureError(
                    "forward seeds torch's random numbers, or puts them back: the program draws its own, by the step, "
                    "the micro-batch and the rank",
                    where=current_line(),
                    legal="random operators that are left to draw; torch.manual_seed before the first step",
                    attempt="seed outside of forward, or draw outside and pass the value as an input",
                )
            )
        return getattr(self._own, name)


def _transform(begin: Callable[..., Any], refuse: Callable[[CaptureError], NoReturn]) -> Callable[..., Any]:
    def begun(*args: Any, **kwargs: Any) -> Any:
        if in_forward_now():
            refuse(
                CaptureError(
                    "forward transforms a function (torch.vmap, torch.func.grad, jvp and their like), which is not "
                    "among the operators that are traced",
                    where=current_line(),
                    legal="operators on whole batches, and autograd through the loss",
                    attempt="write the batch dimension out (vmap: torch.einsum, matmul, unsqueeze), or the gradient",
                )
            )
        return begin(*args, **kwargs)

    return begun


def _asked_by_model(frame: FrameType | None) -> bool:
    """Whether the first frame that is neither Python's nor of torch's functions that seed is the model's."""
    frame = frame_behind(frame, _hands_on)
    return frame is not None and is_model_file(frame.f_code.co_filename)


def _hands_on(name: str) -> bool:
    return name.endswith(_HANDING_ON) if is_torchs(name) else not is_model_file(name)


def _enter(self: Any) -> None:
    self._autoplan_grad = torch.set_grad_enabled(not self.mode)


def _exit(self: Any, *error: object) -> None:
    torch._C._set_grad_enabled(self._autoplan_grad.prev)
