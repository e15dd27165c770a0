"""Activation checkpointing that the model asks for, by ``torch.utils.checkpoint`` itself or through a library's switch
(transformers' ``gradient_checkpointing_enable``): which operators were traced inside such a region, and at which line.

torch.export runs a region in line and forgets it. Here each of its operators keeps the user's line in
``meta["checkpointed"]``; :mod:`autoplan.layers` reads there which layers are to be recomputed. Of a reentrant region
none of whose inputs needs a gradient, torch gives its parameters none (and warns): so it is traced without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.fx import Node
from torch.fx.traceback import annotate, preserve_node_meta

from autoplan.capture.errors import current_line

META = "checkpointed"
_MARK = "autoplan_checkpointed"
_LINE: ContextVar[str] = ContextVar("autoplan_checkpointed", default="")


def region() -> str:
    """The line of the outermost region that the forward is in while it is traced, "" outside."""
    return _LINE.get()


def line_of(node: Node) -> str:
    """The line of the outermost region that a freshly traced node is in, "" outside."""
    return str((node.meta.get("custom") or {}).get(_MARK, ""))


@contextmanager
def marked_regions(notes: list[str]) -> Iterator[None]:
    """While inside, operators that are traced in a checkpointed region are marked with its line."""
    plain = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    apply = torch.autograd.Function.__dict__["apply"].__func__

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _inside():
            yield from plain(*args, **kwargs)

    def reentrant(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ != "CheckpointFunction":
            return apply(cls, *args, **kwargs)
        function, _, *given = args
        needs = any(isinstance(value, Tensor) and value.requires_grad for value in given)
        if not needs and torch.is_grad_enabled():
            notes.append(
                f"the reentrant checkpoint at {current_line()} is given nothing that needs a gradient: as in torch, "
                "its parameters get none (use_reentrant=False gives them theirs)"
            )
        with _inside(), torch.set_grad_enabled(needs and torch.is_grad_enabled()):
            return function(*given)

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(reentrant)),
        mock.patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", generator),
    ):
        yield


@contextmanager
def _inside() -> Iterator[None]:
    line = _LINE.get() or current_line()
    token = _LINE.set(line)
    try:
        with preserve_node_meta(), annotate({_MARK: line}):
            yield
    finally:
        _LINE.reset(token)
