"""split_stages: where values are computed, what crosses, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from autoplan.capture import Capture, capture
from autoplan.errors import AutoplanError
from autoplan.passes.split_stages import StageGraph, split_stages
from tests.support import models


class Skip(nn.Module):
    """Layer a's output is read by b and, past it, by d."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first)) + first).sum()


def calls(captured: Capture) -> list[str]:
    return [node.name for node in captured.graph_module.graph.nodes if node.op == "call_function"]


def cut_after(captured: Capture, *last: str) -> tuple[StageGraph, ...]:
    """Stages that end with the operators named, in the order of the graph."""
    stage, stages = 0, {}
    for name in calls(captured):
        stages[name] = stage
        stage += name in last
    assert stage == len(last)
    return split_stages(captured.graph_module, stages)


def run(stages: tuple[StageGraph, ...], batch: dict[str, Tensor]) -> Tensor:
    """All stages in turn, in one process."""
    values: dict[str, Tensor] = {}
    for stage in stages:
        inputs = [batch[name] for name in stage.batch_inputs] + [values[value.name] for value in stage.receives]
        outputs = stage.graph_module(*inputs)
        values |= {value.name: output for value, output in zip(stage.sends, outputs, strict=False)}
    return outputs[-1]


def sent(stages: tuple[StageGraph, ...]) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {value.name: (value.source, value.destinations) for stage in stages for value in stage.sends}


@functools.cache
def captured_model(name: str) -> tuple[nn.Module, dict[str, Tensor], Capture]:
    model, batch = getattr(models, name)()
    return model, batch, capture(model, batch)


@pytest.mark.parametrize("name", ["nano_gpt", "small_cnn"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_stages_compute_the_whole_wherever_the_graph_is_cut(name: str, data: st.DataObject) -> None:
    model, batch, captured = captured_model(name)
    names = calls(captured)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(names) - 2), min_size=1, max_size=3)))
    stages = cut_after(captured, *(names[cut] for cut in cuts))
    batch = {key: value[:3] for key, value in batch.items()}

    expected = model(**batch)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    found = run(stages, batch)
    assert len(stages) == len(cuts) + 1
    assert torch.equal(found, expected)
    for parameter, found_gradient, gradient in zip(
        model.parameters(), torch.autograd.grad(found, list(model.parameters())), gradients, strict=True
    ):
        assert torch.allclose(found_gradient, gradient, rtol=1e-5, atol=1e-8), parameter.shape


def test_a_skip_value_goes_straight_to_its_reader() -> None:
    captured = capture(Skip(), (torch.randn(2, 4),))
    stages = cut_after(captured, "linear", "linear_1", "linear_2")
    assert sent(stages) == {"linear": (0, (1, 3)), "linear_1": (1, (2,)), "linear_2": (2, (3,))}
    assert [value.name for value in stages[2].receives] == ["linear_1"]


def test_shapes_follow_the_micro_batch() -> None:
    captured = capture(Skip(), (torch.randn(2, 4),))
    (value,) = cut_after(captured, "linear")[0].sends
    assert value.shape(1) == (1, 4)
    assert value.shape(7) == (7, 4)
    assert value.dtype == torch.float32
    assert value.differentiable


