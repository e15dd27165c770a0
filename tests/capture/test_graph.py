"""What a Capture holds: plain graphs under the user's names, at any device, with what was noticed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import batch_symbol, capture, gather_inputs, retarget, shape_at
from tests.support.captures import line_of
from tests.support.models import HIDDEN, batch_norm_cnn, mlp, nano_gpt, small_cnn, tiny_llama, tiny_t5

aten = torch.ops.aten


def test_names_objects_and_order_are_the_users() -> None:
    for model, batch in (nano_gpt(layers=2), batch_norm_cnn(), tiny_t5(layers=1)):
        graph_module = capture(model, batch).graph_module
        theirs = dict(model.named_parameters(remove_duplicate=False))
        ours = dict(graph_module.named_parameters(remove_duplicate=False))
        assert list(ours) == list(theirs)
        assert all(ours[name] is theirs[name] for name in theirs)
        assert list(graph_module.state_dict()) == list(model.state_dict())
        buffers = dict(graph_module.named_buffers())
        assert all(buffers[name] is buffer for name, buffer in model.named_buffers())


def test_unused_parameters_are_kept() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x).mean()

    model = Spare()
    result = capture(model, torch.randn(6, 4))
    assert dict(result.graph_module.named_parameters())["spare.weight"] is model.spare.weight
    assert not any("spare" in str(node.target) for node in result.graph_module.graph.nodes)


def test_tied_parameters_are_grouped() -> None:
    assert capture(*nano_gpt(layers=1)).tied == (("wte.weight", "lm_head.weight"),)
    model, batch = tiny_t5(layers=1)
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    assert capture(model, batch).tied == (names,)
    assert capture(*mlp()).tied == ()


def test_the_graph_is_plain() -> None:
    model, batch = nano_gpt(layers=2)
    result = capture(model, batch)
    nodes = list(result.graph_module.graph.nodes)
    assert [node.name for node in nodes[:2]] == ["input_ids", "labels"]
    assert {node.op for node in nodes} == {"placeholder", "get_attr", "call_function", "output"}
    assert nodes[-1].args[0].target is aten.cross_entropy_loss.default
    assert not any("assert" in str(node.target) or "guard" in str(node.target) for node in nodes)
    for node in nodes:
        if node.op == "call_function":
            assert "val" in node.meta
            assert "test" not in str(node.meta["nn_module_stack"]).replace("tests.support", "")
            assert "models.py" in node.meta["stack_trace"] or node.target is aten.sym_size.int
    paths = [path for node in nodes for path, _ in node.meta.get("nn_module_stack", {}).values()]
    modules = dict(model.named_modules())
    assert paths
    assert all(path in modules for path in paths)
    attention = next(node for node in nodes if node.target is aten.scaled_dot_product_attention.default)
    assert "h.0" in [path for path, _ in attention.meta["nn_module_stack"].values()]


def test_shapes_at_any_batch_size() -> None:
    result = capture(*nano_gpt(layers=1))
    graph_module = result.graph_module
    assert batch_symbol(graph_module) is not None
    target = next(node for node in graph_module.graph.nodes if node.target is aten.linear.default)
    assert shape_at(target.meta["val"], 1) == (1, 16, 3 * HIDDEN)
    assert shape_at(target.meta["val"], 4096) == (4096, 16, 3 * HIDDEN)
    loss = next(node for node in graph_module.graph.nodes if node.op == "output").args[0]
    assert shape_at(loss.args[0].meta["val"], 7) == (7 * 16, 96)


def test_tokens_names_and_dtypes() -> None:
    assert capture(*nano_gpt(layers=1)).tokens_per_sample == 16
    assert capture(*small_cnn()).tokens_per_sample == 1
    assert capture(*small_cnn()).name == "CNN"
    model, batch = tiny_llama(layers=1)
    assert capture(model, batch).name == "LlamaForCausalLM"
    model.config._name_or_path = "meta-llama/Llama-3-8B"
    assert capture(model, batch).name == "Llama-3-8B"


class FixedBatch(nn.Module):
    """The batch size is written into the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("anchor", torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), self.anchor)


