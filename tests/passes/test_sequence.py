"""Sequence parallelism: the rewritten program equals one process, and no collective of it can be left out."""

from __future__ import annotations

import functools

import pytest
import torch

from autoplan.errors import AutoplanError
from autoplan.passes import operators
from autoplan.passes.lint import check_placements
from autoplan.sharding import Copied, Replicate
from tests.passes.test_lint import COLLECTIVES
from tests.passes.test_shard_tensors import MODELS, TOLERANCE
from tests.support import models, sharded
from tests.support.broken import calls, copied, each_dropped

DEFAULT = ("nanoGPT, tied", "GPT-2", "Llama, grouped queries", "T5")
SEQUENCES = (*DEFAULT, "manual attention", "nn.TransformerEncoder", "BERT")
SMALL: dict[str, sharded.Builder] = {
    "GPT-2": lambda: models.tiny_gpt2(samples=2, layers=1),
    "Llama": lambda: models.tiny_llama(samples=2, layers=1),
}


@functools.cache
def traced(name: str) -> sharded.Traced:
    return sharded.trace(MODELS[name])


@functools.cache
def small(name: str) -> sharded.Traced:
    return sharded.trace(SMALL[name])


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        pytest.param(name, degree, marks=[] if name in DEFAULT and degree == 2 else [pytest.mark.wide])
        for name in SEQUENCES
        for degree in (2, 4)
    ],
)
def test_every_gradient_is_that_of_one_process(name: str, degree: int) -> None:
    model = traced(name)
    sharding, graph = sharded.shard(model, degree, sequence=True)
    assert sharding.shares
    ran = sharded.run(model, graph)
    for loss in ran.losses:
        torch.testing.assert_close(loss, model.loss, rtol=TOLERANCE, atol=0)
    assert set(ran.gradients) == {name for name in graph.parameters if name in model.gradients}
    assert sharded.worst_error(ran.gradients, model.gradients) < TOLERANCE


def test_the_program_has_no_collective_of_whole_activations_but_gathers_and_scattered_sums() -> None:
    model = traced("GPT-2")
    _, graph = sharded.shard(model, 2, sequence=True)
    ran = sharded.run(model, graph)
    # Two blocks of two pairs, the head's gather and the embeddings' scattered sum, the small table of positions, which
    # is split by features; the loss' three numbers a row.
    assert ran.forward == {"all_gather": 2 * 2 + 1 + 1, "reduce_scatter": 2 * 2 + 1, "all_reduce": 2}
    backward = ran.total - ran.forward
    assert backward == {"reduce_scatter": 2 * 2 + 1, "all_gather": 2 * 2 + 1 + 1}


@pytest.mark.parametrize("name", SMALL)
def test_losing_any_one_collective_is_caught(name: str) -> None:
    model = small(name)
    _, graph = sharded.shard(model, 2, sequence=True)
    functions = {node.target for node in calls(graph.graph_module, *COLLECTIVES)}
    assert {operators.gather_for_axis, operators.scatter_sum_to_axis} <= functions
    for broken in each_dropped(graph.graph_module, *COLLECTIVES):
        with pytest.raises(AutoplanError):
            check_placements(broken, model.capture.graph_module, graph.parameters, degree=2)


@pytest.mark.parametrize("name", SMALL)
def test_a_norm_or_late_bias_whose_gradient_nobody_sums_is_caught(name: str) -> None:
    model = small(name)
    _, graph = sharded.shard(model, 2, sequence=True)
    summands = [name for name, placement in graph.parameters.items() if placement == Copied()]
    assert summands
    for parameter in summands:
        forgotten = {**graph.parameters, parameter: Replicate()}
        with pytest.raises(AutoplanError):
            check_placements(graph.graph_module, model.capture.graph_module, forgotten, degree=2)


def test_a_gather_whose_gradient_is_not_summed_is_caught() -> None:
    model = small("GPT-2")
    _, graph = sharded.shard(model, 2, sequence=True)
    broken = copied(graph.graph_module)
    victim = next(node for node in calls(broken, *COLLECTIVES) if node.target is operators.gather_for_axis)
    victim.target = operators.gather_from_axis
    with pytest.raises(AutoplanError):
        check_placements(broken, model.capture.graph_module, graph.parameters, degree=2)


def test_a_scattered_sum_that_only_slices_is_caught() -> None:
    model = small("GPT-2")
    _, graph = sharded.shard(model, 2, sequence=True)
    broken = copied(graph.graph_module)
    victim = next(node for node in calls(broken, *COLLECTIVES) if node.target is operators.scatter_sum_to_axis)
    victim.target = operators.slice_for_axis
    with pytest.raises(AutoplanError):
        check_placements(broken, model.capture.graph_module, graph.parameters, degree=2)
