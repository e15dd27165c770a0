"""Parameters and buffers that a forward changes or replaces.

A buffer that gets another tensor (``self.steps = self.steps + 1``) is traced as one that is changed in place, which the
program keeps from step to step; a parameter is what the optimizer holds: replaced or changed, it is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from autoplan.capture.batch_memory import Memory
from autoplan.capture.errors import forward_line, is_model_file, node_line
from autoplan.capture.unchanged import is_hollow
from autoplan.errors import CaptureError

# ``F.embedding(max_norm=)`` and ``nn.Embedding(max_norm=)``: the table is written, and read by its own name.
_RENORMALISES = torch.ops.aten.embedding_renorm_.default


class Tables:
    """The parameters and buffers of a model's modules as they are when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = [
            (name, module, table, dict(table))
            for name, module in model.named_modules()
            if not is_hollow(module)
            for table in (module._parameters, module._buffers)
        ]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Around one call of forward: what it assigned to a buffer is copied into the buffer that was there.

        Raises CaptureError for parameters that were replaced and buffers that became unlike."""
        yield
        for path, module, table, before in self._held:
            for name, value in dict(table).items():
                old = before.get(name)
                if value is old or (old is None and table is module._buffers):
                    continue
                full = f"{path}.{name}" if path else name
                if old is None or table is module._parameters:
                    raise _replaced_parameter(full, self._line(module))
                unlike = _unlike(full, old, value)
                if unlike:
                    raise _refused_buffer(unlike, self._line(module))
                with torch.no_grad():
                    old.copy_(value)
                table[name] = old

    def _line(self, module: nn.Module) -> str:
        """Where the module's forward is written; of one of torch's the model's."""
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        return forward_line(module if code is not None and is_model_file(code.co_filename) else self._model)


def _unlike(name: str, old: Tensor, new: Any) -> str:
    """Why a buffer ``old`` cannot take what is assigned to its name; "" where it can."""
    if not isinstance(new, Tensor):
        return f"forward sets the buffer {name} to {type(new).__name__}"
    if new.requires_grad:
        return f"forward sets the buffer {name} to a value with a gradient: the next step's would go through this one"
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        return f"forward sets the buffer {name} of {_kind(old)} to one of {_kind(new)}"
    return ""


def _refused_buffer(what: str, where: str) -> CaptureError:
    return CaptureError(
        what,
        where=where,
        legal="a tensor of the buffer's shape and dtype, detached: what the program keeps from step to step",
        attempt="change the buffer in place under torch.no_grad(), or .detach() what is assigned",
    )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _replaced_parameter(name: str, where: str) -> CaptureError:
    return CaptureError(
        f"forward replaces the parameter {name}: the optimizer goes on with the one that it was given",
        where=where,
        legal="parameters made in __init__; buffers, which a forward may set",
        attempt="compute the value and use it without assigning it, or torch.nn.utils.parametrize",
    )


def check_parameters(graph_module: GraphModule) -> None:
    """Raise CaptureError where the graph writes into a trained parameter: what is read afterwards would lose its
    gradient. Of a frozen one (a teacher that follows its student) there is none to lose."""
    for root, writers in Memory(graph_module).writers.items():
        value = attrgetter(str(root.target))(graph_module) if root.op == "get_attr" else None
        if not isinstance(value, nn.Parameter) or not value.requires_grad:
            continue
        for writer in writers:
            if writer.target is not _RENORMALISES:
                raise CaptureError(
                    f"forward changes the parameter {root.target} in place: what reads it afterwards would lose its "
                    "gradient",
                    where=node_line(writer),
                    legal="parameters that the optimizer changes; buffers, which a forward may change in place",
                    attempt="change it between the steps, after optimizer.step(), or compute the changed value and use "
                    "it: torch.nn.utils.parametrize does",
                )
