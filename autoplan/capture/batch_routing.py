"""Rows taken and put by index: per-sample selection, and the routing of tokens to experts.

A mixture of experts without a capacity limit is per-token mathematics, though its tokens are sorted by expert and so
change places across the batch: sort gives a permutation P of rows (``RowIds`` in the order ``Permuted``), x[P] holds
rows of the same order, experts work on rows (``grouped_mm`` with the offsets that count the very keys sorted), and
the inverse of P (``Slots``), or adding to row P, puts each row back to its own sample. ``nonzero`` of a mask routes
the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autoplan.capture.batch_flow import Flow, combine, rule
from autoplan.capture.batch_rules import across, pointwise
from autoplan.capture.batch_state import (
    Free,
    Mixed,
    Offsets,
    Permuted,
    PerRow,
    RowIds,
    Rows,
    Slots,
    Starts,
    State,
    Straight,
)

Arguments = dict[str, Any]


@rule("arange")
def _arange(flow: Flow, node: Node, a: Arguments) -> State:
    size = flow.shape(node)[0]
    if not flow.sizes.grows(node):
        return Free()
    start, step = a.get("start", 0), a.get("step", 1)
    if not flow.sizes.scales(size) or start != 0 or not isinstance(step, int) or step < 1:
        return flow.couple(node, "the values depend on where a sample stands in the batch")
    if step > 1:
        return Starts(runs=size // flow.sizes.batch, step=step)
    table = Straight(outer=1, inner=size // flow.sizes.batch)
    return RowIds(dim=0, order=table, table=table)


@rule("embedding_bag _embedding_bag")
def _embedding_bag(flow: Flow, node: Node, a: Arguments) -> State:
    """Bags of equally many rows, as ``nn.EmbeddingBag`` makes them of [B, k] indices, hold one sample's rows each."""
    rows, starts = flow.state(a["indices"]), flow.state(a["offsets"])
    weights = a.get("per_sample_weights")
    if isinstance(rows, Mixed) or isinstance(starts, Mixed):
        return Mixed()
    if not (isinstance(rows, Rows) and isinstance(starts, Starts) and isinstance(flow.state(a["weight"]), Free)):
        return flow.couple(node, "a bag may hold values of several samples")
    alone = rows.order == Straight(outer=1, inner=starts.runs * starts.step) and flow.rank(a["indices"]) == 1
    if not alone or a.get("include_last_offset") or (weights is not None and flow.state(weights) != rows):
        return flow.couple(node, "a bag may hold values of several samples")
    if a.get("scale_grad_by_freq"):
        return flow.couple(node, "gradients are scaled by how often an index comes in the batch")
    if any(len(user.users) and user.args[1] != 0 for user in node.users):
        return flow.couple(node, "it uses a value of the whole batch")
    return (Rows(dim=0, order=Straight(outer=1, inner=starts.runs)), Mixed(), Mixed(), Mixed())


@rule("sort argsort")
def _sort(flow: Flow, node: Node, a: Arguments) -> State:
    value = node.args[0]
    state = flow.state(value)
    outputs = node.meta["val"]
    if isinstance(state, RowIds) and isinstance(state.order, Permuted) and flow.rank(value) == 1:
        slots = Slots(dim=0, order=state.table, by=state.order.by)
        if isinstance(outputs, (tuple, list)) or a.get("descending"):
            return flow.couple(node, "it sorts the samples of the batch")
        return slots
    if isinstance(state, Rows) and flow.rank(value) == 1 and isinstance(state.order, Straight):
        order = Permuted(by=node.name)
        ids = RowIds(dim=0, order=order, table=state.order)
        keys = "" if a.get("descending") else node.name
        return (Rows(dim=0, order=order, sorted_by=keys), ids) if isinstance(outputs, (tuple, list)) else ids
    return across(flow, node, [a.get("dim", -1) % max(1, flow.rank(value))])


