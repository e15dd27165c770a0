"""Models whose layers are no chain: skips, towers, an encoder's output read by every decoder layer.

As :mod:`tests.support.models`: each builder returns ``(model, batch)``, seeded, float32, eight samples, no dropout, no
batch statistics; ``model(**batch)`` is the loss.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import SAMPLES, Batch


def _generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Convolutions(nn.Module):
    """Two convolutions with GroupNorm, and between them a shift for each channel from the noise's embedding."""

    def __init__(self, channels_in: int, channels: int, noise: int) -> None:
        super().__init__()
        self.shift = nn.Linear(noise, channels)
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm_1 = nn.GroupNorm(2, channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm_2 = nn.GroupNorm(2, channels)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        x = F.silu(self.norm_1(self.conv_1(x))) + self.shift(noise)[:, :, None, None]
        return F.silu(self.norm_2(self.conv_2(x)))


class UNet(nn.Module):
    """Down, across and up; every level's output goes straight to the level of the same size on the way up, and an
    embedding of the noise level to all of them."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        pairs, noise = list(itertools.pairwise(sizes)), 2 * width
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.noise = nn.Sequential(nn.Linear(4, noise), nn.SiLU(), nn.Linear(noise, noise))
        self.down = nn.ModuleList([Convolutions(a, b, noise) for a, b in pairs])
        self.across = Convolutions(sizes[-1], sizes[-1], noise)
        self.up = nn.ModuleList([Convolutions(b + b, a, noise) for a, b in reversed(pairs)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor, level: Tensor, target: Tensor) -> Tensor:
        x, noise, skips = self.stem(images), self.noise(level), []
        for block in self.down:
            x = block(x, noise)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.across(x, noise)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1), noise)
        return F.mse_loss(self.head(x), target)


class Residual(nn.Module):
    """A small network beside its input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


class Tower(nn.Module):
    def __init__(self, features: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Residual(features) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TwoTowers(nn.Module):
    """A recommender: what a user did and what an item is, each embedded and read by a tower; their product and a small
    network give the rating. ``layers``: of the user's tower and of the item's; ``bags``: embedded by EmbeddingBag, or
    by the mean of embeddings."""

    def __init__(self, features: int, layers: tuple[int, int], *, bags: bool, rows: int = 64) -> None:
        super().__init__()
        table = nn.EmbeddingBag if bags else nn.Embedding
        self.bags = bags
        self.user_table, self.item_table = table(rows, features), table(rows, features)
        self.user, self.item = Tower(features, layers[0]), Tower(features, layers[1])
        self.rate_1 = nn.Linear(3 * features, features)
        self.rate_2 = nn.Linear(features, 1)

    def forward(self, history: Tensor, words: Tensor, rating: Tensor) -> Tensor:
        user, item = self.user_table(history), self.item_table(words)
        if not self.bags:
            user, item = user.mean(1), item.mean(1)
        user, item = self.user(user), self.item(item)
        both = torch.cat([user, item, user * item], dim=-1)
        return F.mse_loss(self.rate_2(torch.relu(self.rate_1(both))).squeeze(-1), rating)


class EncoderDecoder(nn.Module):
    """torch's own transformer: the encoder's output is read by every layer of the decoder."""

    def __init__(self, features: int = 16, layers: int = 3, vocabulary: int = 48, heads: int = 2) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, features)
        self.target = nn.Embedding(vocabulary, features)
        settings = {"nhead": heads, "dim_feedforward": 2 * features, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(features, **settings) for _ in range(layers)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(features, **settings) for _ in range(layers)])
        self.head = nn.Linear(features, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        memory = self.source(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(labels)
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions, with GroupNorm for BatchNorm."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm_1 = nn.GroupNorm(2, channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm_2 = nn.GroupNorm(2, channels)
        self.conv_3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.norm_3 = nn.GroupNorm(2, 4 * channels)
        self.downsample = (
            nn.Conv2d(channels_in, 4 * channels, 1, stride=stride, bias=False)
            if stride > 1 or channels_in != 4 * channels
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = F.relu(self.norm_2(self.conv_2(y)))
        return F.relu(self.norm_3(self.conv_3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """Depths and strides of ResNet-50, as narrow as ``width``."""

    def __init__(self, width: int = 8, depths: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.GroupNorm(2, width)
        channels, stages = width, []
        for index, depth in enumerate(depths):
            blocks = []
            for position in range(depth):
                blocks.append(Bottleneck(channels, width * 2**index, 2 if index and not position else 1))
                channels = 4 * width * 2**index
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, stride=2, padding=1)
        x = F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    """An LSTM of several layers over tokens."""

    def __init__(self, features: int = 16, layers: int = 4, vocabulary: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.lstm = nn.LSTM(features, features, num_layers=layers, batch_first=True)
        self.head = nn.Linear(features, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(tokens))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def unet(*, samples: int = SAMPLES, width: int = 8, levels: int = 3, size: int = 16) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    generator = _generator()
    images = torch.randn(samples, 3, size, size, generator=generator)
    level = torch.randn(samples, 4, generator=generator)
    return UNet(width, levels), {"images": images, "level": level, "target": images.flip(1)}


def two_towers(
    *, samples: int = SAMPLES, features: int = 16, layers: tuple[int, int] = (4, 4), bags: bool = False
) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    generator = _generator()
    return TwoTowers(features, layers, bags=bags), {
        "history": torch.randint(64, (samples, 6), generator=generator),
        "words": torch.randint(64, (samples, 4), generator=generator),
        "rating": torch.randn(samples, generator=generator),
    }


def _tokens(samples: int) -> Batch:
    generator = _generator()
    return {
        "tokens": torch.randint(48, (samples, 7), generator=generator),
        "labels": torch.randint(48, (samples, 7), generator=generator),
    }


def encoder_decoder(*, samples: int = SAMPLES, layers: int = 3) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return EncoderDecoder(layers=layers), _tokens(samples)


def recurrent(*, samples: int = SAMPLES, layers: int = 4) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Recurrent(layers=layers), _tokens(samples)


def resnet(*, samples: int = SAMPLES, width: int = 8) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    generator = _generator()
    return ResNet(width), {
        "images": torch.randn(samples, 3, 32, 32, generator=generator),
        "labels": torch.randint(10, (samples,), generator=generator),
    }
