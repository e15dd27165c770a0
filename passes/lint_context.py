"""Follow positions through a graph that is written on the context axis, and refuse it where a value is read as what it
is not.

The linter knows nothing of how the graph was written. Every source is whole, so it derives the placement of every value
by what operators make of their operands (:mod:`autoplan.passes.context_rules`), and checks:

- an operator's operands are placed as one of its options says: positions never meet whole sequences or positions dealt
  out otherwise, a summand is never read as a whole, and keys and values are gathered;
- what converts gets what it converts;
- local shapes are those of the placements, and operators with sizes among their arguments give them;
- the graph's results are summands, which is what is added up over the axis.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from autoplan.errors import AutoplanError
from autoplan.passes import context_operators, context_rules
from autoplan.passes.context_rules import can_be_dealt, is_whole
from autoplan.passes.misread import literals_problem, misread, shapes_of, share, tensor_operands
from autoplan.passes.rewriting import layout, shard_of
from autoplan.sharding.operation import GraphFacts, Operation
from autoplan.sharding.placements import PARTIAL, Partial, Placement, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import Option

_CONVERSIONS = (
    context_operators.own_positions,
    context_operators.all_positions,
    context_operators.sum_over_axis,
    context_operators.share_of,
)


def check_positions(rewritten: GraphModule, original: GraphModule, *, degree: int) -> dict[str, Placement]:
    """The placement of every value of ``rewritten`` over ``degree`` ranks, by name.

    ``original``: the graph before the axis was written into it; it lends whole shapes and unsplit literals. Raises
    AutoplanError at the first wrong read.
    """
    return _Linter(rewritten, original, degree).run()


class _Linter:
    def __init__(self, rewritten: GraphModule, original: GraphModule, degree: int) -> None:
        self.rewritten, self.degree = rewritten, degree
        self.dealt = GraphFacts(original, 2 * degree)  # in two pieces a rank
        self.local = self.dealt.at(degree)
        self.by_name = {node.name: node for node in original.graph.nodes}
        self.states: dict[Node, Placement] = {}

    def run(self) -> dict[str, Placement]:
        for node in self.rewritten.graph.nodes:
            if node.op == "output":
                self._check_results(node)
                continue
            self.states[node] = self._place(node)
            self._check_shapes(node)
        return {node.name: state for node, state in self.states.items()}

    def _place(self, node: Node) -> Placement:
        if node.op == "call_function" and node.target in _CONVERSIONS:
            return self._convert(node)
        original = self.by_name.get(node.name)
        if original is None:
            return self._place_inserted(node)
        if node.op != "call_function":
            return self._whole(original)
        return self._place_operator(node, original)

    def _whole(self, original: Node) -> Placement:
        return context_rules.whole(self.dealt.differentiable[original])

    def _convert(self, node: Node) -> Placement:
        value = node.args[0]
        assert isinstance(value, Node)
        state, arguments = self.states[value], tuple(node.args[2:])
        match node.target:
            case context_operators.own_positions if is_whole(state):
                found = shard_of(arguments)
                if all(can_be_dealt(shape, found, self.degree) for shape in shapes_of(value)):
                    return found
            case context_operators.all_positions if isinstance(state, Shard) and layout(state) == arguments:
                return context_rules.whole(True)
            case context_operators.sum_over_axis if isinstance(state, Partial):
                return context_rules.whole(True)
            case context_operators.share_of if is_whole(state):
                return PARTIAL
        raise self._objection(node, "what it converts")

    def _place_inserted(self, node: Node) -> Placement:
        """Whatever else was put in is a size."""
        if tensor_operands(node):
            raise self._objection(node, "no values of the batch")
        return context_rules.whole(False)

    def _place_operator(self, node: Node, original: Node) -> Placement:
        operation = self.dealt.operation(original)
        operands = tensor_operands(node)
        if len(operands) != len(operation.operands):
            raise self._objection(node, "the operands of the original")
        found = [self.states[child] for child in operands]
        for option in self._options(operation, original, found):
            if self._agrees(node, option, found, original):
                self._check_literals(node, original, option)
                return option.output
        raise self._objection(node, "one of its options")

    def _options(self, operation: Operation, original: Node, found: list[Placement]) -> Iterator[Option]:
        for slot, state in enumerate(found):
            if isinstance(state, Shard):
                yield from context_rules.options(operation, slot, state)
        summands = [isinstance(state, Partial) for state in found]
        if any(summands):
            option = context_rules.options_of_summands(operation, summands)
            if option is not None:
                yield option
        yield Option(
            tuple(context_rules.whole(operand.differentiable) for operand in operation.operands), self._whole(original)
        )

    def _agrees(self, node: Node, option: Option, found: list[Placement], original: Node) -> bool:
        form = "positions_attention" if node.target is context_operators.positions_attention else "plain"
        if option.form != form or (form == "plain" and node.target != original.target):
            return False
        if isinstance(option.output, Shard) and not self._divides(original, option.output):
            return False
        pairs = zip(found, option.inputs, strict=True)
        return all(have == want or (is_whole(have) and is_whole(want)) for have, want in pairs)

    def _divides(self, original: Node, state: Shard) -> bool:
        return all(can_be_dealt(shape, state, self.degree) for shape in self.dealt.shapes[original])

    # ------------------------------------------------------------------------------------------------ checks

    def _check_results(self, node: Node) -> None:
        for child in node.all_input_nodes:
            if not isinstance(self.states[child], Partial):
                raise self._objection(child, "P, as a result of the graph", placed=self.states[child])

    def _check_shapes(self, node: Node) -> None:
        original = self.by_name.get(node.name)
        if original is None or node.op != "call_function":
            return
        local = shapes_of(node)
        wanted = tuple(share(shape, self.states[node], self.degree) for shape in self.dealt.shapes[original])
        if len(local) == len(wanted) and local != wanted:
            raise self._objection(node, f"a local shape of {wanted}, not {local}")

    def _check_literals(self, node: Node, original: Node, option: Option) -> None:
        """Run an operator whose sizes stand in the graph on shapes alone."""
        rule, operation = rule_of(original), self.local.operation(original)
        if option.form != "plain" or rule is None or not option.split or not rule.local_arguments(operation, option):
            return
        wanted = tuple(share(shape, option.output, self.degree) for shape in operation.shapes)
        if problem := literals_problem(node, wanted):
            raise self._objection(node, problem)

    def _objection(self, node: Node, wanted: str, *, placed: Placement | None = None) -> AutoplanError:
        found = str(placed) if placed else ", ".join(str(self.states[child]) for child in tensor_operands(node))
        return misread(node, self.by_name, found, wanted, axis="context")
