"""Layer graphs of whole models: which layers, of which kinds, with which edges and parameters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.layers import LayerGraph, build_layers
from tests.layers.graphs import small, traced
from tests.support import models


def layers_of(built: tuple[nn.Module, models.Batch]) -> LayerGraph:
    return traced(*built).graph


def kinds_by_name(graph: LayerGraph) -> dict[str, int]:
    return {layer.name: layer.kind for layer in graph.layers}


# ---------------------------------------------------------------------------------------- repeated blocks


def test_gpt2_is_embedding_equal_blocks_and_head() -> None:
    graph = small("tiny_gpt2").graph
    blocks = [f"transformer.h.{index}" for index in range(3)]
    assert [layer.name for layer in graph.layers] == ["transformer.wte", *blocks, "lm_head"]
    assert [layer.kind for layer in graph.layers] == [0, 1, 1, 1, 2]


def test_llama_blocks_are_one_kind_though_rotary_tables_are_shared() -> None:
    graph = small("tiny_llama").graph
    assert [layer.kind for layer in graph.layers] == [0, 1, 1, 1, 2]
    # The tables depend on no parameter: each stage makes its own, so nothing but the residual stream crosses.
    assert [(edge.source, edge.targets) for edge in graph.edges] == [(i, (i + 1,)) for i in range(4)]


def test_nodes_of_equal_kinds_correspond_one_to_one() -> None:
    captured, graph = small("tiny_gpt2").capture, small("tiny_gpt2").graph
    nodes = {node.name: node for node in captured.graph_module.graph.nodes}
    _, first, second, *_ = graph.layers
    assert first.kind == second.kind
    for one, other in zip(first.nodes, second.nodes, strict=True):
        assert nodes[one].target == nodes[other].target
        assert str(nodes[one].meta["val"]) == str(nodes[other].meta["val"])
    assert [name.replace("h.0.", "h.1.") for name in first.parameters] == list(second.parameters)


def test_t5_first_blocks_differ_and_the_encoder_feeds_every_decoder_block() -> None:
    graph = small("tiny_t5").graph
    kinds = kinds_by_name(graph)
    # Only block 0 owns the relative position bias; the others read it.
    assert kinds["encoder.block.0"] != kinds["encoder.block.1"] == kinds["encoder.block.2"]
    assert kinds["decoder.block.0"] != kinds["decoder.block.1"] == kinds["decoder.block.2"]
    names = [layer.name for layer in graph.layers]
    assert names.index("encoder.block.2") < names.index("decoder.block.0")
    between = names.index("decoder.embed_tokens")
    decoder = tuple(names.index(f"decoder.block.{index}") for index in range(3))
    hidden = [edge for edge in graph.edges if edge.source == between and edge.targets == decoder]
    assert [edge.bytes_per_sample for edge in hidden] == [models.SEQUENCE * models.HIDDEN * 4]
    biases = [edge for edge in graph.edges if not edge.batched]
    # [1, heads, T, T] in float32, from each first block to the others; the same for any micro-batch.
    assert [edge.bytes_per_sample for edge in biases] == [models.HEADS * models.SEQUENCE**2 * 4] * 2
    assert all(edge.differentiable for edge in biases)


def test_a_shared_block_that_is_called_twice_is_two_layers_with_one_set_of_parameters() -> None:
    class Albert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(models.HIDDEN, models.HIDDEN)
            self.blocks = nn.ModuleList([models.Block(models.HIDDEN, models.HEADS)])
            self.head = nn.Linear(models.HIDDEN, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(x).mean()

    model = Albert()
    graph = layers_of((model, {"x": torch.randn(2, 8, models.HIDDEN)}))
    assert [layer.kind for layer in graph.layers] == [0, 1, 1, 1, 2]
    assert graph.layers[1].parameters == graph.layers[3].parameters
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------------------------------- convolutional networks


class UNet(nn.Module):
    """Two levels with skips, of plain Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.down_1, self.down_2, self.bottom = self.level(3, 8), self.level(8, 16), self.level(16, 32)
        self.up_2, self.up_1 = self.level(48, 16), self.level(24, 8)
        self.out = nn.Conv2d(8, 4, 1)

    @staticmethod
    def level(inputs: int, outputs: int) -> nn.Module:
        parts = [(inputs, outputs), (outputs, outputs)]
        return nn.Sequential(
            *(each for a, b in parts for each in (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU()))
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one = self.down_1(x)
        two = self.down_2(F.max_pool2d(one, 2))
        three = self.bottom(F.max_pool2d(two, 2))
        two = self.up_2(torch.cat([F.interpolate(three, scale_factor=2), two], 1))
        one = self.up_1(torch.cat([F.interpolate(two, scale_factor=2), one], 1))
        return F.cross_entropy(self.out(one), y)


def test_unet_layers_are_convolutions_with_their_norms_and_skips_are_edges() -> None:
    batch = {"x": torch.randn(2, 3, 16, 16), "y": torch.randint(4, (2, 16, 16))}
    graph = layers_of((UNet(), batch))
    names = [layer.name for layer in graph.layers]
    levels = ("down_1", "down_2", "bottom", "up_2", "up_1")
    assert names == [f"{level}.{part}" for level in levels for part in (0, 3)] + ["out"]
    reach = {names[edge.source]: [names[target] for target in edge.targets] for edge in graph.edges}
    assert reach["down_1.3"] == ["down_2.0", "up_1.0"]
    assert reach["down_2.3"] == ["bottom.0", "up_2.0"]
    # The same convolution shapes at the same resolution are one kind.
    kinds = kinds_by_name(graph)
    assert kinds["down_2.3"] == kinds["up_2.3"]


def test_a_model_without_repetition_is_cut_where_few_bytes_cross() -> None:
    graph = small("small_cnn").graph
    assert [layer.name for layer in graph.layers] == ["conv_1", "conv_2", "conv_3", "head"]
    # conv_2's layer ends after its pool, where a quarter of the bytes crosses: [16, 2, 2] in float32.
    assert [edge.bytes_per_sample for edge in graph.edges] == [8 * 8 * 8 * 4, 16 * 2 * 2 * 4, 16 * 2 * 2 * 4]


def test_many_products_without_repetition_give_at_most_64_balanced_layers() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(100):
                self.add_module(f"fc{index}", nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for module in self.children():
                x = torch.relu(module(x))
            return x.mean()

    graph = layers_of((Wide(), {"x": torch.randn(4, 8)}))
    assert len(graph.layers) == 64
    flops = [graph.kinds[layer.kind].flops for layer in graph.layers]
    assert max(flops) <= 2 * min(flops)


def test_stages_of_a_hierarchical_network_open_to_their_blocks() -> None:
    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x)

    class Stage(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Residual(width) for _ in range(depth)])
            self.down = nn.Conv2d(width, 2 * width, 2, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.down(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)
            self.stages = nn.ModuleList([Stage(4, 3), Stage(8, 5)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for stage in self.stages:
                x = stage(x)
            return x.mean()

    graph = layers_of((Net(), {"x": torch.randn(2, 3, 16, 16)}))
    kinds = kinds_by_name(graph)
    assert len({kinds[f"stages.0.blocks.{index}"] for index in range(3)}) == 1
    assert len({kinds[f"stages.1.blocks.{index}"] for index in range(5)}) == 1
    assert "stages.0.blocks.0.layer.0" not in kinds  # a shortcut goes around it, so a block is whole


class Mixed(nn.Module):
    """A level of a U-Net: residual convolutions and mixers take turns."""

    def __init__(self, inputs: int, width: int, depth: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(
            [nn.Conv2d(inputs if i == 0 else width, width, 3, padding=1) for i in range(depth)]
        )
        self.attentions = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for resnet, attention in zip(self.resnets, self.attentions, strict=True):
            x = attention(resnet(x))
        return x


def test_levels_whose_parts_take_turns_open_to_the_parts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv_in = nn.Conv2d(3, 4, 1)
            self.down_blocks = nn.ModuleList([Mixed(4, 4, 2), Mixed(4, 8, 2)])
            self.mid = Mixed(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv_in(x)
            for block in self.down_blocks:
                x = block(x)
            return self.mid(x).mean()

    names = [layer.name for layer in layers_of((Net(), {"x": torch.randn(2, 3, 8, 8)})).layers]
    level = ["resnets.0", "attentions.0", "resnets.1", "attentions.1"]
    levels = [f"down_blocks.{index}.{part}" for index in (0, 1) for part in level]
    assert names == ["conv_in", *levels, "mid.resnets.0", "mid.attentions.0"]


# ---------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", ["nano_gpt", "tiny_gpt2", "tiny_llama", "tiny_t5", "small_cnn", "mlp"])
def test_parameters_are_the_models(name: str) -> None:
    model, graph = small(name).model, small(name).graph
    assert graph.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert graph.trainable_parameters == graph.parameters


def test_a_tied_embedding_is_shared_by_its_first_name() -> None:
    graph = small("nano_gpt").graph
    first, last = graph.layers[0], graph.layers[-1]
    assert "wte.weight" in first.parameters and "wte.weight" in last.parameters
    for layer in (first, last):
        shared = dict(zip(layer.parameters, graph.kinds[layer.kind].parameters, strict=True))
        assert {name: each.shared for name, each in shared.items() if each.shared} == {"wte.weight": "wte.weight"}


def test_frozen_parameters_are_counted_but_not_trainable() -> None:
    model, batch = models.mlp()
    for parameter in model.layers[0].parameters():  # type: ignore[union-attr, index]
        parameter.requires_grad_(False)
    graph = layers_of((model, batch))
    frozen = 16 * 16 + 16
    assert graph.parameters - graph.trainable_parameters == frozen
    # Nothing before the first trainable weight needs a gradient.
    assert not any(operator.needs_backward for operator in graph.kinds[graph.layers[0].kind].operators)


# ---------------------------------------------------------------------------------------- what travels


def test_a_random_draw_is_sent_not_drawn_again() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand_like(x)
            for block in self.blocks:
                x = block(x) + noise
            return x.mean()

    graph = layers_of((Noisy(), {"x": torch.randn(2, 8)}))
    noise = [edge for edge in graph.edges if not edge.differentiable]
    # Made where it is first read: it is added to the first block's output just before the second.
    assert [(edge.source, edge.targets) for edge in noise] == [(1, (2,))]


def test_running_statistics_stay_beside_their_norm() -> None:
    captured, graph = small("batch_norm_cnn").capture, small("batch_norm_cnn").graph
    layer_of = {name: layer.name for layer in graph.layers for name in layer.nodes}
    nodes = captured.graph_module.graph.nodes
    counters = [node.name for node in nodes if str(node.target) == "aten.add_.Tensor"]
    assert [layer_of[name] for name in counters] == ["conv_1"]


def test_the_layer_of_the_loss_is_last_whatever_is_left_unread() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](x))
            loss = x.mean()
            self.mean.copy_(self.blocks[2](x).detach().mean(0))  # type: ignore[operator, union-attr]
            return loss

    layers_of((Detached(), {"x": torch.randn(2, 8)}))


# ---------------------------------------------------------------------------------------- fingerprint


def test_fingerprint_ignores_weights_batch_size_and_device() -> None:
    with torch.device("meta"):
        on_meta = models.NanoGPT(layers=3)
    one, two = models.nano_gpt(layers=3), models.nano_gpt(layers=3, samples=2)
    torch.nn.init.ones_(two[0].wte.weight)  # type: ignore[union-attr, arg-type]
    prints = {build_layers(capture(*built)).fingerprint for built in (one, two, (on_meta, one[1]))}
    assert len(prints) == 1


@pytest.mark.parametrize("other", [{"layers": 2}, {"hidden": 64}, {"heads": 2}])
def test_fingerprint_tells_models_apart(other: dict[str, int]) -> None:
    one = small("nano_gpt")
    changed = models.NanoGPT(**{"layers": 3, **other})
    assert build_layers(capture(changed, one.batch)).fingerprint != one.graph.fingerprint


def test_fingerprint_is_equal_in_every_process() -> None:
    script = (
        "from tests.support import models\nfrom autoplan.capture import capture\n"
        "from autoplan.layers import build_layers\nprint(build_layers(capture(*models.nano_gpt(layers=3))).fingerprint)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.getcwd()}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == small("nano_gpt").graph.fingerprint


class Routed(nn.Module):
    """Experts that run on the rows sent to them: how many, only the data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(choice == index)
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_blocks_with_sizes_that_only_data_decides_are_one_kind() -> None:
    graph = layers_of((nn.Sequential(*(Routed() for _ in range(3)), Loss()), {"input": torch.randn(4, 16)}))
    kinds = kinds_by_name(graph)
    assert kinds["1"] == kinds["2"]
