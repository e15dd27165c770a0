"""How long the tensor ILP takes: ``python -m tests.benchmarks.bench_sharding``. Seconds of CPU, medians of five.

- a block of a Llama, with every option, with and without sequence parallelism;
- a graph of 4,000 nodes in which no two blocks are alike, cut into layers, and the same in one layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.layers.types import LayerGraph
from autoplan.sharding import shard_kind, shard_model
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


def seconds(body: Callable[[], object], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        started = time.process_time()
        body()
        found.append(time.process_time() - started)
    return statistics.median(found)


def main() -> None:
    captured, layers = full_size("llama")
    nodes = len(layers.layers[1].nodes)
    for sequence in (False, True):
        s = seconds(lambda: shard_kind(captured, layers, 1, degree=8, cluster=CLUSTER, sequence=sequence))  # noqa: B023
        print(f"a block of {nodes} nodes, sequence parallel {str(sequence).lower()}: {s:.3f} s")
    for listed in (True, False):
        captured, layers = traced(listed=listed)
        count = sum(len(layer.nodes) for layer in layers.layers)
        s = seconds(lambda: shard_model(captured, layers, degree=8, cluster=CLUSTER), repeats=1)  # noqa: B023
        print(f"{count:,} nodes, {len(layers.layers)} layers of {len(layers.kinds)} kinds: {s:.2f} s")


if __name__ == "__main__":
    main()
