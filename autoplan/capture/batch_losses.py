"""torch's loss functions: how they reduce over the batch, and what their mean counts."""

from __future__ import annotations

from math import prod
from typing import Any

from torch.fx import Node

from autoplan.capture.batch_flow import Flow, Labels, combine, rule
from autoplan.capture.batch_state import Mixed, Rows, Sizes, State, bound, operator_name, tensors
from autoplan.capture.shapes import is_data_dependent

NONE, MEAN, SUM = 0, 1, 2  # torch's at::Reduction

# Mean over all elements of the broadcast operands.
ELEMENTWISE = set(
    [
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "soft_margin_loss",
        "margin_ranking_loss",
        "hinge_embedding_loss",
        "poisson_nll_loss",
    ]
)
# Mean over rows: one value a row of [N, D] operands.
ROWWISE = {"cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss"}
# Mean over targets that are not ignore_index, weighted by class.
CLASSES = {"cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"}
LOSSES = ELEMENTWISE | ROWWISE | CLASSES

Arguments = dict[str, Any]
Operands = list[tuple[Any, Labels]]


@rule(*ELEMENTWISE)
def _elementwise(flow: Flow, node: Node, a: Arguments) -> State:
    operands: Operands = [(value, range(-flow.rank(value), 0)) for value in tensors(a.values())]
    rank = max(len(labels) for _, labels in operands)
    return _finish(flow, node, a, operands, range(-rank, 0), set())


@rule(*ROWWISE)
def _rowwise(flow: Flow, node: Node, a: Arguments) -> State:
    operands: Operands = [(value, ["n", "d"][: flow.rank(value)]) for value in tensors(a.values())]
    return _finish(flow, node, a, operands, ["n"], {"d"})


@rule(*CLASSES)
def _classes(flow: Flow, node: Node, a: Arguments) -> State:
    """Input [N, C, ...] and targets [N, ...], or class probabilities [N, C, ...]."""
    rank = flow.rank(a["self"])
    if rank == 1:
        return _finish(flow, node, a, [(a["self"], ["c"]), (a["target"], ["c"][: flow.rank(a["target"])])], [], {"c"})
    places = [f"d{index}" for index in range(rank - 2)]
    of_class = ["n", "c", *places]
    of_target = of_class if probabilities(a) else ["n", *places]
    operands: Operands = [(a["self"], of_class), (a["target"], of_target), (a.get("weight"), ["c"])]
    if a["reduction"] == MEAN and not probabilities(a):
        for name in ("target", "weight"):
            value = a.get(name)
            if not flow.known(value) and not isinstance(flow.state(value), Mixed):
                return flow.couple(node, f"how much this mean counts depends on its {name}, which the model computes")
    return _finish(flow, node, a, operands, ["n", *places], {"c"})


def probabilities(a: Arguments) -> bool:
    """Whether the targets are probabilities of classes, not their numbers."""
    return bool(a["target"].meta["val"].is_floating_point())


def _finish(flow: Flow, node: Node, a: Arguments, operands: Operands, result: Labels, fixed: set[str]) -> State:
    kept = a["reduction"] == NONE
    state = combine(flow, node, operands, result, fixed=fixed)
    if kept or not isinstance(state, Rows):
        return state
    return flow.reduced(node, state.order, mean=a["reduction"] == MEAN, counted=counts_targets(node))


def counts_targets(node: Node) -> bool:
    """Whether the mean of this node counts targets, not elements."""
    return operator_name(node).split("::")[1] in CLASSES and not probabilities(bound(node))


def counted_elements(node: Node, sizes: Sizes) -> int:
    """How many elements the mean ``node`` averages, at the batch of ``sizes``.

    A dimension whose size depends on the data counts as 1: the caller multiplies by the rows selected.
    """
    name, a = operator_name(node).split("::")[1], bound(node)
    shapes = [_shape(value, sizes) for value in tensors(a.values())]
    if name == "mean":
        shape, dims = shapes[0], a.get("dim")
        if dims is None or (isinstance(dims, (list, tuple)) and not dims):
            return prod(shape)
        return prod(shape[dim % len(shape)] for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))
    if name in ROWWISE:
        return shapes[0][0]
    if name in CLASSES:
        shape = _shape(a["self"], sizes)
        return prod(shape) // shape[1 if len(shape) > 1 else 0]
    rank = max(len(shape) for shape in shapes)
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return prod(max(column) for column in zip(*aligned, strict=True))


def _shape(value: Node, sizes: Sizes) -> tuple[int, ...]:
    return tuple(1 if is_data_dependent(size) else sizes.value(size) for size in value.meta["val"].shape)
