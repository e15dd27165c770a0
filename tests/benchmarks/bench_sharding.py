"""How long the tensor-parallel choice takes: ``python -m tests.benchmarks.bench_sharding``. Seconds of CPU, medians.

- a block of a Llama, and one of over 120 nodes, with every option, with and without sequence parallelism: as the
  product does it (:mod:`autoplan.sharding.minimum`), and by the integer program, stated, solved and proven;
- a graph of 4,000 nodes in which no two blocks are alike, cut into layers, and the same in longer layers: both ways.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.layers.types import LayerGraph
from autoplan.sharding import ilp, minimum, shard_kind, shard_model
from tests.sharding.test_solve import full_size

CLUSTER = Cluster.parse("8xA100-80GB")
BLOCKS = 250  # of 16 nodes


class Block(nn.Module):
    """A gated perceptron and a gate over the features, of a width of its own."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate, self.up, self.down = nn.Linear(hidden, inner), nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.mix = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.down(F.silu(self.gate(y)) * torch.tanh(self.up(y)) * 0.5)
        return x + y * torch.sigmoid(self.mix(y)).neg().exp().clamp(0, 1).sqrt()


class Distinct(nn.Module):
    def __init__(self, blocks: int, *, listed: bool) -> None:
        super().__init__()
        made = [Block(64, 64 + 8 * index) for index in range(blocks)]
        self.blocks = nn.ModuleList(made) if listed else nn.Module()
        if not listed:
            for index, block in enumerate(made):
                self.blocks.add_module(f"b{index}x", block)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks.children():
            x = block(x)
        return F.mse_loss(x, y)


def traced(*, listed: bool) -> tuple[Capture, LayerGraph]:
    with torch.device("meta"):
        model = Distinct(BLOCKS, listed=listed)
        batch = {"x": torch.zeros(2, 32, 64), "y": torch.zeros(2, 32, 64)}
    captured = capture(model, batch)
    return captured, build_layers(captured)


def wide_block() -> tuple[Capture, LayerGraph]:
    """Two blocks of over 120 nodes: each a block of a Llama and three gated perceptrons after it."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=4
    )

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = LlamaDecoderLayer(config, 0)
            self.more = nn.Module()
            for index in range(3):
                self.more.add_module(f"p{index}x", Block(4096, 8192))

        def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
            x = self.first(x, position_embeddings=turn)
            for part in self.more.children():
                x = part(x)
            return x

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Wide() for _ in range(2))
            self.rotary = LlamaRotaryEmbedding(config)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            turn = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
            for layer in self.layers:
                x = layer(x, turn)
            return F.mse_loss(x, y)

    with torch.device("meta"):
        model, batch = Decoder(), {key: torch.zeros(2, 512, 4096) for key in ("x", "y")}
    captured = capture(model.to(torch.bfloat16), {key: value.to(torch.bfloat16) for key, value in batch.items()})
    return captured, build_layers(captured)


def by_program(body: Callable[[], object]) -> object:
    """``body`` with every minimum found by the integer program."""
    with mock.patch.object(minimum, "minimise", ilp.minimise):
        return body()


def seconds(body: Callable[[], object], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        started = time.process_time()
        body()
        found.append(time.process_time() - started)
    return statistics.median(found)


def main() -> None:
    for name, (captured, layers), kind in (("Llama", full_size("llama"), 1), ("wide", wide_block(), 0)):
        nodes = len(next(layer for layer in layers.layers if layer.kind == kind).nodes)
        for sequence in (False, True):
            body = functools.partial(shard_kind, captured, layers, kind, degree=8, cluster=CLUSTER, sequence=sequence)
            found, program = seconds(body), seconds(functools.partial(by_program, body))
            case = f"a {name} block of {nodes} nodes, sequence parallel {str(sequence).lower()}"
            print(f"{case}: {found:.3f} s; by the integer program {program:.3f} s")
    for listed in (True, False):
        captured, layers = traced(listed=listed)
        count = sum(len(layer.nodes) for layer in layers.layers)
        whole = functools.partial(shard_model, captured, layers, degree=8, cluster=CLUSTER)
        found, program = seconds(whole, repeats=1), seconds(functools.partial(by_program, whole), repeats=1)
        case = f"{count:,} nodes, {len(layers.layers)} layers of {len(layers.kinds)} kinds"
        print(f"{case}: {found:.2f} s; by the integer program {program:.2f} s")


if __name__ == "__main__":
    main()
