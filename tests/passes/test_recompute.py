"""recompute: the same numbers from fewer saved bytes, each write made once, each random number drawn alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from autoplan.capture import Capture, capture, gather_inputs
from autoplan.cost_models.memory import layer_saved_bytes
from autoplan.errors import StrategyError
from autoplan.layers import LayerGraph, build_layers
from autoplan.passes.recompute import recompute
from autoplan.passes.split_stages import StageGraph, split_stages
from autoplan.runtime.build import layer_policies, recompute_groups
from tests.support import models
from tests.support.plans import hand_plan, with_recompute

Builder = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


def whole(captured: Capture) -> StageGraph:
    """The model as one stage."""
    return split_stages(captured.graph_module, {})[0]


def regions(stage: StageGraph) -> list[list[str]]:
    """The operators of each recomputed graph."""
    return [
        [node.name for node in module.graph.nodes if node.op == "call_function"]
        for name, module in stage.graph_module.named_children()
        if name.startswith("recomputed_") and isinstance(module, GraphModule)
    ]


def train(stage: StageGraph, captured: Capture, batch: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss, gradients, and the bytes that lay saved between forward and backward, parameters aside."""
    parameters = {name: p for name, p in stage.graph_module.named_parameters() if name in stage.parameters}
    weights = {p.untyped_storage().data_ptr() for p in parameters.values()}
    saved: dict[int, Tensor] = {}  # keeps them, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    named = dict(zip((s.placeholder for s in captured.inputs), gather_inputs(captured, batch), strict=True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = stage.graph_module(*(named[name] for name in stage.batch_inputs))[-1]
    loss.backward()
    gradients = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name], parameter.grad = parameter.grad, None
    return loss.detach(), gradients, sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def assert_equal(found: tuple[Tensor, dict[str, Tensor], int], expected: tuple[Tensor, dict[str, Tensor], int]) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@functools.cache
def traced(build: Builder) -> tuple[Capture, LayerGraph, Any]:
    model, batch = build()
    captured = capture(model, batch)
    return captured, build_layers(captured), batch


def planned(build: Builder, *policies: str) -> tuple[StageGraph, float]:
    """The model's only stage under these policies, and the saved bytes that the cost model predicts."""
    captured, layers, _ = traced(build)
    plan = with_recompute(hand_plan(layers, micro_batch_size=models.SAMPLES), *policies)
    predicted = sum(
        layer_saved_bytes(layers.kinds[layer.kind], policy=policy, samples=models.SAMPLES)
        for layer, policy in zip(layers.layers, layer_policies(plan), strict=True)
    )
    return recompute(whole(captured), recompute_groups(plan, layers)), predicted


TRANSFORMERS = [models.nano_gpt, models.tiny_gpt2, models.tiny_llama]


@pytest.mark.parametrize("build", TRANSFORMERS)
def test_full_recompute_keeps_the_bytes_that_the_cost_model_predicts(build: Builder) -> None:
    captured, layers, batch = traced(build)
    none, predicted_none = planned(build, "none")
    full, predicted_full = planned(build, "full")
    assert len(regions(full)) == len(layers.layers)  # each layer in one piece
    expected, found = train(none, captured, batch), train(full, captured, batch)
    assert_equal(found, expected)
    assert expected[2] == pytest.approx(predicted_none, rel=0.01)
    assert found[2] == pytest.approx(predicted_full, rel=0.05)  # and what every layer reads: masks, rotary tables
    assert found[2] < 0.1 * expected[2]


@pytest.mark.parametrize("build", TRANSFORMERS)
def test_selective_recompute_runs_the_attention_core_again_and_nothing_else(build: Builder) -> None:
    captured, _, batch = traced(build)
    selective, predicted = planned(build, "selective")
    assert [len(names) for names in regions(selective)] == [1] * models.LAYERS
    assert all(names[0].startswith("scaled_dot_product_attention") for names in regions(selective))
    none, _ = planned(build, "none")
    expected, found = train(none, captured, batch), train(selective, captured, batch)
    assert_equal(found, expected)
    # Fused attention keeps its output, which the projection after it keeps as well, and one float32 a row and head.
    rows = models.SAMPLES * models.HEADS * models.SEQUENCE
    assert expected[2] - found[2] == models.LAYERS * rows * 4
    assert found[2] == pytest.approx(predicted, rel=0.01)  # the model promises no more than that


