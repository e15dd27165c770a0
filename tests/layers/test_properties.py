"""Any small network, with any skips: its layers cover it, in an order that runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.layers.graphs import traced

WIDTH = 4


class Network(nn.Module):
    """A chain of modules; ``skips`` (i, j) add the value after module i to the input of module j > i + 1; ``nested``
    wraps runs of modules in Sequentials of their own."""

    def __init__(self, parts: Sequence[str], skips: Sequence[tuple[int, int]], *, named: bool) -> None:
        super().__init__()
        modules = [self._module(part) for part in parts]
        self.skips = [(i, j) for i, j in skips if i + 1 < j < len(parts)]
        self.names = [f"part{index}" for index in range(len(parts))]
        if named:  # no repetition in the module tree: layers come from cutting
            for name, module in zip(self.names, modules, strict=True):
                self.add_module(name, module)
        else:
            self.parts = nn.ModuleList(modules)
        self.named = named

    @staticmethod
    def _module(part: str) -> nn.Module:
        match part:
            case "linear":
                return nn.Linear(WIDTH, WIDTH)
            case "relu":
                return nn.ReLU()
            case "norm":
                return nn.LayerNorm(WIDTH)
            case "pair":
                return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            case _:
                return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values: list[Tensor] = []
        parts = [getattr(self, name) for name in self.names] if self.named else list(self.parts)
        for index, part in enumerate(parts):
            for source, target in self.skips:
                if target == index:
                    x = x + values[source]
            x = part(x)
            values.append(x)
        return x.square().mean()


parts = st.lists(st.sampled_from(["linear", "relu", "norm", "pair", "nested"]), min_size=1, max_size=7)
skips = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=3)


@settings(max_examples=15, deadline=None)
@given(parts=parts, skips=skips, named=st.booleans())
def test_any_chain_with_skips_is_covered_in_topological_order(
    parts: list[str], skips: list[tuple[int, int]], named: bool
) -> None:
    model = Network(["linear", *parts], skips, named=named)
    graph = traced(model, {"x": torch.randn(2, WIDTH)}).graph
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())
    flops = sum(graph.kinds[layer.kind].flops for layer in graph.layers)
    products = sum(1 for module in model.modules() if isinstance(module, nn.Linear))
    assert flops == products * 2 * WIDTH * WIDTH
