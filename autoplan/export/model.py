"""emit for a MODEL of the command line, whose tensors may all be on meta."""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor, nn

from autoplan.capture import Capture
from autoplan.export.folder import check_target, emit
from autoplan.models.buffers import real_buffers
from autoplan.plan import Plan
from autoplan.runtime.build import Builder, check_executable
from autoplan.verification.subject import prepare


def emit_model(model: str, plan: Plan, directory: str | os.PathLike[str]) -> Path:
    """Write the program of ``plan`` for MODEL to ``directory``; returns it. Parameters on meta have no weights to
    write; buffers get the values that the model is built with.

    Raises ModelError, PlanFileError where the plan was made for another model, and what :func:`emit` raises.
    """
    check_target(directory)
    whole = prepare(model, plan, None, None)
    check_executable(whole.capture, plan)
    if any(buffer.is_meta for buffer in whole.capture.graph_module.buffers()):
        _fill(whole.capture, real_buffers(model, precision=plan.precision))
    builder = Builder(whole.capture, plan, whole.layers, whole.cluster, None)
    return emit(whole.capture, plan, whole.layers, builder, directory)


def _fill(capture: Capture, values: dict[str, Tensor]) -> None:
    """Put values into the graph's buffers, which stand under the names that they have in the model."""
    module: nn.Module = capture.graph_module
    for name, buffer in list(module.named_buffers()):
        value = values.get(name)
        if value is not None and value.shape == buffer.shape:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, value.to(buffer.dtype))
