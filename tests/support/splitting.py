"""Trace a model with a symbolic batch, run it in parts, compare with the whole: the oracle of what splits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx import GraphModule, Interpreter

from autoplan.capture.batch_flow import Flow
from autoplan.capture.batch_state import Rows, Straight
from autoplan.capture.loss import analyse
from autoplan.capture.types import Capture, InputSpec
from autoplan.passes.weight_loss import WeightedLoss, weight_loss

Batch = dict[str, Tensor]


def trace(model: nn.Module, batch: Batch, *, dynamic: bool = True) -> GraphModule:
    """Export with dimension 0 of every tensor as the batch."""
    names = [name for name in inspect.signature(model.forward).parameters if name in batch]
    batch = {name: batch[name] for name in names} | batch
    size = Dim("batch", min=1, max=1 << 16)
    shapes = {name: {0: size} for name in batch} if dynamic else None
    program = export(model, (), batch, strict=False, dynamic_shapes=shapes)
    module = program.module(check_guards=False)
    return GraphModule(module, module.graph)


def capture_of(graph_module: GraphModule, batch: Batch, *, dynamic: bool = True) -> Capture:
    inputs = tuple(
        InputSpec(
            placeholder=node.name,
            path=(node.name,),
            shape=tuple(batch[node.name].shape),
            dtype=batch[node.name].dtype,
            batched=True,
        )
        for node in graph_module.graph.nodes
        if node.op == "placeholder"
    )
    terms, couplings = analyse(graph_module, inputs)
    return Capture(
        name="model",
        graph_module=graph_module,
        inputs=inputs,
        batch_size=inputs[0].shape[0],
        dynamic_batch=dynamic,
        tokens_per_sample=1,
        dtype=torch.float64,
        tied=(),
        loss_terms=terms,
        couplings=couplings,
        notes=(),
    )


def captured(model: nn.Module, batch: Batch, *, dynamic: bool = True) -> Capture:
    return capture_of(trace(model, batch, dynamic=dynamic), batch, dynamic=dynamic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    loss: float
    gradients: dict[str, Tensor]


def first(value: Any) -> Any:
    while isinstance(value, (tuple, list)) or hasattr(value, "loss"):
        value = value.loss if hasattr(value, "loss") else value[0]
    return value


def _take_gradients(module: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            parameter.grad = None
    return gradients


def run_whole(model: nn.Module, batch: Batch) -> Numbers:
    """The user's model on the whole batch."""
    loss = first(model(**{name: value.clone() for name, value in batch.items()}))
    if loss.requires_grad:
        loss.backward()
    return Numbers(loss=loss.item(), gradients=_take_gradients(model))


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    return [dict(zip(batch, part, strict=True)) for part in zip(*(v.split(list(sizes)) for v in batch.values()))]  # noqa: B905


def run_in_parts(weighted: WeightedLoss, batch: Batch, sizes: Sequence[int]) -> Numbers:
    """Totals of the weights first, then each part's contribution and its gradients, added up."""
    parts = cut({name: value.clone() for name, value in batch.items()}, sizes)
    totals = [torch.stack(column).sum() for column in zip(*(weighted.weights(**part) for part in parts), strict=True)]
    loss = 0.0
    for part in parts:
        contribution = weighted.graph_module(**part, **{f"loss_total_{k}": total for k, total in enumerate(totals)})
        contribution = first(contribution)
        assert contribution.dim() == 0
        loss += contribution.item()
        if contribution.requires_grad:
            contribution.backward()
    return Numbers(loss=loss, gradients=_take_gradients(weighted.graph_module))


def assert_same(whole: Numbers, parts: Numbers, *, tolerance: float = 1e-12) -> None:
    """Relative, but gradients that are zero in exact arithmetic (a key's bias) are compared by the largest gradient."""
    assert abs(whole.loss - parts.loss) <= tolerance * max(abs(whole.loss), 1e-3), (whole.loss, parts.loss)
    scale = max((g.norm().item() for g in whole.gradients.values()), default=0.0)
    for name, gradient in whole.gradients.items():
        difference = (gradient - parts.gradients[name]).norm().item()
        assert difference <= tolerance * max(gradient.norm().item(), 1e-2 * scale), (name, difference)


def assert_splits(model: nn.Module, batch: Batch, sizes: Sequence[int], *, tolerance: float = 1e-12) -> Capture:
    """The batch in parts of these sizes gives the whole batch's loss and gradients."""
    capture = captured(model, batch)
    assert capture.couplings == (), capture.couplings
    assert_same(run_whole(model, batch), run_in_parts(weight_loss(capture), batch, sizes), tolerance=tolerance)
    return capture


class _Recorder(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and n.op == "call_function":
            self.values[n.name] = value.detach().clone()
        return value


def disagreements(graph_module: GraphModule, flow: Flow, batch: Batch) -> tuple[list[str], int]:
    """Run every sample by itself and compare each value that claims to be ``Rows`` with the whole batch's.

    Returns the nodes that differ, and how many were compared. Values in an order that the data decides are skipped.
    """
    names = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    whole = _Recorder(graph_module)
    whole.run(*(batch[name].clone() for name in names))
    samples = len(batch[names[0]])
    wrong, compared = [], 0
    alone = []
    for sample in range(samples):
        recorder = _Recorder(graph_module)
        recorder.run(*(batch[name][sample : sample + 1].clone() for name in names))
        alone.append(recorder.values)
    for node in graph_module.graph.nodes:
        state = flow.states.get(node)
        if not isinstance(state, Rows) or not isinstance(state.order, Straight) or node.name not in whole.values:
            continue
        if "empty" in node.name:
            continue
        compared += 1
        value = whole.values[node.name]
        outer, inner = state.order.outer, state.order.inner
        cut_up = value.unflatten(state.dim, (outer, samples, inner)).movedim(state.dim + 1, 0)
        for sample in range(samples):
            own = alone[sample][node.name].unflatten(state.dim, (outer, 1, inner)).movedim(state.dim + 1, 0)[0]
            if not torch.allclose(cut_up[sample], own, rtol=1e-6, atol=1e-6, equal_nan=True):
                wrong.append(node.name)
                break
    return wrong, compared
