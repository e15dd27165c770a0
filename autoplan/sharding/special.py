"""Rules that a line cannot say: reductions over dimensions named in an argument, attention by heads, the vocabulary.

- Attention splits over heads. Query heads must divide; key/value heads divide too, or stay whole and every rank picks
  those of its queries (grouped-query attention with fewer key/value heads than ranks).
- An embedding split over its rows looks up what it holds and gives zero for the rest: the sum over ranks is the result.
- Cross entropy split over classes needs each row's maximum, sum of exponentials and target logit from all ranks: two
  all-reduces of a few numbers a row instead of gathering the logits (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoplan.sharding.operation import Operation
from autoplan.sharding.placements import PARTIAL, REPLICATE, Placement, Shard
from autoplan.sharding.rules import RESULT, FactorRule, Option, Rule, absent


class Softmax(Rule):
    """Every dimension but the normalised one passes."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if state.dim != operation.dim("dim"):
            yield Option((state,), state)


class Reduction(Rule):
    """Dimensions that stay pass; ``adds``: of a dimension that is summed away every rank holds a summand."""

    def __init__(self, *, adds: bool = False) -> None:
        self.adds = adds

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if len(operation.shapes) != 1 or len(operation.operands) != 1:
            return
        places = self._places(operation)
        if slot == RESULT:
            if state.dim in places:
                yield Option((state.at(places.index(state.dim)),), state)
        elif places[state.dim] is not None:
            kept = places[state.dim]
            assert kept is not None
            yield Option((state,), state.at(kept))
        elif self.adds:
            yield Option((state,), PARTIAL)

    def passes_partial(self, operation: Operation) -> bool:
        return operation.key in ("sum", "mean")

    def _places(self, operation: Operation) -> list[int | None]:
        """For each dimension of the operand the result's, None for a reduced one."""
        rank = len(operation.operands[0].shape)
        dims = operation.arguments.get("dim")
        named = [dims] if isinstance(dims, int) else (dims or list(range(rank)))
        reduced = {dim % rank for dim in named}
        keep = bool(operation.arguments.get("keepdim", False))
        places: list[int | None] = []
        for dim in range(rank):
            gone = sum(1 for other in reduced if other < dim)
            places.append(None if dim in reduced else dim - (0 if keep else gone))
        return places


class Attention(Rule):
    """scaled_dot_product_attention: q[*b, h, t, d], k[*b, g, s, d], v[*b, g, s, e], mask[*b, h, t, s]."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        query, key = operation.operand("query"), operation.operand("key")
        if query is None or key is None:
            return
        heads, key_heads = query.shape[-3], key.shape[-3]
        shape = operation.shape if slot == RESULT else operation.operands[slot].shape
        from_back = state.dim - len(shape)
        if from_back != -3 or len(query.shape) != len(key.shape):
            return
        if shape[-3] != heads and slot not in operation.slots["key"] + operation.slots["value"]:
            return
        grouped = heads != key_heads
        if grouped and (state.parts or state.block or len(query.shape) != 4):
            return
        whole_keys = grouped and key_heads % operation.degree != 0
        if heads % operation.degree and not state.block:
            return
        if whole_keys and (not operation.arguments.get("enable_gqa") or operation.degree % key_heads):
            return
        yield self._by_heads(operation, state, heads, whole_keys)

    def _by_heads(self, operation: Operation, state: Shard, heads: int, whole_keys: bool) -> Option:
        inputs: list[Placement] = []
        keys = {*operation.slots["key"], *operation.slots["value"]}
        for slot, operand in enumerate(operation.operands):
            rank = len(operand.shape)
            if slot in keys and whole_keys:
                inputs.append(absent(operation, slot))
            elif slot in keys or (rank >= 3 and operand.shape[-3] == heads):
                inputs.append(state.at(rank - 3))
            else:
                inputs.append(absent(operation, slot))
        output = state.at(len(operation.shape) - 3)
        return Option(tuple(inputs), output, "expand_heads" if whole_keys else "plain", "heads")


class Embedding(FactorRule):
    """embedding: w[v, e], indices[*b] -> y[*b, e]; over v every rank looks up its own rows."""

    def __init__(self) -> None:
        super().__init__("embedding: w[v, e], indices[*b] -> y[*b, e]")

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if operation.arguments.get("scale_grad_by_freq") or operation.arguments.get("sparse"):
            return
        for option in super().options(operation, slot, state):
            rows = option.output == PARTIAL
            if rows and (state.parts or state.block):
                continue
            yield Option(option.inputs, option.output, "vocabulary_embedding" if rows else "plain")


class Bag(FactorRule):
    """embedding_bag: every rank sums its share of the features; of its results only the bags are read."""

    def __init__(self) -> None:
        super().__init__("embedding_bag: w[v!, e], indices[*n!], offsets[*o!], weights[*n!] -> y[b!, e]")

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if not operation.arguments.get("sparse"):
            yield from super().options(operation, slot, state)


class CrossEntropy(Rule):
    """Classes split over the ranks; sum and mean, ignore_index; class weights and label smoothing keep it whole."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        logits = operation.operands[0].shape
        arguments = operation.arguments
        unsupported = arguments.get("weight") is not None or arguments.get("label_smoothing", 0.0)
        by_index = len(operation.operands) == 2 and len(operation.operands[1].shape) == len(logits) - 1
        if slot != 0 or state.dim != min(1, len(logits) - 1) or unsupported or not by_index:
            return
        if state.parts or state.block or int(arguments.get("reduction", 1)) == 0:
            return
        yield Option((state, REPLICATE), REPLICATE, "vocabulary_cross_entropy")


class Size(Rule):
    """A size that is read by the program must not be the sharded one."""

    def options(self, operation: Operation, slot: int, state: Shard) -> Iterator[Option]:
        if slot == 0 and state.dim != int(operation.arguments.get("dim", state.dim)):
            yield Option((state,), REPLICATE)


def line_of(rule: Any) -> str:
    """The rule in one line, for people."""
    return rule.line if isinstance(rule, FactorRule) else (type(rule).__doc__ or "").splitlines()[0]