def test_a_fixed_batch_size_gives_a_static_graph_and_says_so() -> None:
    model, batch = FixedBatch(), torch.randn(6, 4)
    result = capture(model, batch)
    assert not result.dynamic_batch
    assert batch_symbol(result.graph_module) is None
    assert any("fixed at the example's 6" in note for note in result.notes)
    assert torch.equal(result.graph_module(batch), model(batch))


def test_only_tensors_that_share_the_batch_are_batched() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, positions: Tensor, x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
            return F.mse_loss((x + self.table(positions)) * scale, y)

    model = Positions()
    batch = (torch.arange(5), torch.randn(6, 5, 4), torch.randn(6, 5, 4), torch.tensor(2.0))
    result = capture(model, batch)
    assert [spec.batched for spec in result.inputs] == [False, True, True, False]
    assert result.batch_size == 6 and result.dynamic_batch
    smaller = (batch[0], batch[1][:2], batch[2][:2], batch[3])
    assert torch.equal(result.graph_module(*gather_inputs(result, smaller)), model(*smaller))


def test_data_dependent_sizes_are_noted_and_bounded() -> None:
    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            rows = torch.nonzero(keep.flatten()).squeeze(1)  # selects
            return self.layer(x.flatten(0, 1)[rows]).square().sum()

    batch = (torch.randn(6, 3, 4), torch.arange(18).reshape(6, 3) % 2)
    result = capture(Selects(), batch)
    assert any(line_of(__file__, "selects") in note for note in result.notes)
    linear = next(n for n in result.graph_module.graph.nodes if n.target is aten.linear.default)
    assert shape_at(linear.meta["val"], 1) == (3, 4)
    assert shape_at(linear.meta["val"], 10) == (30, 4)


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()[0]


def operators(graph: torch.fx.Graph) -> list[tuple[str, str]]:
    """Less the copies and views whose need follows from how a device lays attention's output out."""
    layout = (aten.contiguous.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default)
    return [(node.op, str(node.target)) for node in graph.nodes if node.target not in layout]


def test_meta_models_capture_like_real_ones() -> None:
    for build in (nano_gpt, small_cnn, tiny_llama):
        model, batch = build()
        real = capture(model, batch).graph_module.graph
        planned = capture(on_meta(build), batch)
        assert planned.dynamic_batch
        assert operators(planned.graph_module.graph) == operators(real)
        assert all(p.is_meta for p in planned.graph_module.parameters())


def test_meta_parameters_with_real_buffers_keep_the_buffers() -> None:
    model, batch = batch_norm_cnn()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"))
    mean = model.norm.running_mean
    result = capture(model, batch)
    assert model.norm.running_mean is mean and not mean.is_meta
    assert dict(result.graph_module.named_buffers())["norm.running_mean"] is mean


def test_a_graph_traced_on_meta_runs_once_retargeted() -> None:
    model, batch = nano_gpt(layers=1)
    planned = capture(on_meta(lambda: nano_gpt(layers=1)), batch)
    graph_module = retarget(planned.graph_module, "cpu")
    state = dict(model.named_parameters(remove_duplicate=False))
    loss = torch.func.functional_call(graph_module, state, tuple(batch.values()), tie_weights=False)
    assert torch.equal(loss, model(**batch))


def test_another_dtype_is_traced_on_a_stand_in() -> None:
    model, batch = nano_gpt(layers=1)
    before = [(id(p), p.dtype, p.device) for p in model.parameters()]
    result = capture(model, batch, dtype=torch.bfloat16)
    assert [(id(p), p.dtype, p.device) for p in model.parameters()] == before
    assert result.dtype == torch.bfloat16
    linear = next(n for n in result.graph_module.graph.nodes if n.target is aten.linear.default)
    assert linear.meta["val"].dtype == torch.bfloat16
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in result.graph_module.parameters())
    assert result.tied == (("wte.weight", "lm_head.weight"),)
    same = capture(model, batch, dtype=torch.float32)
    assert next(same.graph_module.parameters()) is next(model.parameters())


def test_a_compiled_model_is_captured_as_its_original() -> None:
    model, batch = mlp()
    result = capture(torch.compile(model), batch)
    assert next(iter(dict(result.graph_module.named_parameters()))) == "layers.0.weight"
