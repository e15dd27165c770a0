"""The solved layers: Megatron's layout and communication come out as the optimum."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Capture, capture
from autoplan.errors import StrategyError
from autoplan.layers import build_layers
from autoplan.layers.types import LayerGraph, LayerKind
from autoplan.sharding import KindSharding, Replicate, Shard, Sharding, Shardings, ilp, shard_kind, shard_model
from autoplan.sharding import solve as solving
from tests.support import models
from tests.support.sharded import cluster

BLOCK_COMMUNICATION = [
    ("all_reduce", "backward"),
    ("all_reduce", "backward"),
    ("all_reduce", "forward"),
    ("all_reduce", "forward"),
]


@functools.cache
def built(name: str) -> tuple[Capture, LayerGraph]:
    model, batch = getattr(models, name)(samples=2, layers=2)
    captured = capture(model, batch)
    return captured, build_layers(captured)


@functools.cache
def full_size(name: str) -> tuple[Capture, LayerGraph]:
    """Two layers at real widths, on meta."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: nn.Module
        if name == "llama":
            settings = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
            settings |= {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2}
            model = LlamaForCausalLM(LlamaConfig(**settings))
        elif name == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=2048, n_head=16, vocab_size=50304))
        else:
            sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
            model = BertForMaskedLM(BertConfig(num_hidden_layers=2, **sizes))
        batch = {key: torch.zeros(2, 512, dtype=torch.long) for key in ("input_ids", "labels")}
    captured = capture(model.to(torch.bfloat16), batch)
    return captured, build_layers(captured)


def block_of(model: tuple[Capture, LayerGraph], degree: int) -> tuple[KindSharding, LayerKind, tuple[str, ...]]:
    """The repeated block: the kind with the most layers."""
    captured, layers = model
    kinds = [layer.kind for layer in layers.layers]
    kind = max(set(kinds), key=lambda k: (kinds.count(k), len(layers.kinds[k].operators)))
    names = next(layer.parameters for layer in layers.layers if layer.kind == kind)
    return shard_kind(captured, layers, kind, degree=degree, cluster=cluster()), layers.kinds[kind], names


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_block_communicates_exactly_as_megatron_does(name: str, degree: int) -> None:
    # Two row-parallel products are summed forward, the gradients of two column-parallel inputs backward; nothing else.
    found, whole, _ = block_of(full_size(name), degree)
    assert sorted((c.name, c.phase) for c in found.kind.collectives) == BLOCK_COMMUNICATION
    hidden_bytes = 512 * {"llama": 4096, "gpt2": 2048, "bert": 1024}[name] * 2
    assert {c.bytes_per_sample for c in found.kind.collectives} == {hidden_bytes}
    assert found.kind.flops == pytest.approx(whole.flops / degree, rel=0.01)
    assert found.kind.parameter_elements == pytest.approx(whole.parameter_elements / degree, rel=0.01)
    assert found.kind.saved_bytes < whole.saved_bytes


def test_operators_of_a_block_have_the_shapes_of_one_rank() -> None:
    found, whole, _ = block_of(full_size("llama"), 8)
    for local, full in zip(found.kind.operators, whole.operators, strict=True):
        if full.attention is not None and local.attention is not None:
            assert local.attention.heads == full.attention.heads // 8 == 4
            assert local.attention.key_value_heads == full.attention.key_value_heads // 8 == 1
        if full.gemm is not None and local.gemm is not None:
            assert local.gemm.m * local.gemm.n * local.gemm.k * 8 == full.gemm.m * full.gemm.n * full.gemm.k


def test_columns_then_rows() -> None:
    found, _, names = block_of(full_size("llama"), 2)
    by_role = {name.rsplit(".", 2)[-2]: placement for name, placement in zip(names, found.stored, strict=True)}
    columns = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert all(by_role[name] == Shard(0) for name in columns)
    assert by_role["o_proj"] == by_role["down_proj"] == Shard(1)
    assert by_role["input_layernorm"] == by_role["post_attention_layernorm"] == Replicate()


