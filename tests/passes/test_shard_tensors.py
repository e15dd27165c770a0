"""The rewritten program on thread ranks equals the graph in one process: loss and every gradient, in float64."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.passes import operators
from autoplan.passes.lint import check_placements
from autoplan.passes.split_stages import split_stages
from autoplan.passes.weight_loss import weight_loss
from autoplan.sharding import Replicate, Shard
from tests.support import models, sharded

TOLERANCE = 1e-10


class TwoLayerPerceptron(nn.Module):
    """Ten classes: the last product splits over its input only."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


class ManualAttention(nn.Module):
    """nanoGPT without the fused kernel: products, a mask buffer and a softmax; sizes written as numbers."""

    def __init__(self, hidden: int = 32, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(96, hidden)
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 96)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (c // self.heads) ** -0.5
        weights = F.softmax(scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        x = x + self.c_proj((weights @ v).transpose(1, 2).contiguous().view(b, t, c))
        return F.cross_entropy(self.head(x).view(-1, 96), labels.view(-1), reduction="sum")


class Encoder(nn.Module):
    """torch's own layers: heads are merged with the batch into one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.embed(x)).mean(1)), y)


def _classes(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(3))


def _transformer(name: str, part: str = "", **config: object) -> tuple[nn.Module, models.Batch]:
    import transformers

    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    common |= {"intermediate_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
    torch.manual_seed(0)
    config_class, model_class = (getattr(transformers, name.format(kind)) for kind in (f"{part}Config", "ForCausalLM"))
    return model_class(config_class(**{**common, **config})), models.token_batch(2)


def _bert() -> tuple[nn.Module, models.Batch]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    return BertForMaskedLM(BertConfig(**settings, intermediate_size=64)), models.token_batch(2)


def _vit() -> tuple[nn.Module, models.Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**settings, image_size=32, patch_size=8, num_labels=5))
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": _classes(5, 2)}


def _seeded(build: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


MODELS: dict[str, sharded.Builder] = {
    "mlp": models.mlp,
    "two-layer perceptron": lambda: (
        _seeded(TwoLayerPerceptron),
        {"x": torch.randn(4, 32, generator=torch.Generator().manual_seed(2)), "y": _classes(10, 4)},
    ),
    "nanoGPT, tied": lambda: models.nano_gpt(samples=2, layers=2),
    "manual attention": lambda: (_seeded(ManualAttention), models.token_batch(2)),
    "nn.TransformerEncoder": lambda: (_seeded(Encoder), {"x": _classes(96, 4, 16), "y": _classes(8, 4)}),
    "GPT-2": lambda: models.tiny_gpt2(samples=2, layers=2),
    "Llama, grouped queries": lambda: models.tiny_llama(samples=2, layers=2),
    "T5": lambda: models.tiny_t5(samples=2, layers=2),
    "BERT": _bert,
}
WIDE: dict[str, sharded.Builder] = {
    "Qwen3": lambda: _transformer("Qwen3{}", num_key_value_heads=2, head_dim=8),
    "Qwen2": lambda: _transformer("Qwen2{}", num_key_value_heads=2),
    "Mistral": lambda: _transformer("Mistral{}", num_key_value_heads=2, sliding_window=8),
    "Phi3": lambda: _transformer("Phi3{}", num_key_value_heads=2),
    "Gemma3": lambda: _transformer("Gemma3{}", "Text", num_key_value_heads=2, head_dim=8, sliding_window=8),
    "OPT": lambda: _transformer("OPT{}", ffn_dim=64, word_embed_proj_dim=32),
    "ViT": _vit,
    "CNN": lambda: models.small_cnn(samples=4),
}


@functools.cache
def traced(name: str) -> sharded.Traced:
    return sharded.trace({**MODELS, **WIDE}[name])


def assert_equal_to_one_process(name: str, degree: int) -> sharded.Ran:
    model = traced(name)
    _, graph = sharded.shard(model, degree)
    ran = sharded.run(model, graph)
    for loss in ran.losses:
        torch.testing.assert_close(loss, model.loss, rtol=TOLERANCE, atol=0)
    assert set(ran.gradients) == {name for name in graph.parameters if name in model.gradients}
    assert sharded.worst_error(ran.gradients, model.gradients) < TOLERANCE
    return ran


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_equal_the_single_process(name: str, degree: int) -> None:
    assert_equal_to_one_process(name, degree)


@pytest.mark.wide
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", WIDE)
def test_further_families_equal_the_single_process(name: str, degree: int) -> None:
    assert_equal_to_one_process(name, degree)


@pytest.mark.parametrize("name", ["GPT-2", "nn.TransformerEncoder", "mlp"])
def test_a_loss_weighted_for_parts_of_the_batch_is_split_too(name: str) -> None:
    model = traced(name)
    weighted = weight_loss(model.capture)
    _, graph = sharded.shard(model, 2, weighted.graph_module)
    cut = 1 if name == "GPT-2" else 3  # uneven micro-batches
    parts = [[x[:cut] for x in model.inputs], [x[cut:] for x in model.inputs]]
    totals = [sum(part) for part in zip(*(weighted.weights(*inputs) for inputs in parts), strict=True)]
    ran = sharded.run(model, graph, [[*inputs, *totals] for inputs in parts])
    torch.testing.assert_close(ran.losses[0], model.loss, rtol=TOLERANCE, atol=0)
    assert sharded.worst_error(ran.gradients, model.gradients) < TOLERANCE


def test_layers_may_stand_in_different_stages() -> None:
    model = traced("GPT-2")
    _, graph = sharded.shard(model, 2)
    stage = {name: int(i >= 1) for i, layer in enumerate(model.layers.layers) for name in layer.nodes}
    stage |= {name: stage[origin] for name, origin in graph.origin.items() if origin in stage}
    first, second = split_stages(graph.graph_module, stage)
    # What crosses between stages is whole: alike on all ranks of the tensor axis.
    placed = check_placements(graph.graph_module, model.capture.graph_module, graph.parameters, degree=2)
    assert {str(placed[value.name]) for value in first.sends} == {"R"}
    assert second.returns_loss


def test_llama_communicates_as_megatron_does() -> None:
    ran = assert_equal_to_one_process("Llama, grouped queries", 2)
    # A block sums its two row-parallel products forward, and the gradients of its two column-parallel inputs backward
    # (q, k and v share one; so do gate and up). Embedding: columns, gathered once. Cross entropy: a maximum, then two
    # sums a row. Head: the gradient of its input.
    assert ran.forward == {"all_reduce": 2 * 2 + 2, "all_gather": 1}
    assert ran.total - ran.forward == {"all_reduce": 2 * 2 + 1}


def test_gpt2_communicates_as_megatron_does() -> None:
    ran = assert_equal_to_one_process("GPT-2", 2)
    # As above, and the vocabulary-parallel embedding's sum, which the positions' lookup joins.
    assert ran.forward == {"all_reduce": 2 * 2 + 2 + 1}
    assert ran.total - ran.forward == {"all_reduce": 2 * 2 + 1}


@pytest.mark.parametrize("name", ["GPT-2", "Llama, grouped queries", "nanoGPT, tied"])
def test_logits_are_never_whole(name: str) -> None:
    _, graph = sharded.shard(traced(name), 2)
    whole = [
        node.name
        for node in graph.graph_module.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
        and value.dim() >= 2
        and value.shape[-1] == models.VOCABULARY
        and node.op == "call_function"
        and not _is_attention_input(node)
    ]
    assert whole == []
    assert any(node.target is operators.vocabulary_cross_entropy for node in graph.graph_module.graph.nodes)


def _is_attention_input(node: torch.fx.Node) -> bool:
    return "attn" in "".join(path for path, _ in node.meta.get("nn_module_stack", {}).values())


def test_packed_query_key_value_are_cut_by_heads() -> None:
    _, graph = sharded.shard(traced("GPT-2"), 2)
    # 96 columns are q, k and v of 32 each: rank 0 needs the first half of each, not columns 0 to 47.
    assert graph.parameters["transformer.h.0.attn.c_attn.weight"] == Shard(1, parts=(32, 32, 32))
    assert graph.parameters["transformer.h.0.attn.c_attn.bias"] == Shard(0, parts=(32, 32, 32))
    assert graph.parameters["transformer.h.0.ln_1.weight"] == Replicate()


def test_names_metadata_and_local_shapes_survive() -> None:
    model = traced("nanoGPT, tied")
    _, graph = sharded.shard(model, 2)
    original = {node.name: node for node in model.capture.graph_module.graph.nodes}
    new = {node.name: node for node in graph.graph_module.graph.nodes}
    assert set(original) <= set(new)
    inserted = set(new) - set(original)
    assert inserted == set(graph.origin)
    assert all(graph.origin[name] in original for name in inserted)
    for name, node in new.items():
        if node.op == "call_function" and isinstance(original.get(name, node).meta.get("val"), Tensor):
            assert "val" in node.meta and "nn_module_stack" in node.meta
    split = next(node for name, node in new.items() if node.target is torch.ops.aten.split.Tensor)
    assert split.args[1] == models.HIDDEN // 2  # split(hidden, dim=2) of a third of 3 x hidden / 2
    views = [node for node in new.values() if node.target is torch.ops.aten.view.default and len(node.args[1]) == 4]
    assert all(node.args[1][2] == models.HEADS // 2 for node in views)


def test_the_graph_is_the_same_for_every_rank_and_the_parameters_are_not() -> None:
    model = traced("nanoGPT, tied")
    _, graph = sharded.shard(model, 2)
    weight = operator.attrgetter("h.0.c_fc.weight")(model.capture.graph_module)
    parts = [sharded.local_module(graph, rank)[1]["h.0.c_fc.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), weight)
    assert parts[0].is_contiguous() and parts[0].data_ptr() != weight.data_ptr()
