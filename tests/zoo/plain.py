"""Models of plain torch, as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.branching_models import (
    Bottleneck,
    EncoderDecoder,
    Recurrent,
    TwoTowers,
    UNet,
)
from tests.zoo.entry import (
    HEADS,
    HIDDEN,
    SAMPLES,
    SEQUENCE,
    VOCABULARY,
    Built,
    Entry,
    image_batch,
    seeded,
    token_batch,
    tokens,
)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.c_fc, self.mlp_proj = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        parts = self.c_attn(self.ln_1(x)).split(hidden, dim=2)
        query, key, value = (part.view(batch, sequence, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, sequence, hidden))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Learned positions, the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.h = nn.ModuleList([GPTBlock() for _ in range(2)])
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.h:
            x = block(x)
        return token_loss(self.lm_head(self.ln_f(x)), labels)


class Alibi(nn.Module):
    """Attention written out, with ALiBi's slopes added to the scores; a buffer holds them."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        batch, length, _ = x.shape
        query, key, value = (
            layer(self.norm(x)).view(batch, length, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        bias = self.slopes[:, None, None] * distance
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + bias
        scores = scores.masked_fill(distance > 0, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, -1)
        return token_loss(self.head(x + self.out(mixed)), labels)


class DiTBlock(nn.Module):
    """Attention and a network, each shifted, scaled and gated by the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, 6 * HIDDEN))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        batch, patches, hidden = x.shape
        qkv = self.qkv(self.norm_1(x) * (1 + scale_1) + shift_1)
        query, key, value = qkv.reshape(batch, patches, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, patches, hidden)
        x = x + gate_1 * self.out(mixed)
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class DiT(nn.Module):
    """A diffusion transformer over patches, with the time's sines and a class as its condition."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, HIDDEN, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, HIDDEN) * 0.02)
        self.time = nn.Sequential(nn.Linear(8, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.classes = nn.Embedding(8, HIDDEN)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(2)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, 2 * 2 * 4)

    def forward(self, latents: Tensor, time: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(4) * math.log(100.0) / 4)
        angles = time[:, None] * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.classes(labels)
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        x = self.out(self.norm(x)).view(-1, 4, 4, 2, 2, 4)
        return F.mse_loss(x.permute(0, 5, 1, 3, 2, 4).reshape(latents.shape), noise)


class MixerBlock(nn.Module):
    def __init__(self, patches: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
        self.within = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm_2(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, 4, stride=4)
        self.blocks = nn.Sequential(*[MixerBlock(16) for _ in range(2)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class BasicBlock(nn.Module):
    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(before, channels, 3, stride=stride, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn_2 = nn.BatchNorm2d(channels)
        self.down = nn.Sequential()
        if stride > 1:
            self.down = nn.Sequential(nn.Conv2d(before, channels, 1, stride=stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn_2(self.conv_2(F.relu(self.bn_1(self.conv_1(x)))))
        return F.relu(y + self.down(x), inplace=True)


class ResNet(nn.Module):
    """torchvision's ResNet with batch norms and in-place ReLUs, small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layers = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.head = nn.Linear(16, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn(self.conv(images)), inplace=True), 2)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1)), labels)


class GroupResNet(nn.Module):
    """Bottlenecks with GroupNorm, and no batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Bottleneck(8, 4, 1), Bottleneck(16, 8, 2))
        self.head = nn.Linear(32, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


class MobileNet(nn.Module):
    """Depthwise convolutions, a gate of squeeze and excitation, hard swishes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.widen, self.norm = nn.Conv2d(8, 16, 1), nn.GroupNorm(4, 16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.narrow = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.hardswish(self.stem(images))
        y = F.relu6(self.depthwise(F.hardswish(self.norm(self.widen(x)))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))
        x = x + self.narrow(y * F.hardsigmoid(gate))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), labels)


class FrozenNorms(nn.Module):
    """Batch norms that use their statistics and no longer change them, as in fine-tuning; a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm_1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm_2 = nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.BatchNorm2d(16)
        self.third, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 8)
        for norm in (self.norm_1, self.norm_2):
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.normal_(norm.running_mean)

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        self.norm_1.eval()
        self.norm_2.eval()
        return self

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm_1(self.first(images)))
        x = F.relu(self.norm_2(self.second(x)))
        return F.cross_entropy(self.head(self.third(x).mean((2, 3))), labels)


class ConvNeXt(nn.Module):
    """A depthwise convolution, a norm over channels moved to the back, a network, and a scale for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, HIDDEN, 2, stride=2)
        self.mix = nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.widen, self.narrow = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        y = self.narrow(F.gelu(self.widen(self.norm(self.mix(x).permute(0, 2, 3, 1))))) * self.scale
        return F.cross_entropy(self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3))), labels)


class AutoEncoder(nn.Module):
    """Variational, with transposed convolutions on the way up; the noise comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.mean, self.spread = nn.Linear(256, HIDDEN), nn.Linear(256, HIDDEN)
        self.widen = nn.Linear(HIDDEN, 256)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        y = self.down(images).flatten(1)
        mean, spread = self.mean(y), self.spread(y)
        latent = mean + noise * torch.exp(0.5 * spread)
        made = self.up(self.widen(latent).view(-1, 16, 4, 4))
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1)
        return F.mse_loss(made, images) + 0.01 * divergence.mean()


class Gated(nn.Module):
    """A GRU over tokens, then attention that pools its states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True, bidirectional=True)
        self.score = nn.Linear(2 * HIDDEN, 1)
        self.head = nn.Linear(2 * HIDDEN, 8)

    def forward(self, input_ids: Tensor, classes: Tensor) -> Tensor:
        states, _ = self.gru(self.embed(input_ids))
        weights = self.score(states).softmax(dim=1)
        return F.cross_entropy(self.head((weights * states).sum(1)), classes)


class CellByCell(nn.Module):
    """An LSTM cell written out and called once a position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.gates = nn.Linear(2 * HIDDEN, 4 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        hidden = cell = torch.zeros_like(x[:, 0])
        states = []
        for position in range(4):
            gates = self.gates(torch.cat([x[:, position], hidden], dim=-1))
            enter, forget, candidate, leave = gates.chunk(4, dim=-1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            states.append(hidden)
        return token_loss(self.head(torch.stack(states, dim=1)), labels[:, :4])


class Graph(nn.Module):
    """Graph attention over dense adjacency matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
        self.scores = nn.ModuleList([nn.Linear(HIDDEN, 2) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = nodes
        for layer, score in zip(self.layers, self.scores, strict=True):
            messages = layer(x)
            ends = score(messages)
            logits = F.leaky_relu(ends[..., :1] + ends[..., 1:].transpose(1, 2), 0.2)
            weights = logits.masked_fill(edges == 0, -1e9).softmax(-1)
            x = x + F.elu(torch.einsum("bij,bjc->bic", weights, messages))
        return F.cross_entropy(self.head(x.amax(dim=1)), labels)


class Crosses(nn.Module):
    """A deep and cross network of bags and numbers, as rankers of advertisements have it."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList([nn.EmbeddingBag(32, 8, mode=mode) for mode in ("sum", "mean")])
        self.bottom = nn.Linear(4, 8)
        self.cross = nn.ModuleList([nn.Linear(24, 24) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(40, 1)

    def forward(self, numbers: Tensor, first: Tensor, second: Tensor, clicked: Tensor) -> Tensor:
        parts = [self.bottom(numbers), self.bags[0](first), self.bags[1](second)]
        x = start = torch.cat(parts, dim=-1)
        for layer in self.cross:
            x = start * layer(x) + x
        logits = self.head(torch.cat([x, self.deep(start)], dim=-1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


class Wave(nn.Module):
    """WaveNet: dilated causal convolutions with gates, every block's skip summed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.dilated = nn.ModuleList([nn.Conv1d(HIDDEN, 2 * HIDDEN, 2, dilation=2**i) for i in range(3)])
        self.mixed = nn.ModuleList([nn.Conv1d(HIDDEN, HIDDEN, 1) for _ in range(3)])
        self.head = nn.Conv1d(HIDDEN, VOCABULARY, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids).transpose(1, 2)
        skips = torch.zeros_like(x)
        for index, (dilated, mixed) in enumerate(zip(self.dilated, self.mixed, strict=True)):
            filtered, gate = dilated(F.pad(x, (2**index, 0))).chunk(2, dim=1)
            y = mixed(filtered.tanh() * gate.sigmoid())
            x, skips = x + y, skips + y
        return token_loss(self.head(F.relu(skips)).transpose(1, 2), labels)


class Capsules(nn.Module):
    """Experts that all run, weighed by a gate: a dense mixture of batched matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        self.up = nn.Parameter(torch.randn(4, HIDDEN, 2 * HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 2 * HIDDEN, HIDDEN) * 0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        inner = F.gelu(torch.einsum("bc,ecf->ebf", x, self.up))
        outer = torch.bmm(inner, self.down)
        mixed = (outer * self.gate(x).softmax(-1).t().unsqueeze(-1)).sum(0)
        return F.smooth_l1_loss(mixed, y)


def _built(
    make: Callable[..., nn.Module], batch: Callable[[], Any], loss_fn: Callable[..., Any] | None = None, **settings: Any
) -> Callable[[], Built]:
    def build() -> Built:
        torch.manual_seed(0)
        return make(**settings).train(), batch(), loss_fn

    return build


def _classes() -> Tensor:
    return torch.randint(8, (SAMPLES,), generator=seeded(3))


def _vectors(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=seeded(seed))


def _dit_batch() -> dict[str, Tensor]:
    return {"latents": _vectors(4, 8, 8), "time": _vectors(), "labels": _classes(), "noise": _vectors(4, 8, 8, seed=5)}


def _unet_batch() -> dict[str, Tensor]:
    return {"images": _vectors(3, 8, 8), "level": _vectors(4), "target": _vectors(3, 8, 8, seed=5)}


def _towers_batch() -> dict[str, Tensor]:
    return {"history": tokens(sequence=6), "words": tokens(sequence=4), "rating": _vectors()}


def _crosses_batch() -> dict[str, Tensor]:
    return {
        "numbers": _vectors(4),
        "first": tokens(sequence=3, vocabulary=32),
        "second": tokens(sequence=5, vocabulary=32),
        "clicked": (_vectors(seed=6) > 0).float(),
    }


def _graph_batch() -> dict[str, Tensor]:
    edges = (_vectors(6, 6, seed=7) > 0).float() + torch.eye(6)
    return {"nodes": _vectors(6, HIDDEN), "edges": edges, "labels": _classes()}


def _pairs(**sizes: int) -> dict[str, Tensor]:
    return {name: _vectors(size, seed=index + 8) for index, (name, size) in enumerate(sizes.items())}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(HIDDEN, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Classifier(nn.Module):
    """nn.TransformerEncoder, its first position classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 2 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids))[:, 0])


PLAIN = (
    Entry(name="nanoGPT", kind="torch", build=_built(NanoGPT, token_batch), sequence=True, causal=True),
    Entry(name="attention with ALiBi", kind="torch", build=_built(Alibi, token_batch), sequence=True, causal=True),
    Entry(
        name="nn.Transformer layers",
        kind="torch",
        build=_built(
            EncoderDecoder, lambda: {"tokens": tokens(), "labels": tokens()}, features=HIDDEN, layers=2, heads=HEADS
        ),
        sequence=True,
    ),
    Entry(
        name="nn.TransformerEncoder",
        kind="torch",
        build=_built(Classifier, lambda: (tokens(), _classes()), F.cross_entropy),
        sequence=True,
    ),
    Entry(name="DiT", kind="torch", build=_built(DiT, _dit_batch), sequence=True),
    Entry(name="MLP-Mixer", kind="torch", build=_built(Mixer, image_batch), sequence=True),
    Entry(name="U-Net", kind="torch", build=_built(UNet, _unet_batch, width=8, levels=2)),
    Entry(name="ResNet, batch norm", kind="torch", build=_built(ResNet, image_batch)),
    Entry(name="frozen batch norms", kind="torch", build=_built(FrozenNorms, image_batch)),
    Entry(name="ResNet, group norm", kind="torch", build=_built(GroupResNet, image_batch)),
    Entry(name="MobileNet", kind="torch", build=_built(MobileNet, image_batch)),
    Entry(name="ConvNeXt", kind="torch", build=_built(ConvNeXt, image_batch)),
    Entry(
        name="variational auto-encoder",
        kind="torch",
        build=_built(AutoEncoder, lambda: {"images": _vectors(3, 16, 16), "noise": _vectors(HIDDEN)}),
    ),
    Entry(
        name="two towers, bags",
        kind="torch",
        build=_built(TwoTowers, _towers_batch, features=HIDDEN, layers=(1, 1), bags=True),
    ),
    Entry(name="deep and cross, bags", kind="torch", build=_built(Crosses, _crosses_batch)),
    Entry(
        name="LSTM",
        kind="torch",
        build=_built(Recurrent, lambda: {"tokens": tokens(), "labels": tokens()}, features=HIDDEN, layers=2),
    ),
    Entry(
        name="GRU, both ways",
        kind="torch",
        build=_built(Gated, lambda: {"input_ids": tokens(), "classes": _classes()}),
    ),
    Entry(name="LSTM cell by cell", kind="torch", build=_built(CellByCell, token_batch)),
    Entry(name="graph attention", kind="torch", build=_built(Graph, _graph_batch)),
    Entry(name="WaveNet", kind="torch", build=_built(Wave, token_batch)),
    Entry(name="dense mixture", kind="torch", build=_built(Capsules, lambda: _pairs(x=HIDDEN, y=HIDDEN))),
    Entry(name="MLP", kind="torch", build=_built(MLP, lambda: (_vectors(HIDDEN), _classes()), F.cross_entropy)),
)
