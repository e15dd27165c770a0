"""Follow rows through a graph that is written on the expert axis, and refuse it where rows and experts do not belong
together.

The linter knows nothing of how the graph was written. A rank's own values are ordinary; what is not is derived: the
stacked weights of its experts, a layer's route, the offsets of its experts and the rows that were sent here by that
route. It checks:

- a product grouped by expert gets rows, offsets and weights of one layer, all of this rank's experts or none;
- any other operator on rows that were sent works row by row, and one on stacked weights keeps them stacked;
- rows go back by the route on which they came, and nothing else leaves: not to other operators, not to the results.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from autoplan.errors import AutoplanError
from autoplan.passes import expert_operators
from autoplan.passes.misread import misread, shapes_of, share, tensor_operands
from autoplan.sharding.operation import GraphFacts, operator_key
from autoplan.sharding.placements import COPIED, REPLICATE, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import Option, Rule

PRODUCTS = frozenset(("grouped_mm", "_grouped_mm", "transformers.grouped_mm_fallback"))
EXPERTS = Shard(0)  # of stacked weights, and of rows


@dataclass(frozen=True, slots=True)
class _Ordinary:
    def __str__(self) -> str:
        return "a rank's own"


@dataclass(frozen=True, slots=True)
class _Weights:
    def __str__(self) -> str:
        return "weights of its experts"


@dataclass(frozen=True, slots=True)
class _Of:
    """``what`` of the layer whose rows ``routed`` dealt out."""

    what: str
    routed: Node

    def __str__(self) -> str:
        return f"{self.what} of {self.routed.name}"


_State = _Ordinary | _Weights | _Of
ORDINARY, WEIGHTS = _Ordinary(), _Weights()


def check_experts(rewritten: GraphModule, original: GraphModule, parameters: Collection[str], *, degree: int) -> None:
    """Raises AutoplanError at the first wrong read. ``parameters``: those of which a rank holds its experts' part;
    ``original``: the graph before the axis was written into it."""
    _Linter(rewritten, original, parameters, degree).run()


class _Linter:
    def __init__(self, rewritten: GraphModule, original: GraphModule, parameters: Collection[str], degree: int) -> None:
        self.rewritten, self.parameters, self.degree = rewritten, parameters, degree
        self.facts = GraphFacts(original, degree)
        self.by_name = {node.name: node for node in original.graph.nodes}
        self.states: dict[Node, _State] = {}

    def run(self) -> None:
        for node in self.rewritten.graph.nodes:
            self.states[node] = self._place(node)
            if self.states[node] == WEIGHTS:
                self._check_share(node)

    def _place(self, node: Node) -> _State:
        if node.op == "get_attr":
            return WEIGHTS if str(node.target) in self.parameters else ORDINARY
        found = [self.states[child] for child in node.all_input_nodes]
        if node.op == "call_function":
            if node.target in (expert_operators.route_rows, expert_operators.dispatch_rows):
                return self._send(node, found)
            if node.target is expert_operators.combine_rows:
                return self._bring_back(node, found)
            if node.target is operator.getitem and isinstance(found[0], _Of) and found[0].what == "the exchange":
                return _Of(("the offsets", "the route")[node.args[1]], found[0].routed)  # type: ignore[index]
            if operator_key(node.target) in PRODUCTS:
                return self._multiply(node)
        if all(state == ORDINARY for state in found):
            return ORDINARY
        if node.name not in self.by_name or node.op != "call_function":
            raise self._objection(node, "a rank's own values")
        return self._by_rule(node)

    def _send(self, node: Node, found: list[_State]) -> _State:
        if node.target is expert_operators.route_rows and found == [ORDINARY]:
            return _Of("the exchange", node)
        if node.target is expert_operators.dispatch_rows and len(found) == 2 and found[0] == ORDINARY:
            route = found[1]
            if isinstance(route, _Of) and route.what == "the route":
                return _Of("rows", route.routed)
        raise self._objection(node, "a rank's own values, and the route of a layer")

    def _bring_back(self, node: Node, found: list[_State]) -> _State:
        match found:
            case [_Of("rows", sent), _Of("the route", routed)] if sent is routed:
                return ORDINARY
        raise self._objection(node, "rows, and the route by which they came")

    def _multiply(self, node: Node) -> _State:
        found = [self.states[child] for child in tensor_operands(node)]
        if all(state == ORDINARY for state in found):
            return ORDINARY
        match found:
            case [_Of("rows", sent), _Weights(), _Of("the offsets", routed)] if sent is routed:
                return _Of("rows", sent)
        raise self._objection(node, "rows that were sent here, weights and offsets of their experts")

    def _by_rule(self, node: Node) -> _State:
        """Row by row, or on stacked weights expert by expert."""
        original = self.by_name[node.name]
        operation, rule = self.facts.operation(original), rule_of(original)
        found = [self.states[child] for child in tensor_operands(node)]
        split = [slot for slot, state in enumerate(found) if state != ORDINARY]
        kinds = {found[slot] for slot in split}
        if rule is not None and len(kinds) == 1 and len(found) == len(operation.operands):
            (kind,) = kinds
            legal = kind == WEIGHTS or (isinstance(kind, _Of) and kind.what == "rows")
            for option in rule.options(operation, split[0], EXPERTS) if legal else ():
                if self._keeps(node, rule, option, split):
                    return kind
        raise self._objection(node, "a rank's own values, or rows that it works on one by one")

    def _keeps(self, node: Node, rule: Rule, option: Option, split: list[int]) -> bool:
        operation = self.facts.operation(self.by_name[node.name])
        wanted = [slot for slot, state in enumerate(option.inputs) if state == EXPERTS]
        others = all(state in (EXPERTS, COPIED, REPLICATE) for state in option.inputs)
        alike = node.target == operation.node.target and not rule.local_arguments(operation, option)
        return others and alike and option.output == EXPERTS and wanted == split

    def _check_share(self, node: Node) -> None:
        whole = self.facts.shapes[self.by_name[node.name]] if node.name in self.by_name else ()
        local, wanted = shapes_of(node), tuple(share(shape, EXPERTS, self.degree) for shape in whole)
        if whole and local != wanted:
            raise self._objection(node, f"a local shape of {wanted}, not {local}")

    def _objection(self, node: Node, wanted: str) -> AutoplanError:
        found = ", ".join(str(self.states[child]) for child in node.all_input_nodes)
        return misread(node, self.by_name, found, wanted, axis="expert")
