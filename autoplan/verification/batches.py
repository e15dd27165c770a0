"""The batches of a comparison: labels ignored unevenly, micro-batches of unequal sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from autoplan.capture import Capture
from autoplan.capture.batch import replace_leaves
from autoplan.verification import numbers
from autoplan.verification.shrink import resample

if TYPE_CHECKING:
    from autoplan.verification.numeric import Subject


def batches_of(subject: Subject) -> tuple[list[Any], tuple[str, ...]]:
    """A batch a step: labels ignored unevenly, and in the second step micro-batches of unequal sizes."""
    strategy, small = subject.plan.strategy, subject.small
    sizes = [strategy.global_batch] * numbers.STEPS
    if strategy.micro_batch_size > 1 and strategy.micro_batches > 1 and subject.capture.dynamic_batch:
        sizes[1] -= strategy.data
    plain = [resample(small.example_inputs, size, seed=step + 1) for step, size in enumerate(sizes)]
    targets = _targets(subject.capture)
    if not targets:
        return plain, ()
    ignoring = [_ignore(batch, targets) for batch in plain]
    try:
        with torch.no_grad(), numbers.values_kept(subject.capture):
            numbers.CallAndLoss(small.model, small.loss_fn, ignoring[0])(*numbers.tensors(ignoring[0]).values())
    except Exception:  # labels that are read as something else too (an embedding's rows) can't be ignored
        return plain, ("no labels ignored: the model reads them as more than targets",)
    return ignoring, ()


def _targets(captured: Capture) -> dict[tuple[str | int, ...], int]:
    """Inputs that a mean over targets counts, by path, with the value that it ignores."""
    by_placeholder = {spec.placeholder: spec.path for spec in captured.inputs}
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    found: dict[tuple[str | int, ...], int] = {}
    for term in captured.loss_terms:
        node = nodes.get(term.node)
        if term.weight != "targets" or node is None or len(node.args) < 2 or not isinstance(node.args[1], Node):
            continue
        source: Node = node.args[1]
        while source.op == "call_function" and source.all_input_nodes:
            source = source.all_input_nodes[0]
        ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
        if source.op == "placeholder" and source.name in by_placeholder and isinstance(ignored, int):
            found[by_placeholder[source.name]] = ignored
    return found


def _ignore(batch: Any, targets: Mapping[tuple[str | int, ...], int]) -> Any:
    """Sample i ignores its last i labels, one sample all of them; of labels one a sample, every third."""
    changed: dict[Any, Tensor] = {}
    for path, tensor in numbers.tensors(batch).items():
        if path not in targets or tensor.is_floating_point():
            continue
        value = tensor.clone()
        for sample in range(value.shape[0]):
            if value.dim() == 1:
                if sample % 3 == 1:
                    value[sample] = targets[path]
                continue
            length = value.shape[1]
            value[sample, length - sample % length :] = targets[path]
        if value.dim() > 1 and value.shape[0] > 2:
            value[-2] = targets[path]
        changed[path] = value
    return replace_leaves(batch, changed)
