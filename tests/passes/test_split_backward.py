"""Backwards in two parts: inputs' gradients first, weights' later, the same numbers and nothing twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.flop_counter import FlopCounterMode

from autoplan.capture import Capture, gather_inputs
from autoplan.passes.recompute import recompute
from autoplan.passes.split_backward import SplitStage, split_backward
from autoplan.passes.split_stages import StageGraph, split_stages
from autoplan.passes.weight_gradients import WeightGradients, putting_aside
from autoplan.verification.precision import float64_throughout
from tests.support import models
from tests.support.training import capture_double


def whole_stage(captured: Capture) -> StageGraph:
    """The whole graph as one stage."""
    (stage,) = split_stages(captured.graph_module, {})
    return stage


def blocks_of(stage: StageGraph) -> list[list[str]]:
    """The operators in three runs, each to be recomputed."""
    names = [node.name for node in stage.graph_module.graph.nodes if node.op == "call_function"]
    third = len(names) // 3
    return [names[:third], names[third : 2 * third], names[2 * third :]]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def run_whole(stage: StageGraph, inputs: list[Tensor]) -> dict[str, Tensor]:
    stage.graph_module.zero_grad()
    *_, loss = stage.graph_module(*inputs)
    loss.backward()
    return gradients(stage.graph_module)


def run_in_parts(stage: StageGraph, inputs: list[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients after the first part and after both."""
    stage.graph_module.zero_grad()
    aside = WeightGradients()
    with putting_aside(aside):
        *_, loss = stage.graph_module(*inputs)
    loss.backward()
    first = gradients(stage.graph_module)
    aside.compute()
    assert not aside.parts
    return first, gradients(stage.graph_module)


@pytest.fixture(params=["tiny_gpt2", "tiny_llama"], scope="module")
def captured(request: pytest.FixtureRequest) -> Any:
    with float64_throughout():
        _, batch, found = capture_double(*getattr(models, request.param)())
        stage = whole_stage(found)
        tensors = dict(zip([spec.placeholder for spec in found.inputs], gather_inputs(found, batch), strict=True))
        yield stage, [tensors[name] for name in stage.batch_inputs]


@pytest.mark.parametrize("saver", [lambda stage: stage, lambda stage: recompute(stage, blocks_of(stage))])
def test_both_parts_are_the_whole_backward(captured: Any, saver: Callable[[StageGraph], StageGraph]) -> None:
    stage, inputs = captured
    expected = run_whole(stage, inputs)
    split = split_backward(stage)
    first, both = run_in_parts(saver(split.stage), inputs)
    assert set(both) == set(expected)
    for name, gradient in expected.items():
        assert torch.allclose(both[name], gradient, rtol=1e-12, atol=1e-14), name
    _assert_parts(split, first, both)


def _assert_parts(split: SplitStage, first: dict[str, Tensor], both: dict[str, Tensor]) -> None:
    """Names are by object: a tied table has one of its names' gradients."""
    objects = {name: id(p) for name, p in split.stage.graph_module.named_parameters(remove_duplicate=False)}
    in_first, in_second = ({objects[name] for name in names} for names in (split.first, split.second))
    assert {objects[name] for name in first} == in_first
    assert {objects[name] for name in both} == in_first | in_second
    assert in_second - in_first  # something is left for later


def test_nothing_is_computed_twice(captured: Any) -> None:
    stage, inputs = captured
    recomputed = recompute(stage, blocks_of(stage))
    split = recompute(split_backward(stage).stage, blocks_of(stage))
    assert _flops(lambda: run_in_parts(split, inputs)) == _flops(lambda: run_whole(recomputed, inputs))


def _flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counted:
        run()
    return counted.get_total_flops()


def test_a_gradient_that_arrives_late_fires_its_hook_once() -> None:
    module, x = nn.Linear(3, 2).double(), torch.ones(4, 3, dtype=torch.float64)
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: fired.append(n))
    split = split_backward(_stage_of(module, times=2))
    aside = WeightGradients()
    with putting_aside(aside):
        (result,) = split.stage.graph_module(x)
    result.sum().backward()
    assert fired == ["bias"] and module.weight.grad is None
    aside.compute()
    assert fired == ["bias", "weight"]


def _stage_of(module: nn.Module, *, times: int) -> StageGraph:
    """``x -> linear(x) + linear(x)``, read from one parameter."""
    graph = torch.fx.Graph()
    x, weight, bias = graph.placeholder("x"), graph.get_attr("weight"), graph.get_attr("bias")
    terms = [graph.call_function(torch.ops.aten.linear.default, (x, weight, bias)) for _ in range(times)]
    total = terms[0]
    for term in terms[1:]:
        total = graph.call_function(torch.ops.aten.add.Tensor, (total, term))
    graph.output((total,))
    return StageGraph(
        index=0,
        graph_module=GraphModule(module, graph),
        batch_inputs=("x",),
        receives=(),
        sends=(),
        returns_loss=True,
        parameters=("weight", "bias"),
        shared_parameters=(),
        buffers=(),
        mutated_buffers=(),
    )


def test_a_frozen_weight_has_no_second_part() -> None:
    module = nn.Linear(3, 2)
    module.weight.requires_grad_(False)
    split = split_backward(_stage_of(copy.deepcopy(module), times=1))
    assert split.first == {"bias"} and not split.second