class Attention(nn.Module):
    """Written by hand, with dropout: softmax and both products are the core."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        weights = F.dropout(torch.softmax(query @ key.transpose(1, 2) / 32**0.5, dim=-1), 0.2, self.training)
        return x + F.dropout(self.out(weights @ value), 0.1, self.training)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def by_hand() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Transformer().train(), {"x": torch.randn(models.SAMPLES, 64, 32)}


@pytest.mark.parametrize(
    "policies", [("selective",), ("full",), ("none", "full", "selective")], ids=["selective", "full", "mixed"]
)
def test_dropout_is_drawn_again_alike_and_the_generator_moves_on_as_without(policies: tuple[str, ...]) -> None:
    captured, _, batch = traced(by_hand)
    torch.manual_seed(3)
    expected = train(planned(by_hand, "none")[0], captured, batch)
    after = torch.rand(())
    torch.manual_seed(3)
    found = train(planned(by_hand, *policies)[0], captured, batch)
    assert torch.equal(torch.rand(()), after)
    assert_equal(found, expected)
    assert found[2] < expected[2]


def test_selective_recompute_of_attention_by_hand_drops_the_squares_of_the_sequence() -> None:
    captured, _, batch = traced(by_hand)
    expected = train(planned(by_hand, "none")[0], captured, batch)
    found = train(planned(by_hand, "selective")[0], captured, batch)
    # 3 layers keep softmax's result, dropout's result and its mask in float32: at least 3 x 64 x 64 x 4 bytes a sample.
    assert expected[2] - found[2] >= 3 * models.SAMPLES * 3 * 64 * 64 * 4


def test_batch_statistics_are_updated_once() -> None:
    model, batch = models.batch_norm_cnn()
    captured = capture(model, batch)
    stage = whole(captured)
    everything = [node.name for node in stage.graph_module.graph.nodes if node.op == "call_function"]
    before = {name: value.clone() for name, value in captured.graph_module.named_buffers()}
    expected = train(stage, captured, batch)
    once = {name: value.clone() for name, value in captured.graph_module.named_buffers()}
    for name, value in captured.graph_module.named_buffers():
        value.copy_(before[name])
    changed = recompute(whole(captured), [everything])
    assert not any("batch_norm" in name for names in regions(changed) for name in names)
    assert_equal(train(changed, captured, batch), expected)
    for name, value in captured.graph_module.named_buffers():
        assert torch.equal(value, once[name]), name
    assert once["norm.num_batches_tracked"] == 1


class Residual(nn.Module):
    """Two convolutions, each with statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm_a(self.a(x)))
        return torch.relu(x + self.norm_b(self.b(inner)))


class ResidualNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def residual_network() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return ResidualNetwork().train(), {"x": torch.randn(models.SAMPLES, 8, 16, 16)}


def test_full_recompute_around_batch_statistics_is_not_promised_to_free_anything() -> None:
    """Batch norms stay out and cut the group: each keeps its input, and its output as the next piece's input."""
    captured, _, batch = traced(residual_network)
    none, predicted_none = planned(residual_network, "none")
    full, predicted = planned(residual_network, "full")
    expected, found = train(none, captured, batch), train(full, captured, batch)
    images = batch["x"].untyped_storage().nbytes()  # the model's input is nobody's activation
    assert expected[2] - images == pytest.approx(predicted_none, rel=0.01)
    assert found[2] - images == pytest.approx(predicted, rel=0.01)
    assert predicted > predicted_none


class Writes(nn.Module):
    """Writes onto a value that was read before, and is read again after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).mul_(2.0)
        y = x * 3.0
        x = x.add_(1.0)
        return torch.sigmoid(self.b(torch.tanh(x)) + y).sum()


@pytest.mark.parametrize("last", ["linear", "mul_", "mul", "add_", "sigmoid"])
def test_writes_in_place_are_repeated_only_onto_memory_of_the_groups_own(last: str) -> None:
    torch.manual_seed(0)
    model = Writes()
    batch = {"x": torch.randn(3, 4)}
    captured = capture(model, batch)
    names = [node.name for node in captured.graph_module.graph.nodes if node.op == "call_function"]
    cut = names.index(last) + 1
    expected = train(whole(captured), captured, batch)
    found = recompute(whole(captured), [names[:cut], names[cut:]])
    assert regions(found)
    assert_equal(train(found, captured, batch), expected)


class Strangers(nn.Module):
    """Between two lines of the group, strangers: one that the group does not feed, one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        ahead = self.c(x)
        behind = self.d(first)
        second = torch.tanh(self.b(torch.tanh(first)))
        return (second * ahead * behind).sum()


def test_strangers_between_the_nodes_of_a_group_move_out_of_its_way() -> None:
    torch.manual_seed(0)
    model, batch = Strangers(), {"x": torch.randn(3, 4)}
    captured = capture(model, batch)
    expected = train(whole(captured), captured, batch)
    changed = recompute(whole(captured), [["linear", "tanh", "linear_3", "tanh_1"]])
    assert regions(changed) == [["linear", "tanh", "linear_3", "tanh_1"]]
    order = [node.name for node in changed.graph_module.graph.nodes if node.op == "call_function"]
    assert order.index("linear_1") < order.index("recomputed") < order.index("linear_2")
    assert_equal(train(changed, captured, batch), expected)


def test_a_plan_that_leaves_a_layers_policy_open_is_refused() -> None:
    _, layers, _ = traced(models.nano_gpt)
    plan = with_recompute(hand_plan(layers, micro_batch_size=8), "full")
    assert layer_policies(plan) == ("full",) * len(layers.layers)
    with pytest.raises(StrategyError, match="sometimes"):
        layer_policies(with_recompute(plan, "sometimes"))