class Masked(nn.Module):
    """The mask depends on the batch alone; its size is read off an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = (ids > 0).to(x.dtype)
        hidden = self.a(x) * mask
        hidden = hidden.view(hidden.shape[0] * 2, 2)
        return (self.b(hidden.reshape(hidden.shape[0] // 2, 4)) * mask).sum()


def test_what_depends_on_no_parameter_is_computed_where_it_is_used() -> None:
    batch = {"x": torch.randn(3, 4), "ids": torch.randint(-1, 2, (3, 4))}
    model = Masked()
    captured = capture(model, batch)
    first = next(name for name in calls(captured) if name.startswith("mul"))
    stages = cut_after(captured, first)
    assert sent(stages) == {first: (0, (1,))}  # neither the mask nor a size
    assert stages[0].batch_inputs == ("x", "ids")
    assert "ids" in stages[1].batch_inputs
    assert torch.equal(run(stages, batch), model(**batch))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        return (self.b(self.a(x) * noise) * noise).sum()


def test_random_numbers_are_drawn_once_and_sent() -> None:
    captured = capture(Noisy(), (torch.randn(2, 4),))
    noise = next(name for name in calls(captured) if "rand" in name)
    stages = cut_after(captured, next(name for name in calls(captured) if name.startswith("mul")))
    assert sent(stages)[noise] == (0, (1,))
    assert not next(value for value in stages[0].sends if value.name == noise).differentiable


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        transposed = self.table.weight.t()
        return (self.middle(self.table(ids)) @ transposed).logsumexp(-1).sum()


def test_a_parameter_of_two_stages_is_shared_and_its_views_go_to_their_reader() -> None:
    captured = capture(Tied(), (torch.randint(8, (2, 3)),))
    stages = cut_after(captured, "linear")
    assert [stage.shared_parameters for stage in stages] == [("table.weight",), ("table.weight",)]
    assert sent(stages) == {"linear": (0, (1,))}  # t(), first in the graph, is not sent
    assert stages[0].parameters == ("table.weight", "middle.weight", "middle.bias")


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden += x
        return self.b(hidden.relu_()).sum()


def test_a_write_in_place_onto_a_received_value_writes_onto_a_copy() -> None:
    model, x = InPlace(), torch.randn(2, 4)
    captured = capture(model, (x,))
    stages = cut_after(captured, "linear")
    received = torch.randn(2, 4, requires_grad=True)
    kept = received.detach().clone()
    inputs = [received if name == "linear" else x for name in (*stages[1].batch_inputs, "linear")]
    stages[1].graph_module(*inputs)[-1].backward()
    assert torch.equal(received, kept)
    assert torch.equal(run(stages, {"x": x}), model(x))


class WriteReachesBack(nn.Module):
    """`view` is memory of `hidden`, which is changed between b and c; c reads it through `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        view = hidden.view(-1, 2)
        other = self.b(x) + hidden
        hidden.add_(1.0)
        return self.c(view.reshape(-1, 4) * other).sum()


def test_a_write_that_another_stage_would_have_to_see_is_refused_with_its_line() -> None:
    captured = capture(WriteReachesBack(), (torch.randn(2, 4),))
    write = next(name for name in calls(captured) if name.startswith("add_"))
    with pytest.raises(AutoplanError, match="writes in place") as caught:
        cut_after(captured, "add", write)
    assert "test_split_stages.py" in caught.value.where
    assert "hidden.add_(1.0)" in caught.value.where


def test_values_never_flow_backwards() -> None:
    captured = capture(Skip(), (torch.randn(2, 4),))
    stages = dict.fromkeys(calls(captured), 1) | {"linear_1": 0}
    with pytest.raises(AutoplanError, match=r"`linear` is computed in stage 1 and read by `linear_1` in the earlier"):
        split_stages(captured.graph_module, stages)


def test_statistics_stay_with_the_stage_that_writes_them() -> None:
    model, batch = models.batch_norm_cnn()
    captured = capture(model, batch)
    stages = cut_after(captured, next(name for name in calls(captured) if name.startswith("conv2d_1")))
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(stages[0].mutated_buffers) == statistics
    assert stages[1].mutated_buffers == ()

    reference, _ = models.batch_norm_cnn()
    reference(**batch)
    run(stages, batch)
    for name in statistics:
        assert torch.equal(captured.graph_module.get_buffer(name), reference.get_buffer(name)), name


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.a(x).split(2, dim=-1)
        return (self.b(query) * key + value).sum()


def test_pieces_of_a_split_stay_with_their_producer() -> None:
    captured = capture(Pieces(), (torch.randn(2, 4),))
    stages = cut_after(captured, "split")  # its getitems are mapped to stage 1
    assert sent(stages) == {f"getitem{suffix}": (0, (1,)) for suffix in ("", "_1", "_2")}


def frozen(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "differentiable"), [(lambda: Skip(), True), (lambda: frozen(Skip()), False)], ids=["trained", "frozen"]
)
def test_gradients_come_back_only_for_what_trains(model: Callable[[], nn.Module], differentiable: bool) -> None:
    captured = capture(model(), (torch.randn(2, 4),))
    (value,) = cut_after(captured, "linear")[0].sends
    assert value.differentiable is differentiable


def test_nodes_of_other_passes_go_as_late_as_their_readers_allow() -> None:
    captured = capture(Skip(), (torch.randn(2, 4),))
    graph = captured.graph_module.graph
    linear, reader = (next(n for n in graph.nodes if n.name == name) for name in ("linear", "linear_1"))
    before = calls(captured)
    with graph.inserting_after(linear):
        inserted = graph.call_function(torch.ops.aten.neg.default, (linear,))
        inserted.meta = dict(linear.meta)
    reader.replace_input_with(linear, inserted)
    stages = split_stages(captured.graph_module, {name: int(name != "linear") for name in before})
    assert sent(stages) == {"linear": (0, (1,))}
    assert inserted.name in [node.name for node in stages[1].graph_module.graph.nodes]


def test_the_graph_that_was_split_is_as_before() -> None:
    captured = capture(InPlace(), (torch.randn(2, 4),))
    code = captured.graph_module.code
    cut_after(captured, "linear")
    assert captured.graph_module.code == code


class PythonNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        scale = hidden.abs().max().item()
        return self.b(hidden / scale).sum()


def test_a_python_number_does_not_cross() -> None:
    captured = capture(PythonNumber(), (torch.randn(2, 4),))
    item = next(name for name in calls(captured) if "item" in name)
    with pytest.raises(AutoplanError, match="is no tensor of a size known before"):
        cut_after(captured, item)


def graph_of(module: Any) -> GraphModule:
    return module.graph_module


def test_every_stage_is_python_that_reads_the_users_names() -> None:
    captured = capture(Skip(), (torch.randn(2, 4),))
    first, second = cut_after(captured, "linear_1")
    assert "self.b.weight" in graph_of(first).code
    assert "self.b.weight" not in graph_of(second).code


class Transposed(nn.Module):
    """The trace drops `contiguous`: what it is called on already is, in the layout that attention gives its result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.a(x).view(x.shape[0], 3, 2, 2).transpose(1, 2)
        return self.b(heads.transpose(1, 2).contiguous().view(x.shape[0], 3, 4)).sum()


def test_values_say_how_they_lie_in_memory() -> None:
    captured = capture(Transposed(), (torch.randn(2, 3, 4),))
    stages = cut_after(captured, "transpose")
    (value,) = stages[0].sends
    assert value.shape(2) == (2, 2, 3, 2)
    assert value.order == (0, 2, 1, 3)
