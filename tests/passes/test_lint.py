"""A graph in which one collective is missing, or one size is wrong, never passes the linter."""

from __future__ import annotations

import functools

import pytest
import torch

from autoplan.errors import AutoplanError
from autoplan.passes import operators
from autoplan.passes.lint import check_placements
from autoplan.sharding import Partial, Replicate, Shard
from tests.support import models, sharded
from tests.support.broken import copied, each_dropped

COLLECTIVES = {
    operators.copy_to_axis,
    operators.reduce_from_axis,
    operators.gather_from_axis,
    operators.gather_for_axis,
    operators.scatter_to_axis,
    operators.scatter_sum_to_axis,
    operators.slice_for_axis,
    operators.expand_heads_to_axis,
}
MODELS: dict[str, sharded.Builder] = {
    "mlp": models.mlp,
    "nanoGPT": lambda: models.nano_gpt(samples=2, layers=1),
    "GPT-2": lambda: models.tiny_gpt2(samples=2, layers=1),
    "Llama": lambda: models.tiny_llama(samples=2, layers=1),
    "T5": lambda: models.tiny_t5(samples=2, layers=1),
}


@functools.cache
def traced(name: str) -> sharded.Traced:
    return sharded.trace(MODELS[name])


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_dropping_any_one_collective_is_caught(name: str, degree: int) -> None:
    model = traced(name)
    _, graph = sharded.shard(model, degree)
    found = list(each_dropped(graph.graph_module, *COLLECTIVES))
    assert found
    for broken in found:
        with pytest.raises(AutoplanError):
            check_placements(broken, model.capture.graph_module, graph.parameters, degree=degree)


@pytest.mark.parametrize("name", ["nanoGPT", "Llama"])
def test_a_parameter_placed_otherwise_is_caught(name: str) -> None:
    model = traced(name)
    _, graph = sharded.shard(model, 2)
    for parameter, placement in graph.parameters.items():
        wrong = Replicate() if isinstance(placement, Shard) else Shard(0)
        with pytest.raises(AutoplanError):
            check_placements(
                graph.graph_module, model.capture.graph_module, {**graph.parameters, parameter: wrong}, degree=2
            )


def test_a_size_that_was_not_made_local_is_caught() -> None:
    model = traced("nanoGPT")
    _, graph = sharded.shard(model, 2)
    broken = copied(graph.graph_module)
    view = next(node for node in broken.graph.nodes if node.target is torch.ops.aten.view.default)
    batch, length, heads, width = view.args[1]
    view.args = (view.args[0], [batch, length, 2 * heads, width // 2])
    with pytest.raises(AutoplanError, match="local"):
        check_placements(broken, model.capture.graph_module, graph.parameters, degree=2)


def test_the_message_names_operator_module_and_line() -> None:
    model = traced("nanoGPT")
    _, graph = sharded.shard(model, 2)
    broken = copied(graph.graph_module)
    victim = next(
        node for node in broken.graph.nodes if node.target is operators.reduce_from_axis and "linear" in node.name
    )
    victim.replace_all_uses_with(victim.args[0])
    broken.graph.erase_node(victim)
    with pytest.raises(AutoplanError) as caught:
        check_placements(broken, model.capture.graph_module, graph.parameters, degree=2)
    assert "placed P" in caught.value.what
    assert "h.0" in caught.value.what
    assert ".py:" in caught.value.where


def test_placements_of_a_right_graph_are_returned() -> None:
    model = traced("nanoGPT")
    _, graph = sharded.shard(model, 2)
    placed = check_placements(graph.graph_module, model.capture.graph_module, graph.parameters, degree=2)
    assert placed["h_0_c_fc_weight"] == Shard(0)
    assert placed["scaled_dot_product_attention"] == Shard(1)
    assert Partial() in placed.values()
