"""Rules: a line says what splits, what sums and what stays whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from autoplan.errors import AutoplanError
from autoplan.sharding import register_rule
from autoplan.sharding.operation import GraphFacts, Operation
from autoplan.sharding.placements import COPIED, PARTIAL, REPLICATE, Shard
from autoplan.sharding.registry import rule_of
from autoplan.sharding.rules import RESULT, FactorRule, Option


def operation(function: object, *tensors: Tensor, degree: int = 2) -> Operation:
    """The last operator of the trace of ``function`` on parameters like ``tensors``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index, tensor in enumerate(tensors):
                value = nn.Parameter(tensor) if tensor.is_floating_point() else tensor
                setattr(self, f"p{index}", value)

        def forward(self, x: Tensor) -> Tensor:
            return function(*(getattr(self, f"p{index}") for index in range(len(tensors))))

    graph: GraphModule = torch.export.export(Model(), (torch.ones(1),)).module()
    facts = GraphFacts(graph, degree)
    last = [node for node in graph.graph.nodes if node.op == "call_function" and facts.operation(node).operands][-1]
    return facts.operation(last)


def options(view: Operation, slot: int, state: Shard) -> list[Option]:
    rule = rule_of(view.node)
    assert rule is not None
    return list(rule.options(view, slot, state))


def test_linear_splits_rows_columns_and_sums_over_the_shared_dimension() -> None:
    view = operation(torch.nn.functional.linear, torch.ones(2, 3, 8), torch.ones(4, 8))
    (column,) = options(view, 1, Shard(0))  # o: x lacks it, so x's gradient sums
    assert column == Option((COPIED, Shard(0)), Shard(2), gemm="n")
    (row,) = options(view, 0, Shard(2))  # i: contracted, so the result sums
    assert row == Option((Shard(2), Shard(1)), PARTIAL, gemm="k")


def test_a_bias_is_added_after_the_sum() -> None:
    view = operation(torch.nn.functional.linear, torch.ones(2, 8), torch.ones(4, 8), torch.ones(4))
    (row,) = options(view, 1, Shard(1))
    assert row == Option((Shard(1), Shard(1), REPLICATE), REPLICATE, "add_after_reduce", "k")


def test_element_wise_operators_broadcast() -> None:
    view = operation(torch.mul, torch.ones(2, 3, 8), torch.ones(3, 1))
    assert options(view, RESULT, Shard(2)) == [Option((Shard(2), COPIED), Shard(2))]
    assert options(view, 1, Shard(0)) == [Option((Shard(1), Shard(0)), Shard(1))]


def test_a_normalised_dimension_stays_whole() -> None:
    norm = operation(lambda x, w: torch.nn.functional.layer_norm(x, (8,), w), torch.ones(2, 4, 8), torch.ones(8))
    assert options(norm, 0, Shard(2)) == []
    assert options(norm, 0, Shard(1)) == [Option((Shard(1), COPIED), Shard(1), gemm="m")]
    softmax = operation(lambda x: x.softmax(-1), torch.ones(2, 4, 8))
    assert options(softmax, 0, Shard(2)) == []


def test_attention_splits_by_heads_only() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    grouped = operation(attend, torch.ones(2, 8, 5, 4), torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4))
    assert options(grouped, 0, Shard(1)) == [Option((Shard(1),) * 3, Shard(1), gemm="heads")]
    assert options(grouped, 0, Shard(3)) == []
    few = operation(attend, torch.ones(2, 8, 5, 4), torch.ones(2, 2, 5, 4), torch.ones(2, 2, 5, 4), degree=4)
    assert options(few, 0, Shard(1)) == [Option((Shard(1), COPIED, COPIED), Shard(1), "expand_heads", "heads")]


def test_an_embedding_split_over_rows_gives_summands() -> None:
    view = operation(torch.nn.functional.embedding, torch.zeros(2, 3, dtype=torch.long), torch.ones(10, 8))
    (rows,) = options(view, 0, Shard(0))
    assert rows.form == "vocabulary_embedding" and rows.output == PARTIAL
    (columns,) = options(view, 0, Shard(1))
    assert columns.form == "plain" and columns.output == Shard(2)


def test_splitting_a_packed_dimension_wants_it_cut_in_parts() -> None:
    view = operation(lambda x: x.split(4, dim=1), torch.ones(2, 12))
    item = view.operands[0].node
    facts = GraphFacts(item.graph.owning_module, 2)
    (option,) = options(facts.operation(item), RESULT, Shard(1))
    assert option.inputs == (Shard(1, parts=(4, 4, 4)),)


def test_a_user_rule_is_one_line() -> None:
    torch.library.define("autoplan_test::scale", "(Tensor x, Tensor w) -> Tensor")
    torch.library.impl("autoplan_test::scale", "CompositeExplicitAutograd", lambda x, w: x * w)
    torch.library.register_fake("autoplan_test::scale", lambda x, w: torch.empty_like(x))
    view = operation(torch.ops.autoplan_test.scale, torch.ones(2, 8), torch.ones(8))
    assert rule_of(view.node) is None
    register_rule("autoplan_test.scale: x[*b, c], w[c] -> y[*b, c]")
    assert options(view, 1, Shard(0)) == [Option((Shard(1), Shard(0)), Shard(1), gemm="groups")]


@pytest.mark.parametrize("line", ["scale x[c] -> y[c]", "scale: x[c]", "scale: x(c) -> y[c]", ": x[c] -> y[c]"])
def test_a_line_that_is_no_rule_is_refused(line: str) -> None:
    with pytest.raises(AutoplanError) as caught:
        register_rule(line)
    assert caught.value.where == line


def test_rules_print_as_they_were_written() -> None:
    rule = rule_of(operation(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).node)
    assert isinstance(rule, FactorRule)
    assert rule.line == "mm: a[m, k], b[k, n] -> y[m, n]"
    assert isinstance(operation(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).node, Node)
