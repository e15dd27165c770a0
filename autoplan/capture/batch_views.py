"""How the batch passes through operators that rearrange, cut and join dimensions."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import Node

from autoplan.capture.batch_flow import Flow, combine, rule
from autoplan.capture.batch_state import Free, Permuted, PerRow, Rows, State, Straight, moved, tensors

Arguments = dict[str, Any]


@rule("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel _reshape_alias")
def _reshape(flow: Flow, node: Node, a: Arguments) -> State:
    """Row-major order stays, so the batch is found again by its stride: inner x what lies to the right of it."""
    state = flow.state(node.args[0])
    if not isinstance(state, PerRow):
        return state
    shape, result = flow.shape(node.args[0]), flow.shape(node)
    right = prod(shape[state.dim + 1 :])
    for dim in range(len(result)):
        right_of = prod(result[dim + 1 :])
        if isinstance(state.order, Permuted):
            if right_of == right and result[dim] == shape[state.dim]:
                return moved(state, dim)
            continue
        stride = state.order.inner * right
        inner, rest = divmod(stride, right_of)
        outer, uneven = divmod(result[dim], max(1, flow.sizes.batch * inner))
        if rest == 0 and uneven == 0 and outer and inner:
            return moved(state, dim, Straight(outer=outer, inner=inner))
    return flow.couple(node, "the new shape cuts through the samples of the batch")


@rule("permute transpose t movedim moveaxis swapaxes swapdims numpy_T mT adjoint")
def _permute(flow: Flow, node: Node, a: Arguments) -> State:
    state = flow.state(node.args[0])
    if not isinstance(state, PerRow):
        return state
    # Sizes as unique marks: running the operator on them shows where each dimension went.
    marked = torch.empty([index + 2 for index in range(flow.rank(node.args[0]))], device="meta")
    moved_to = node.target(marked, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return moved(state, list(moved_to.shape).index(state.dim + 2))


@rule("expand expand_as broadcast_to")
def _expand(flow: Flow, node: Node, a: Arguments) -> State:
    state = flow.state(node.args[0])
    if not isinstance(state, PerRow):
        return state
    return moved(state, state.dim + flow.rank(node) - flow.rank(node.args[0]))


@rule("repeat tile")
def _repeat(flow: Flow, node: Node, a: Arguments) -> State:
    state = flow.state(node.args[0])
    if not isinstance(state, PerRow):
        return state
    dim = state.dim + flow.rank(node) - flow.rank(node.args[0])
    times, uneven = divmod(flow.shape(node)[dim], flow.shape(node.args[0])[state.dim])
    if times == 1:
        return moved(state, dim)
    if uneven or not isinstance(state.order, Straight):
        return flow.couple(node, "it repeats samples of the batch")
    return moved(state, dim, Straight(outer=state.order.outer * times, inner=state.order.inner))


@rule("repeat_interleave")
def _repeat_interleave(flow: Flow, node: Node, a: Arguments) -> State:
    state, dim = flow.state(node.args[0]), a.get("dim")
    if isinstance(state, Free) and not tensors([a.get("repeats")]):
        return state
    if not isinstance(state, Rows) or dim is None or tensors([a.get("repeats")]):
        return flow.couple(node, "it repeats rows by numbers that the data decides")
    dim = dim % flow.rank(node.args[0])
    if dim != state.dim:
        return state
    if not isinstance(state.order, Straight):
        return flow.couple(node, "it repeats samples of the batch")
    times = flow.sizes.value(a["repeats"])
    return moved(state, dim, Straight(outer=state.order.outer, inner=state.order.inner * times))


@rule("cat concat concatenate")
def _cat(flow: Flow, node: Node, a: Arguments) -> State:
    values = tensors([a["tensors"]])
    rank = flow.rank(node)
    dim = a.get("dim", 0) % rank
    values = [value for value in values if flow.rank(value) == rank]
    states = [flow.rows(value) for value in values]
    if not any(isinstance(state, PerRow) and state.dim == dim for state in states):
        return combine(flow, node, [(value, range(rank)) for value in values], range(rank))
    outer, inner = 0, set()
    for state in states:
        if not isinstance(state, Rows) or state.dim != dim or not isinstance(state.order, Straight):
            return flow.couple(node, "it appends rows to the batch")
        outer += state.order.outer
        inner.add(state.order.inner)
    if len(inner) > 1:
        return flow.couple(node, "it appends rows to the batch")
    return Rows(dim=dim, order=Straight(outer=outer, inner=inner.pop()))


@rule("stack")
def _stack(flow: Flow, node: Node, a: Arguments) -> State:
    values, rank = tensors([a["tensors"]]), flow.rank(node)
    labels = [dim for dim in range(rank) if dim != a.get("dim", 0) % rank]
    return combine(flow, node, [(value, labels) for value in values], range(rank))


def _piece(flow: Flow, node: Node, state: State, dim: int, start: int, length: int, size: int) -> State:
    """Rows [start, start + length) of ``dim``: whole runs of the batch, or none of it."""
    if not isinstance(state, PerRow) or state.dim != dim or length == size:
        return state
    if isinstance(state, Rows) and isinstance(state.order, Straight):
        run = flow.sizes.batch * state.order.inner
        if start % run == 0 and length % run == 0 and length:
            return moved(state, dim, Straight(outer=length // run, inner=state.order.inner))
    return flow.couple(node, "it takes some of the samples of the batch")


@rule("slice narrow")
def _slice(flow: Flow, node: Node, a: Arguments) -> State:
    state, source = flow.rows(node.args[0]), node.args[0]
    dim = a.get("dim", 0) % flow.rank(source)
    size, length = flow.shape(source)[dim], flow.shape(node)[dim]
    start = flow.sizes.value(a["start"]) if a.get("start") is not None else 0
    if a.get("step", 1) != 1 and isinstance(state, PerRow) and state.dim == dim:
        return flow.couple(node, "it takes some of the samples of the batch")
    return _piece(flow, node, state, dim, start % size if start < 0 else start, length, size)


@rule("split chunk split_with_sizes tensor_split unsafe_chunk unsafe_split")
def _split(flow: Flow, node: Node, a: Arguments) -> State:
    source = node.args[0]
    dim = a.get("dim", 0) % flow.rank(source)
    state, size, start, pieces = flow.state(source), flow.shape(source)[dim], 0, []
    for output in node.meta["val"]:
        length = flow.shape(output)[dim]
        pieces.append(_piece(flow, node, state, dim, start, length, size))
        start += length
    return tuple(pieces)


@rule("select")
def _select(flow: Flow, node: Node, a: Arguments) -> State:
    state, dim = flow.rows(node.args[0]), a["dim"] % flow.rank(node.args[0])
    return _without(flow, node, state, dim)


@rule("unbind")
def _unbind(flow: Flow, node: Node, a: Arguments) -> State:
    state = _without(flow, node, flow.state(node.args[0]), a.get("dim", 0) % flow.rank(node.args[0]))
    return tuple(state for _ in node.meta["val"])


def _without(flow: Flow, node: Node, state: State, dim: int) -> State:
    if not isinstance(state, PerRow):
        return state
    if state.dim == dim:
        return flow.couple(node, "it takes some of the samples of the batch")
    return moved(state, state.dim - (state.dim > dim))


@rule(
    """
    pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d unfold im2col
    """
)
def _pad(flow: Flow, node: Node, a: Arguments) -> State:
    source = node.args[0]
    shape, result = flow.shape(source), flow.shape(node)
    changed = [dim for dim, size in enumerate(shape) if dim >= len(result) or result[dim] != size]
    return combine(flow, node, [(source, range(len(shape)))], range(len(shape)), fixed=changed)
