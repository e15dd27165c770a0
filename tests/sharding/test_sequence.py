"""Sequence parallelism comes out of the rules: Megatron's communication, and activations divided."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.errors import StrategyError
from autoplan.layers import build_layers
from autoplan.layers.types import LayerGraph
from autoplan.sharding import Copied, Shard, Sharding, shard_model
from tests.sharding.test_solve import BLOCK_COMMUNICATION, full_size
from tests.support import models
from tests.support.sharded import cluster

# Korthikanti et al. 2022, section 4.2.2: an all-gather before each pair of products and a reduce-scatter after it,
# and in the backward the other way round.
SEQUENCE_COMMUNICATION = [
    ("all_gather", "backward"),
    ("all_gather", "backward"),
    ("all_gather", "forward"),
    ("all_gather", "forward"),
    ("reduce_scatter", "backward"),
    ("reduce_scatter", "backward"),
    ("reduce_scatter", "forward"),
    ("reduce_scatter", "forward"),
]
HIDDEN = {"llama": 4096, "gpt2": 2048, "bert": 1024}
BLOCK = 1  # the middle one of: embeddings, block, head


def over_sequence(name: str, degree: int) -> tuple[Sharding, Sharding, LayerGraph]:
    captured, layers = full_size(name)
    with_it, without = (
        shard_model(captured, layers, degree=degree, cluster=cluster(), sequence=sequence) for sequence in (True, False)
    )
    return with_it, without, layers


@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_block_communicates_exactly_as_megatron_does(name: str, degree: int) -> None:
    found, without, _ = over_sequence(name, degree)
    block, plain = found.kinds[BLOCK].kind, without.kinds[BLOCK].kind
    assert sorted((c.name, c.phase) for c in block.collectives) == SEQUENCE_COMMUNICATION
    assert {c.bytes_per_sample for c in block.collectives} == {512 * HIDDEN[name] * 2}
    assert block.flops == pytest.approx(plain.flops, rel=0.01)
    assert block.parameter_elements == plain.parameter_elements


@pytest.mark.parametrize("sequence", [True, False])
def test_long_sequences_and_fast_links_change_nothing(sequence: bool) -> None:
    # Norms of 4,096 positions take as long as a gather over NVLink: they still are not split by features.
    captured, layers = _long()
    machines = Cluster.parse("8x8xH100")
    block = shard_model(captured, layers, degree=8, cluster=machines, sequence=sequence).kinds[BLOCK].kind
    megatron = SEQUENCE_COMMUNICATION if sequence else BLOCK_COMMUNICATION
    assert sorted((c.name, c.phase) for c in block.collectives) == megatron
    assert {c.bytes_per_sample for c in block.collectives} == {4096 * 8192 * 2}


@functools.cache
def _long() -> tuple[Capture, LayerGraph]:
    """Llama-3-70B's block at 4,096 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings, num_attention_heads=64, num_key_value_heads=8))
        batch = {key: torch.zeros(2, 4096, dtype=torch.long) for key in ("input_ids", "labels")}
    captured = capture(model.to(torch.bfloat16), batch)
    return captured, build_layers(captured)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_block_keeps_is_a_share_but_for_the_inputs_of_products(name: str) -> None:
    found, without, layers = over_sequence(name, 8)
    block, plain, whole = found.kinds[BLOCK].kind, without.kinds[BLOCK].kind, layers.kinds[BLOCK]
    gathered = 2 * 512 * HIDDEN[name] * 2  # of attention and of the perceptron, kept whole
    assert block.saved_bytes == pytest.approx((whole.saved_bytes - gathered) / 8 + gathered, rel=0.05)
    assert block.saved_bytes < 0.71 * plain.saved_bytes
    assert block.input_bytes == whole.input_bytes / 8


@pytest.mark.parametrize("name", HIDDEN)
def test_matrices_are_split_and_gradients_of_norms_are_summed_once_a_step(name: str) -> None:
    found, without, _ = over_sequence(name, 2)
    block = found.kinds[BLOCK]
    norms = [p for p, placement in zip(block.kind.parameters, block.stored, strict=True) if placement == Copied()]
    assert norms and all(parameter.summed for parameter in norms)
    assert all(isinstance(state, Copied | Shard) for state in block.stored)
    split = [isinstance(state, Shard) for state in block.stored]
    assert split == [isinstance(state, Shard) for state in without.kinds[BLOCK].stored]


def test_stages_send_shares() -> None:
    found, _, layers = over_sequence("gpt2", 8)
    local = found.edges(layers.edges)
    assert {edge.bytes_per_sample for edge in layers.edges} == {512 * 2048 * 2}
    assert {edge.bytes_per_sample for edge in local} == {512 * 2048 * 2 / 8}


def test_embeddings_are_scattered_and_the_head_gathers_once() -> None:
    found, _, _ = over_sequence("gpt2", 2)
    first, _, last = (entry.kind.collectives for entry in found.kinds)
    assert [(c.name, c.phase) for c in first] == [("reduce_scatter", "forward"), ("all_gather", "backward")]
    whole = [(c.name, c.phase) for c in last if c.bytes_per_sample == 512 * 2048 * 2]
    assert whole == [("all_gather", "forward"), ("reduce_scatter", "backward")]
    assert len(last) == len(whole) + 2  # and a few numbers a row of the logits, which are never gathered


def test_a_sequence_that_does_not_divide_is_refused_with_its_length() -> None:
    model, batch = models.tiny_gpt2(samples=2, layers=1)
    batch = {name: value[:, :15] for name, value in batch.items()}
    captured = capture(model, batch)
    with pytest.raises(StrategyError, match=r"does not divide the sequence of 15"):
        shard_model(captured, build_layers(captured), degree=2, cluster=cluster(), sequence=True)


def test_a_model_without_sequences_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return F.mse_loss(x, y)

    captured = capture(Flat(), {"x": torch.zeros(2, 16), "y": torch.zeros(2, 16)})
    with pytest.raises(StrategyError, match=r"\[batch, sequence, hidden\]"):
        shard_model(captured, build_layers(captured), degree=2, cluster=cluster(), sequence=True)