def test_the_vocabulary_is_split_and_logits_are_never_gathered() -> None:
    captured, layers = full_size("gpt2")
    sharding = shard_model(captured, layers, degree=2, cluster=cluster())
    assert sharding.parameters["transformer.wte.weight"] == sharding.parameters["lm_head.weight"] == Shard(0)
    logits_bytes = 512 * 50304 * 2
    largest = max(c.bytes_per_sample for kind in sharding.kinds for c in kind.kind.collectives)
    assert largest == 512 * 2048 * 2 < logits_bytes


def test_an_odd_vocabulary_is_not_split() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(101, 16), nn.Linear(16, 101)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten())

    tokens = torch.zeros(2, 4, dtype=torch.long)
    captured = capture(Odd(), {"tokens": tokens, "labels": tokens})
    sharding = shard_model(captured, build_layers(captured), degree=2, cluster=cluster())
    assert sharding.parameters["embed.weight"] != Shard(0)
    assert sharding.parameters["head.weight"] != Shard(0)


def test_one_rank_splits_nothing() -> None:
    _, layers = built("nano_gpt")
    sharding = _solved("nano_gpt", 1)
    assert [entry.kind for entry in sharding.kinds] == list(layers.kinds)
    assert set(sharding.parameters.values()) == {Replicate()}


def test_heads_must_divide() -> None:
    captured, layers = built("tiny_llama")
    with pytest.raises(StrategyError) as caught:
        shard_model(captured, layers, degree=3, cluster=cluster())
    assert "4 attention heads of model.layers.0.self_attn" in caught.value.what
    assert caught.value.legal.endswith("1, 2, 4")
    assert caught.value.attempt == "tensor=2"
    assert "modeling_llama.py:" in caught.value.where


def test_fewer_key_value_heads_than_ranks_is_legal() -> None:
    sharding = _solved("tiny_llama", 4)  # four query heads over two of keys and values
    assert sharding.parameters["model.layers.0.self_attn.q_proj.weight"] == Shard(0)


@pytest.mark.parametrize("name", ["nano_gpt", "tiny_gpt2", "tiny_llama", "tiny_t5"])
def test_the_integer_program_equals_elimination_on_every_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_elimination = _solved(name, 2)
    monkeypatch.setattr(solving.minimum, "minimise", ilp.minimise)
    captured, layers = built(name)
    by_program = shard_model(captured, layers, degree=2, cluster=cluster())
    for one, other in zip(by_program.kinds, by_elimination.kinds, strict=True):
        assert one.objective_us == pytest.approx(other.objective_us, rel=1e-9)


def test_degrees_solved_together_are_as_solved_alone() -> None:
    captured, layers = built("tiny_llama")
    together = Shardings(captured, layers, cluster())
    for degree, sequence in ((4, False), (2, True), (2, False)):
        alone = shard_model(captured, layers, degree=degree, cluster=cluster(), sequence=sequence)
        assert together.at(degree, sequence=sequence) == alone


def test_tied_parameters_agree_over_layers() -> None:
    for name in ("nano_gpt", "tiny_t5"):
        captured, _ = built(name)
        sharding = _solved(name, 2)
        for group in captured.tied:
            assert len({sharding.parameters[alias] for alias in group}) == 1


def test_layers_of_one_kind_are_split_alike() -> None:
    _, layers = built("nano_gpt")
    sharding = _solved("nano_gpt", 2)
    blocks = [layer for layer in layers.layers if layer.name.startswith("h.")]
    assert len({tuple(str(sharding.options[node]) for node in layer.nodes) for layer in blocks}) == 1


def test_operators_without_a_rule_are_listed_with_bytes_and_place() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            wide = self.up(x)
            return F.cross_entropy(self.down(wide - wide.median(dim=-1, keepdim=True).values), y)

    captured = capture(Centred(), {"x": torch.ones(2, 8), "y": torch.zeros(2, dtype=torch.long)})
    sharding = shard_model(captured, build_layers(captured), degree=2, cluster=cluster())
    (entry,) = sharding.whole
    assert entry.operator == "aten.median.dim"
    assert entry.bytes_per_sample == 4 + 8  # the value in float32, its index in int64
    assert "test_solve.py:" in entry.source


def _solved(name: str, degree: int) -> Sharding:
    captured, layers = built(name)
    return shard_model(captured, layers, degree=degree, cluster=cluster())
