"""A graph on the expert axis in which rows miss an exchange, or meet another layer's experts, never passes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx import GraphModule, Node

from autoplan.capture import capture
from autoplan.errors import AutoplanError
from autoplan.passes import expert_operators as on
from autoplan.passes.expert_parallel import expert_parallel
from autoplan.passes.lint_experts import PRODUCTS, check_experts
from autoplan.sharding.operation import operator_key
from tests.support.broken import calls, copied, each_dropped
from tests.zoo.families import FAMILIES

MOE = ["Mixtral", "Qwen3-MoE", "DeepSeek-V3"]


@functools.cache
def spread(name: str) -> tuple[GraphModule, GraphModule, frozenset[str]]:
    model, batch, _ = next(entry for entry in FAMILIES if entry.name == name).build()
    original = capture(model, batch).graph_module
    found = expert_parallel(original, degree=2)
    return original, found.graph_module, found.parameters


def refused(name: str, broken: GraphModule, match: str = "would compute other numbers") -> None:
    original, _, parameters = spread(name)
    with pytest.raises(AutoplanError, match=match) as caught:
        check_experts(broken, original, parameters, degree=2)
    assert "expert=1" in caught.value.attempt


@pytest.mark.parametrize("name", MOE)
def test_dropping_any_one_exchange_is_caught(name: str) -> None:
    _, rewritten, _ = spread(name)
    found = list(each_dropped(rewritten, on.dispatch_rows, on.combine_rows))
    assert len(found) >= 2
    for broken in found:
        refused(name, broken)


@pytest.mark.parametrize("name", MOE)
def test_weights_that_are_whole_are_caught(name: str) -> None:
    original, rewritten, parameters = spread(name)
    for whole in parameters:
        with pytest.raises(AutoplanError, match="rows that were sent here, weights and offsets"):
            check_experts(rewritten, original, parameters - {whole}, degree=2)


def products(graph_module: GraphModule) -> list[Node]:
    return [n for n in graph_module.graph.nodes if n.op == "call_function" and operator_key(n.target) in PRODUCTS]


def test_offsets_of_all_experts_are_caught() -> None:
    original, rewritten, _ = spread("Mixtral")
    for index, product in enumerate(products(original)):
        broken = copied(rewritten)
        every = next(n for n in broken.graph.nodes if n.name == product.args[2].name)
        products(broken)[index].update_arg(2, every)
        refused("Mixtral", broken, "rows that were sent here")


def test_the_route_of_another_layer_is_caught() -> None:
    _, rewritten, _ = spread("Mixtral")
    assert len(calls(rewritten, on.route_rows)) > 1
    broken = copied(rewritten)
    first = calls(broken, on.combine_rows)[0].args[1]
    calls(broken, on.combine_rows)[-1].update_arg(1, first)
    refused("Mixtral", broken, "the route by which they came")


def test_what_mixes_rows_that_were_sent_is_caught() -> None:
    _, rewritten, _ = spread("Mixtral")
    broken = copied(rewritten)
    back = calls(broken, on.combine_rows)[0]
    rows = back.args[0]
    assert isinstance(rows, Node)
    with broken.graph.inserting_before(back):
        mixed = broken.graph.call_function(torch.ops.aten.flip.default, (rows, [0]))
    mixed.meta = dict(rows.meta)
    back.update_arg(0, mixed)
    refused("Mixtral", broken, "a rank's own values")


def test_rows_that_never_come_back_are_caught() -> None:
    _, rewritten, _ = spread("Mixtral")
    broken = copied(rewritten)
    output = next(node for node in broken.graph.nodes if node.op == "output")
    output.args = ((output.args[0], calls(broken, on.dispatch_rows)[0]),)
    refused("Mixtral", broken, "a rank's own values")
