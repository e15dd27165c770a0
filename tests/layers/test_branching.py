"""Layers of models that are no stack of equal blocks: nothing lost, fine enough for 4 to 8 stages, in-place writes kept
in order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.capture import capture
from autoplan.layers import build_layers
from autoplan.search.dag import down_sets
from tests.support import branching_models as branching


class Plain(nn.Module):
    """VGG's kind: convolutions and poolings one after the other, wider and wider."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for step in (1, 1, 0, 2, 2, 0, 4, 4, 4, 0, 8, 8, 8, 0, 8, 8, 8, 0):
            if step:
                layers += [nn.Conv2d(channels, width * step, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width * step
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(channels, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)


class Parallel(nn.Module):
    """Inception's kind: modules with names of their own, each of four branches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        quarter = channels // 4
        self.point = nn.Conv2d(channels, quarter, 1)
        self.three = nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.Conv2d(quarter, quarter, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.Conv2d(quarter, quarter, 5, padding=2))
        self.pooled = nn.Conv2d(channels, quarter, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pooled(F.max_pool2d(x, 3, 1, 1))
        return torch.cat([self.point(x), self.three(x), self.five(x), pooled], 1).relu_()


class Inception(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.first, self.second, self.third, self.fourth = (Parallel(channels) for _ in range(4))
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.fourth(self.third(self.second(self.first(self.stem(images)))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Recurrences(nn.Module):
    """An LSTM a layer."""

    def __init__(self, features: int = 16, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, features)
        self.lstms = nn.ModuleList([nn.LSTM(features, features, batch_first=True) for _ in range(layers)])
        self.head = nn.Linear(features, 48)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for lstm in self.lstms:
            x, _ = lstm(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def of_images(build: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    return build(), {"images": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))}


def of_tokens(build: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    return build(), {"tokens": torch.randint(48, (8, 7)), "labels": torch.randint(48, (8, 7))}


# The longest of 4 and of 8 stages, in units of an even share of the FLOPs: as published widths and depths allow.
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], float, float]] = {
    "resnet-50": (branching.resnet, 1.05, 1.6),
    "vgg-16": (functools.partial(of_images, Plain), 1.2, 1.4),
    "inception": (functools.partial(of_images, Inception), 1.25, 1.35),
    "unet": (functools.partial(branching.unet, levels=4, size=16), 1.3, 1.4),
    "two towers with bags": (functools.partial(branching.two_towers, layers=(8, 8), bags=True), 1.15, 1.35),
    "encoder-decoder": (functools.partial(branching.encoder_decoder, layers=6), 1.2, 1.6),
    "lstms": (functools.partial(of_tokens, Recurrences), 1.2, 1.4),
}


def longest_share(flops: list[float], stages: int) -> float:
    """The least longest stage over all cuts, in units of an even share."""
    total, reach = [0.0, *itertools.accumulate(flops)], len(flops)
    best = list(total)
    for _ in range(stages - 1):
        best = [min((max(best[i], total[j] - total[i]) for i in range(j)), default=0.0) for j in range(reach + 1)]
    return best[-1] * stages / total[-1]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_lost_and_stages_come_out_even(name: str) -> None:
    build, most_of_4, most_of_8 = MODELS[name]
    captured = capture(*build())
    layers = build_layers(captured)
    every = Counter(node.name for node in captured.graph_module.graph.nodes if node.op == "call_function")
    assert Counter(node for layer in layers.layers for node in layer.nodes) == every
    held = {parameter for layer in layers.layers for parameter in layer.parameters}
    assert held == {name for name, _ in captured.graph_module.named_parameters()}
    flops = [layers.kinds[layer.kind].flops for layer in layers.layers]
    assert longest_share(flops, 4) <= most_of_4
    assert longest_share(flops, 8) <= most_of_8


class Branch(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2.0) if self.in_place else x * 2.0)


class Written(nn.Module):
    """The first branch reads what the second may write onto."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = nn.ModuleList([Branch(in_place=False), Branch(in_place=in_place)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, second = (branch(x) for branch in self.branches)
        return self.head(first + second).sum()


@pytest.mark.parametrize("in_place", [False, True])
def test_what_writes_in_place_stays_behind_what_read_before(in_place: bool) -> None:
    layers = build_layers(capture(Written(in_place=in_place), (torch.randn(8, 4),)))
    assert [layer.name for layer in layers.layers] == ["stem", "branches.0", "branches.1", "head"]
    assert ((1, 2) in layers.keep_order) == in_place
    sets = down_sets(layers)
    assert (sets is None) == in_place


def test_writes_of_one_value_leave_branches_free() -> None:
    layers = build_layers(capture(*of_images(Inception)))
    assert layers.keep_order
    sets, free = down_sets(layers), down_sets(dataclasses.replace(layers, keep_order=()))
    assert sets is not None and free is not None
    assert len(sets.members) == len(free.members) > len(layers.layers) + 1
