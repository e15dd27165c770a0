"""Follow placements through a rewritten graph and refuse it where a value is read as what it is not.

The linter knows nothing of why the graph was written so. From the placements of the parameters it derives the
placement of every value, forward *and* of its gradient (:class:`Copied` against :class:`Replicate`), by the factor
rules, and checks:

- an operator's operands are placed as one of its options says: a summand is never read as a whole, a shard never as
  a whole or as another shard, a replicated value never enters a split operator without the sum of its gradient;
- a collective gets what it converts;
- a split operator's literals give the local shapes (it is run on shapes alone);
- the graph's results are whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from autoplan.errors import AutoplanError
from autoplan.passes import operators
from autoplan.passes.misread import literals_problem, misread, shapes_of, share, tensor_operands
from autoplan.passes.rewriting import shard_of
from autoplan.sharding.conversions import without_gradient
from autoplan.sharding.operation import GraphFacts, Operation
from autoplan.sharding.placements import COPIED, PARTIAL, REPLICATE, Copied, Partial, Placement, Replicate, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import RESULT, FactorRule, Option, Rule, absent

# Functions that stand for an operator in a form of their own.
_FORM_OF: dict[Any, str] = {
    operators.vocabulary_embedding: "vocabulary_embedding",
    operators.vocabulary_cross_entropy: "vocabulary_cross_entropy",
}
_CONVERSIONS = (
    operators.copy_to_axis,
    operators.reduce_from_axis,
    operators.gather_from_axis,
    operators.gather_for_axis,
    operators.scatter_to_axis,
    operators.scatter_sum_to_axis,
    operators.slice_for_axis,
)


def check_placements(
    rewritten: GraphModule, original: GraphModule, parameters: Mapping[str, Placement], *, degree: int
) -> dict[str, Placement]:
    """The placement of every value of ``rewritten``, by name; ``parameters`` are those of its get_attr nodes.

    ``original`` lends whole shapes and unsplit literals. Raises AutoplanError at the first wrong read.
    """
    return _Linter(rewritten, original, parameters, degree).run()


class _Linter:
    def __init__(
        self, rewritten: GraphModule, original: GraphModule, parameters: Mapping[str, Placement], degree: int
    ) -> None:
        self.rewritten, self.parameters, self.degree = rewritten, parameters, degree
        self.facts = GraphFacts(original, degree)
        self.by_name = {node.name: node for node in original.graph.nodes}
        self.states: dict[Node, Placement] = {}
        self.gradient: dict[Node, bool] = {}

    def run(self) -> dict[str, Placement]:
        for node in self.rewritten.graph.nodes:
            if node.op == "output":
                self._check_results(node)
                continue
            self.gradient[node] = self._is_differentiable(node)
            self.states[node] = self._place(node)
        return {node.name: state for node, state in self.states.items()}

    def _is_differentiable(self, node: Node) -> bool:
        if node.name in self.by_name and "autoplan_origin" not in node.meta:
            return self.facts.differentiable[self.by_name[node.name]]
        return any(self.gradient[parent] for parent in node.all_input_nodes)

    def _place(self, node: Node) -> Placement:
        if node.op == "get_attr":
            return self.parameters.get(str(node.target), REPLICATE)
        if node.op != "call_function":
            return REPLICATE
        if node.target in _CONVERSIONS:
            return self._convert(node)
        if node.target is operators.expand_heads_to_axis:
            if without_gradient(self._state(node, 0)) != REPLICATE or (
                self.gradient[node] and not self._is_copied(node)
            ):
                raise self._objection(node, "whole keys and values whose gradient is summed")
            return Shard(1)
        if "autoplan_core" in node.meta:
            return self._place_core(node)
        if "autoplan_late" in node.meta:
            return self._place_late(node)
        if node.name in self.by_name:
            return self._place_operator(node, self.facts.operation(self.by_name[node.name]))
        return self._place_inserted(node)

    # ------------------------------------------------------------------------------------------ conversions

    def _convert(self, node: Node) -> Placement:
        state = self._state(node, 0)
        argument = node.args[2:] if len(node.args) > 2 else ()
        layout = shard_of(argument) if argument else None
        match node.target:
            case operators.copy_to_axis if isinstance(state, Replicate):
                return COPIED
            case operators.reduce_from_axis if isinstance(state, Partial):
                return REPLICATE
            case operators.gather_from_axis if state == layout:
                return REPLICATE
            case operators.gather_for_axis if state == layout:
                return COPIED
            case operators.scatter_sum_to_axis if isinstance(state, Partial) and layout is not None:
                return layout
            case operators.scatter_to_axis if isinstance(state, Replicate) and layout is not None:
                return layout
            case operators.slice_for_axis if self._is_copied(node) and layout is not None:
                return layout
        raise self._objection(node, "what it converts")

    def _is_copied(self, node: Node) -> bool:
        value = node.args[0]
        assert isinstance(value, Node)
        return isinstance(self.states[value], Copied) or not self.gradient[value]

    def _state(self, node: Node, index: int) -> Placement:
        value = node.args[index]
        assert isinstance(value, Node)
        return self.states[value]

    # -------------------------------------------------------------------------------------------- operators

    def _place_operator(self, node: Node, operation: Operation) -> Placement:
        operands = tensor_operands(node)
        if len(operands) != len(operation.operands):
            raise self._objection(node, "the operands of the original")
        found = tuple(self._before_heads(operation, slot, child) for slot, child in enumerate(operands))
        expanded = any(child.target is operators.expand_heads_to_axis for child in operands)
        if expanded:
            keys = {*operation.slots["key"], *operation.slots["value"]}
            if any((child.target is operators.expand_heads_to_axis) != (s in keys) for s, child in enumerate(operands)):
                raise self._objection(node, "the heads of its queries, of keys and of values")
        form = "expand_heads" if expanded else _FORM_OF.get(node.target, "plain")
        for option in self._options(node, operation, found):
            if self._agrees(operation, option.inputs, found) and self._form_fits(option, form, node, operation):
                self._check_literals(node, operation, option)
                return option.output
        raise self._objection(node, "one of its options")

    def _before_heads(self, operation: Operation, slot: int, child: Node) -> Placement:
        """The placement of an operand; of picked heads, that of the whole they were picked from."""
        picked = child.target is operators.expand_heads_to_axis
        return absent(operation, slot) if picked else self.states[child]

    def _options(self, node: Node, operation: Operation, found: tuple[Placement, ...]) -> Iterator[Option]:
        """Options that may fit the placements found; the whole ones first."""
        rule = rule_of(operation.node)
        count = len(operation.operands)
        split = [(slot, state) for slot, state in enumerate(found) if isinstance(state, Shard)]
        if rule is not None and split:
            yield from rule.options(operation, *split[0])
            return
        if rule is not None and (grown := self._grown(node, operation)) is not None:
            yield from rule.options(operation, RESULT, grown)
        yield Option((REPLICATE,) * count, REPLICATE)
        if rule is not None and operation.differentiable:
            yield Option(tuple(absent(operation, slot) for slot in range(count)), COPIED)
        if rule is not None and count and rule.passes_partial(operation):
            yield Option((PARTIAL,) * count, PARTIAL)

    def _grown(self, node: Node, operation: Operation) -> Shard | None:
        """The one dimension in which the result is a share though no operand is (an expand of size one)."""
        if not isinstance(node.meta.get("val"), Tensor):
            return None
        (local,) = shapes_of(node)
        if len(local) != len(operation.shape):
            return None
        smaller = [dim for dim, size in enumerate(local) if size != operation.shape[dim]]
        return Shard(smaller[0]) if len(smaller) == 1 else None

    def _agrees(self, operation: Operation, wanted: tuple[Placement, ...], found: tuple[Placement, ...]) -> bool:
        for slot, (want, have) in enumerate(zip(wanted, found, strict=True)):
            if not operation.operands[slot].differentiable:
                want, have = without_gradient(want), without_gradient(have)
            if want != have:
                return False
        return True

    def _form_fits(self, option: Option, form: str, node: Node, operation: Operation) -> bool:
        return option.form == form and (form in _FORM_OF.values() or node.target == operation.node.target)

    def _place_core(self, node: Node) -> Placement:
        """A product whose bias comes after the sum."""
        operation = self.facts.operation(self.by_name[node.meta["autoplan_core"]])
        rule = rule_of(operation.node)
        found = tuple(self.states[child] for child in tensor_operands(node))
        if isinstance(rule, FactorRule):
            additive = rule.additive_slots(operation)
            slots = [slot for slot in range(len(operation.operands)) if slot not in additive]
            for option in self._late_options(rule, operation, slots, found):
                if tuple(option.inputs[slot] for slot in slots) == found:
                    return PARTIAL
        raise self._objection(node, "one of its options")

    def _place_late(self, node: Node) -> Placement:
        """The bias added to the sum over ranks: whole to whole, or to a share that every rank has part of its gradient
        from."""
        total, bias = self._state(node, 0), self._state(node, 1)
        if not isinstance(total, Shard):
            return self._place_inserted(node)
        operation = self.facts.operation(self.by_name[node.name])
        along_bias = total.dim == len(operation.shape) - 1
        added = tensor_operands(node)[1]
        summed = isinstance(bias, Copied) or (isinstance(bias, Replicate) and not self.gradient[added])
        if along_bias or not summed:
            raise self._objection(node, f"a bias whose gradient is summed, beside {total}")
        return total

    def _late_options(
        self, rule: Rule, operation: Operation, slots: list[int], found: tuple[Placement, ...]
    ) -> Iterator[Option]:
        for slot, state in zip(slots, found, strict=False):
            if isinstance(state, Shard):
                yield from (o for o in rule.options(operation, slot, state) if o.form == "add_after_reduce")

    def _place_inserted(self, node: Node) -> Placement:
        """Whatever else was put in works on whole values."""
        if any(self.states[child] != REPLICATE for child in tensor_operands(node)):
            raise self._objection(node, "whole values")
        return REPLICATE

    # ------------------------------------------------------------------------------------------------ checks

    def _check_results(self, node: Node) -> None:
        for child in node.all_input_nodes:
            state = self.states[child]
            if (without_gradient(state) if not self.gradient[child] else state) != REPLICATE:
                raise self._objection(child, "R, as a result of the graph", placed=state)

    def _check_literals(self, node: Node, operation: Operation, option: Option) -> None:
        """Run a split operator whose sizes stand in the graph on shapes alone."""
        rule = rule_of(operation.node)
        if node.target in _FORM_OF or rule is None or not option.split or not rule.local_arguments(operation, option):
            return
        wanted = tuple(share(shape, option.output, self.degree) for shape in operation.shapes)
        if problem := literals_problem(node, wanted):
            raise self._objection(node, problem)

    def _objection(self, node: Node, wanted: str, *, placed: Placement | None = None) -> AutoplanError:
        found = str(placed) if placed else ", ".join(str(self.states[child]) for child in tensor_operands(node))
        return misread(node, self.by_name, found, wanted, axis="tensor")
