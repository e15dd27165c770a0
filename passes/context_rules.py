"""What operators make of values that the context axis splits, forward and backward: the factor rules, and those of what
attends to all positions, of sums over positions and of the tensor axis's own functions.

The pass that writes the axis chooses by them, and the linter that follows it derives every placement by them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autoplan.sharding.operation import Operation, Shape
from autoplan.sharding.placements import COPIED, PARTIAL, REPLICATE, Copied, Placement, Replicate, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import Option, Pointwise

_SUM = 2  # torch's number of the reduction
# Of the tensor axis: those that leave every dimension as it is, and those that cut or join the one of their argument.
_ALIKE = frozenset(("copy_to_axis", "reduce_from_axis"))
_ALONG = frozenset(("gather_from_axis", "gather_for_axis", "scatter_to_axis", "scatter_sum_to_axis", "slice_for_axis"))


def options(operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
    """The ways in which ``operation`` can work on operand ``slot`` placed as ``state``."""
    key = operation.key
    if key == "scaled_dot_product_attention":
        yield from _attention_options(operation, slot, state)
    elif key in ("cross_entropy_loss", "vocabulary_cross_entropy"):
        yield from _loss_options(operation, slot, state)
    elif _passes(operation, state):
        yield Option((state,), state)
    elif key == "vocabulary_embedding" and slot == 1:
        yield Option((COPIED, state), state)
    elif key in ("drawn_apart", "drawn_in_part") and operation.node.args[0] is torch.ops.aten.dropout.default:
        yield from Pointwise().options(operation, slot, state)
    elif (rule := rule_of(operation.node)) is not None:
        yield from rule.options(operation, slot, state)


def options_of_summands(operation: Operation, summands: Sequence[bool]) -> Option | None:
    """What becomes of summands that need not be added up first: sums of summands are summands, and so is one times a
    whole value; None for all else. ``summands``: which operands are."""
    rule, count = rule_of(operation.node), len(summands)
    scaled = (operation.key == "mul" or summands[0]) if operation.key in ("mul", "div") else False
    if scaled and count == 2 and not all(summands):
        wanted = (PARTIAL if s else whole(o.differentiable) for s, o in zip(summands, operation.operands, strict=True))
        return Option(tuple(wanted), PARTIAL)
    if rule is not None and rule.passes_partial(operation):
        return Option((PARTIAL,) * count, PARTIAL)
    return None


def whole(differentiable: bool) -> Placement:
    """How a value lies that every rank holds all of."""
    return COPIED if differentiable else REPLICATE


def _passes(operation: Operation, state: Shard) -> bool:
    """Whether a function of the tensor axis leaves the dimension alone that is split here."""
    along = (
        operation.node.args[2] if operation.key in _ALONG else 1 if operation.key == "expand_heads_to_axis" else None
    )
    return operation.key in _ALIKE or (along is not None and state.dim != along)


def _attention_options(operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
    """Queries [*b, h, t, d] by positions; keys and values too, to be gathered, or whole where nothing is causal."""
    query, key = operation.operand("query"), operation.operand("key")
    rank = len(operation.shape)
    if query is None or key is None or len(query.shape) != rank or len(key.shape) != rank:
        return
    causal = bool(operation.arguments.get("is_causal"))
    if state != Shard(rank - 2) or (causal and query.shape[-2] != key.shape[-2]):
        return
    in_pieces: list[Placement] = []
    for index, operand in enumerate(operation.operands):
        is_mask = index in operation.slots.get("attn_mask", ())
        own = len(operand.shape) - 2
        if is_mask and (own < 0 or operand.shape[own] != query.shape[-2]):
            in_pieces.append(COPIED if operand.differentiable else REPLICATE)
        else:
            in_pieces.append(Shard(own))
    keys = {*operation.slots["key"], *operation.slots["value"]}
    yield Option(tuple(in_pieces), state, "positions_attention")
    if not causal and slot not in keys:
        whole = tuple(
            (COPIED if operation.operands[i].differentiable else REPLICATE) if i in keys else s
            for i, s in enumerate(in_pieces)
        )
        yield Option(whole, state)


def _loss_options(operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
    """Cross entropy of logits [rows, classes, ...] by rows: a sum, every rank has a summand of; targets by index."""
    arguments = operation.arguments
    of_ours = operation.key == "vocabulary_cross_entropy"
    reduction = operation.node.args[3] if of_ours else arguments.get("reduction", 1)
    if len(operation.operands) != 2 or reduction != _SUM:  # class weights are a third
        return
    logits, target = operation.operands[0].shape, operation.operands[1].shape
    if len(target) != len(logits) - 1 or not target:
        return
    classes = min(1, len(logits) - 1)
    if slot == 0 and state.dim != classes:
        yield Option((state, state.at(state.dim - (state.dim > classes))), PARTIAL)
    elif slot == 1:
        yield Option((state.at(state.dim + (state.dim >= classes)), state), PARTIAL)


def can_be_dealt(shape: Shape, state: Shard, degree: int) -> bool:
    """Whether a value of ``shape`` can lie over ``degree`` ranks as ``state``, in two pieces a rank."""
    return state.dim < len(shape) and state.divides(shape[state.dim], 2 * degree)


def is_whole(state: Placement) -> bool:
    return isinstance(state, Copied | Replicate)


def is_in_place(operation: Operation) -> bool:
    return operation.key.endswith("_") and not operation.key.startswith("__")