@rule("floor_divide div remainder")
def _divide(flow: Flow, node: Node, a: Arguments) -> State:
    """Row r of [B*T*k] belongs to row r // k of [B*T]; r % k says nothing about the batch."""
    left, right = node.args[0], node.args[1]
    state = flow.state(left)
    whole = "floor_divide" in str(node.target) or a.get("rounding_mode") == "floor"
    rest = "remainder" in str(node.target)
    if isinstance(state, RowIds) and isinstance(right, int) and right > 0 and state.table.inner % right == 0:
        if whole:
            table = Straight(outer=state.table.outer, inner=state.table.inner // right)
            return RowIds(dim=state.dim, order=state.order, table=table)
        if rest:
            return Rows(dim=state.dim, order=state.order)
    return pointwise(flow, node, a)


@rule("histc bincount")
def _histogram(flow: Flow, node: Node, a: Arguments) -> State:
    state = flow.rows(node.args[0])
    if isinstance(state, Rows) and state.sorted_by:
        return Offsets(by=state.sorted_by)
    if isinstance(state, (Free, Mixed)):
        return state
    return flow.couple(node, "it counts over the samples of the batch")


@rule("cumsum")
def _cumsum(flow: Flow, node: Node, a: Arguments) -> State:
    state = flow.state(node.args[0])
    return state if isinstance(state, Offsets) else across(flow, node, [a["dim"] % max(1, flow.rank(node))])


@rule("transformers::grouped_mm_fallback _grouped_mm")
def _grouped_mm(flow: Flow, node: Node, a: Arguments) -> State:
    """Row r meets the expert whose offsets hold r: its own key's, if the offsets count the keys that ordered it."""
    value, weight, *rest = node.args
    offsets = flow.state(a.get("offs", rest[0] if rest else None))
    state = flow.state(value)
    if isinstance(state, Mixed) or isinstance(offsets, Mixed):
        return Mixed()
    known = isinstance(state, Rows) and isinstance(state.order, Permuted) and isinstance(flow.state(weight), Free)
    if known and isinstance(offsets, Offsets) and offsets.by == state.order.by:  # type: ignore[union-attr]
        return Rows(dim=0, order=state.order)  # type: ignore[union-attr]
    return flow.couple(node, "the grouping of its rows could not be followed to the samples they belong to")


@rule("where")
def _where(flow: Flow, node: Node, a: Arguments) -> State:
    return _nonzero(flow, node, a) if len(node.args) == 1 else pointwise(flow, node, a)


@rule("nonzero_numpy")
def _nonzero(flow: Flow, node: Node, a: Arguments) -> State:
    state = flow.rows(node.args[0])
    if not isinstance(state, Rows):
        return state if isinstance(state, (Free, Mixed)) else flow.couple(node, "it selects samples by value")
    flow.selections[node.name] = node.args[0]  # type: ignore[assignment]
    if not isinstance(state.order, Straight):
        return flow.couple(node, "it selects rows that were selected before")
    order = Permuted(by=node.name)
    found: list[State] = [Rows(dim=0, order=order) for _ in node.meta["val"]]
    found[state.dim] = RowIds(dim=0, order=order, table=state.order)
    return tuple(found)


@rule("index")
def _index(flow: Flow, node: Node, a: Arguments) -> State:
    value, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    return _picked(flow, node, value, indices)


@rule("index_select")
def _index_select(flow: Flow, node: Node, a: Arguments) -> State:
    dim = a["dim"] % flow.rank(node.args[0])
    return _picked(flow, node, node.args[0], [*([None] * dim), a["index"]])


def _picked(flow: Flow, node: Node, value: Any, indices: list[Node | None]) -> State:
    given = [index for index in indices if isinstance(index, Node)]
    if any(isinstance(flow.state(item), Mixed) for item in (value, *given)):
        return Mixed()
    if any(_is_mask(index) for index in given):
        return _masked(flow, node, value, indices, given)
    state = flow.rows(value)
    rank = max(flow.rank(index) for index in given)
    spread = [f"i{number}" for number in range(-rank, 0)]
    operands: list[tuple[Any, list[Any]]] = [(index, spread[rank - flow.rank(index) :]) for index in given]
    labels = list(range(flow.rank(value)))
    first = next(dim for dim, index in enumerate(indices) if index is not None)
    together = all(index is not None for index in indices[first : first + len(given)])
    rest = [dim for dim in labels if dim >= len(indices) or indices[dim] is None]
    place = len([dim for dim in rest if dim < first]) if together else 0
    result = [*rest[:place], *spread, *rest[place:]]
    chosen = indices[state.dim] if isinstance(state, PerRow) and state.dim < len(indices) else None
    if chosen is None:
        fixed = {dim for dim, index in enumerate(indices) if index is not None}
        return combine(flow, node, [(value, labels), *operands], result, fixed=fixed)
    return _rows_by_number(flow, node, state, chosen, operands, result)


def _rows_by_number(
    flow: Flow, node: Node, state: State, chosen: Node, operands: list[tuple[Any, list[Any]]], result: list[Any]
) -> State:
    """x[ids] along the batch: ids must number rows of x's own table, and stand in an order of their own."""
    ids = flow.state(chosen)
    labels = next(labels for index, labels in operands if index is chosen)
    others = [(index, names) for index, names in operands if index is not chosen]
    if (isinstance(ids, RowIds) and isinstance(state, Rows) and state.order == ids.table) or (
        isinstance(ids, Slots)
        and isinstance(state, Rows)
        and isinstance(state.order, Permuted)
        and state.order.by == ids.by
    ):
        there = Rows(dim=result.index(labels[ids.dim]), order=ids.order)
    else:
        return flow.couple(node, "it picks samples of the batch by index")
    for index, names in others:
        other = flow.state(index)
        if isinstance(other, Free):
            continue
        if not isinstance(other, Rows) or (result.index(names[other.dim]), other.order) != (there.dim, there.order):
            return flow.couple(node, "it picks samples of the batch by index")
    return there


def _is_mask(index: Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def _masked(flow: Flow, node: Node, value: Any, indices: list[Node | None], given: list[Node]) -> State:
    """x[mask] with one mask over the first dimensions: the rows of x where it is true, in the mask's own order."""
    if len(given) != 1 or indices[0] is None:
        return flow.couple(node, "it selects by a mask together with other indices")
    mask, state = flow.state(given[0]), flow.rows(value)
    if isinstance(mask, Free) and isinstance(state, Rows) and state.dim >= flow.rank(given[0]):
        return Rows(dim=state.dim - flow.rank(given[0]) + 1, order=state.order)
    if isinstance(mask, Free) and isinstance(state, Free):
        return Free()
    if isinstance(mask, Rows) and (isinstance(state, Free) or _same_rows(mask, state)):
        flow.selections[given[0].name] = given[0]
        return Rows(dim=0, order=Permuted(by=given[0].name))
    return flow.couple(node, "it selects samples by a mask that is not a row for each sample")


def _same_rows(mask: Rows, state: State) -> bool:
    return isinstance(state, Rows) and (mask.dim, mask.order) == (state.dim, state.order)


@rule("index_put")
def _index_put(flow: Flow, node: Node, a: Arguments) -> State:
    target, values = node.args[0], node.args[2]
    given = [index for index in node.args[1] if isinstance(index, Node)]  # type: ignore[union-attr]
    involved = [flow.state(item) for item in (target, values, *given)]
    if all(isinstance(state, Free) for state in involved):
        return Free()
    if any(isinstance(state, Mixed) for state in involved):
        return Mixed()
    if len(given) == 1 and _is_mask(given[0]) and isinstance(flow.state(values), Free) and flow.rank(values) == 0:
        rank = flow.rank(target)
        return combine(flow, node, [(target, range(rank)), (given[0], range(flow.rank(given[0])))], range(rank))
    if len(given) == 1 and len(node.args[1]) == 1:  # type: ignore[arg-type]
        return _put_rows(flow, node, target, given[0], values)
    return flow.couple(node, "it puts rows of the batch by index")


@rule("index_add index_copy")
def _index_add(flow: Flow, node: Node, a: Arguments) -> State:
    target, index, source = node.args[0], a["index"], a["source"]
    dim = a["dim"] % flow.rank(target)
    if dim == 0 and isinstance(flow.state(index), (RowIds, Mixed)):
        return _put_rows(flow, node, target, index, source)
    labels = range(flow.rank(target))
    return combine(flow, node, [(target, labels), (source, labels)], labels, fixed={dim})


def _put_rows(flow: Flow, node: Node, target: Any, index: Any, values: Any) -> State:
    ids, put, base = flow.state(index), flow.state(values), flow.rows(target)
    if any(isinstance(state, Mixed) for state in (ids, put, base)):
        return Mixed()
    if not isinstance(ids, RowIds) or ids.dim != 0:
        return flow.couple(node, "it puts rows of the batch by index")
    whole = isinstance(base, Rows) and base.dim == 0 and base.order == ids.table
    # inverse[P] = arange(n): position of each row in P.
    if isinstance(put, RowIds) and put.order == put.table == ids.table and isinstance(flow.state(target), Free):
        by = ids.order.by if isinstance(ids.order, Permuted) else ""
        return Slots(dim=0, order=ids.table, by=by) if by else put
    if whole and isinstance(put, Rows) and put.dim == 0 and put.order == ids.order:
        return Rows(dim=0, order=ids.table)
    if whole and isinstance(put, Free) and flow.rank(values) == 0:
        return Rows(dim=0, order=ids.table)
    return flow.couple(node, "it puts rows of the batch by index")
