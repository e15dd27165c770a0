"""A graph on the context axis in which one conversion is missing, or one layout or size is wrong, never passes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx import GraphModule, Node

from autoplan.capture import capture
from autoplan.errors import AutoplanError
from autoplan.passes import context_operators as on
from autoplan.passes.context_parallel import context_parallel
from autoplan.passes.lint_context import check_positions
from autoplan.passes.weight_loss import weight_loss
from autoplan.sharding import Partial, Shard
from tests.support import models
from tests.support.broken import calls, copied, each_dropped

CONVERSIONS = (on.own_positions, on.all_positions, on.sum_over_axis, on.share_of)
MODELS = {
    "nanoGPT": lambda: models.nano_gpt(samples=2, layers=1),
    "GPT-2": lambda: models.tiny_gpt2(samples=2, layers=1),
    "Llama": lambda: models.tiny_llama(samples=2, layers=1),
    "T5": lambda: models.tiny_t5(samples=2, layers=1),
}


@functools.cache
def dealt(name: str, degree: int) -> tuple[GraphModule, GraphModule]:
    """The graph as it was, and on the axis."""
    captured = capture(*MODELS[name]())
    original = weight_loss(captured).graph_module
    return original, context_parallel(original, captured.inputs, degree=degree, layer_of={}).graph_module


@pytest.mark.parametrize(("name", "degree"), [*((name, 2) for name in MODELS), ("Llama", 4)])
def test_dropping_any_one_conversion_is_caught(name: str, degree: int) -> None:
    original, rewritten = dealt(name, degree)
    found = list(each_dropped(rewritten, *CONVERSIONS))
    assert found
    for broken in found:
        with pytest.raises(AutoplanError, match="would compute other numbers"):
            check_positions(broken, original, degree=degree)


@pytest.mark.parametrize("name", ["nanoGPT", "Llama"])
def test_attention_to_a_ranks_own_keys_alone_is_caught(name: str) -> None:
    original, rewritten = dealt(name, 2)
    broken = copied(rewritten)
    (attention,) = calls(broken, on.positions_attention)
    attention.target = torch.ops.aten.scaled_dot_product_attention.default
    attention.args = (*attention.args[:3], None, 0.0, True)
    with pytest.raises(AutoplanError, match=r"reads values placed S\(2\), S\(2\), S\(2\)") as caught:
        check_positions(broken, original, degree=2)
    assert "context=1" in caught.value.attempt


def test_positions_along_another_dimension_are_caught() -> None:
    original, rewritten = dealt("Llama", 2)
    for index, found in enumerate(calls(rewritten, on.own_positions)):
        (_, axis, dim, *layout) = found.args
        if len(found.meta["val"].shape) < 2:
            continue
        broken = copied(rewritten)
        victim = calls(broken, on.own_positions)[index]
        victim.args = (victim.args[0], axis, 0 if dim else 1, *layout)
        with pytest.raises(AutoplanError):
            check_positions(broken, original, degree=2)


def test_a_size_that_is_not_local_is_caught() -> None:
    original, rewritten = dealt("nanoGPT", 2)
    sized = {torch.ops.aten.view.default, torch.ops.aten.reshape.default}
    local = [n for n in rewritten.graph.nodes if n.target in sized and models.SEQUENCE // 2 in n.args[1]]
    assert local
    for node in local:
        broken = copied(rewritten)
        victim = next(n for n in broken.graph.nodes if n.name == node.name)
        sizes = victim.args[1]
        assert isinstance(sizes, (list, tuple))
        victim.update_arg(1, [models.SEQUENCE if size == models.SEQUENCE // 2 else size for size in sizes])
        with pytest.raises(AutoplanError):
            check_positions(broken, original, degree=2)


def test_a_whole_result_is_caught() -> None:
    """Every rank would add the same loss, and the sum over the axis would be too large."""
    original, rewritten = dealt("nanoGPT", 2)
    broken = copied(rewritten)
    output = next(node for node in broken.graph.nodes if node.op == "output")
    loss = output.all_input_nodes[0]
    with broken.graph.inserting_before(output):
        total = broken.graph.call_function(on.sum_over_axis, (loss, "context"))
    total.meta = dict(loss.meta)
    output.replace_input_with(loss, total)
    with pytest.raises(AutoplanError, match="P, as a result of the graph"):
        check_positions(broken, original, degree=2)


def test_every_value_has_a_placement() -> None:
    original, rewritten = dealt("Llama", 2)
    placed = check_positions(rewritten, original, degree=2)
    nodes: list[Node] = [node for node in rewritten.graph.nodes if node.op != "output"]
    assert set(placed) == {node.name for node in nodes}
    logits = next(node for node in reversed(nodes) if "linear" in node.name)
    assert placed[logits.name] == Shard(1)
    assert isinstance(placed[next(n for n in reversed(nodes)).name], Partial)
