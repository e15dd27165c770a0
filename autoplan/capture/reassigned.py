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
                where = forward_line(module if is_model_file(inspect.getfile(type(module))) else self._model)
                if table is module._parameters:
                    raise _replaced_parameter(_joined(path, name), where)
                assert old is not None
                _check_alike(_joined(path, name), where, old, value)
                with torch.no_grad():
                    old.copy_(value)
                table[name] = old


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_alike(name: str, where: str, old: Tensor, new: Any) -> None:
    if not isinstance(new, Tensor):
        what = f"forward sets the buffer {name} to {type(new).__name__}"
    elif new.requires_grad:
        what = f"forward sets the buffer {name} to a value with a gradient: the next step's would go through this one"
    elif (new.shape, new.dtype) != (old.shape, old.dtype):
        what = f"forward sets the buffer {name} of {_kind(old)} to one of {_kind(new)}"
    else:
        return
    raise CaptureError(
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
