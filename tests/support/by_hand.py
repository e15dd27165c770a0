"""Blocks of a GPT and of a Llama as one writes them for a group of tensor-parallel ranks, after Megatron-LM.

Without a group they are plain modules, which autoplan plans and torch's own tools wrap. With one, each holds its share
of the heads, of the perceptron's features and of the vocabulary as plain parameters, and Megatron's f and g
(Shoeybi et al. 2019, section 3) are written where they belong; like Megatron's they reduce in place, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Group = dist.ProcessGroup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    vocabulary: int
    length: int
    width: int
    depth: int
    heads: int


def ranks_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def copied(x: Tensor, group: Group) -> Tensor:
    """Megatron's f: a value that split products are about to read."""
    return x if group is None else _Copied.apply(x, group)


def row_product(linear: nn.Linear, x: Tensor, group: Group) -> Tensor:
    """A product of split features, summed by Megatron's g; the bias once."""
    if group is None:
        return linear(x)
    total = _Summed.apply(F.linear(x, linear.weight), group)
    return total if linear.bias is None else total + linear.bias


class GPTBlock(nn.Module):
    """``heads`` of ``width / heads``, a perceptron of four times the width, LayerNorms and biases."""

    split: ClassVar[
        dict[str, int]
    ] = {  # over which dimension a group's ranks split each parameter; what is not named is whole
        **{f"{name}.{kind}": 0 for name in ("query", "key", "value", "up") for kind in ("weight", "bias")},
        "out.weight": 1,
        "down.weight": 1,
    }

    def __init__(self, width: int, heads: int, group: Group = None) -> None:
        super().__init__()
        self.group, self.head_width = group, width // heads
        part = width // ranks_of(group)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, part) for _ in range(3))
        self.out = nn.Linear(part, width)
        self.up, self.down = nn.Linear(width, 4 * part), nn.Linear(4 * part, width)

    def forward(self, x: Tensor) -> Tensor:
        y = copied(self.norm_1(x), self.group)
        query, key, value = (
            product(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + row_product(self.out, mixed, self.group)
        y = copied(self.norm_2(x), self.group)
        return x + row_product(self.down, F.gelu(self.up(y)), self.group)


class LlamaBlock(nn.Module):
    """``heads`` query heads on half as many keys and values, rotary positions, a gated perceptron, RMSNorms."""

    split: ClassVar[dict[str, int]] = {
        **{f"{name}.weight": 0 for name in ("query", "key", "value", "gate", "up")},
        "out.weight": 1,
        "down.weight": 1,
    }

    def __init__(self, width: int, heads: int, group: Group = None) -> None:
        super().__init__()
        self.group, self.head_width = group, width // heads
        part = width // ranks_of(group)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, part, bias=False), nn.Linear(part, width, bias=False)
        self.key, self.value = (nn.Linear(width, part // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * part, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * part, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = copied(self.norm_1(x), self.group)
        query, key, value = (
            product(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        half = self.head_width // 2
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10000 ** (
            torch.arange(half, device=x.device) / half
        )
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        query, key = (z * cos + torch.cat((-z[..., half:], z[..., :half]), dim=-1) * sin for z in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + row_product(self.out, mixed.transpose(1, 2).flatten(2), self.group)
        y = copied(self.norm_2(x), self.group)
        return x + row_product(self.down, F.silu(self.gate(y)) * self.up(y), self.group)


def share(whole: Mapping[str, Tensor], split: Mapping[str, int], group: Group) -> dict[str, Tensor]:
    """This rank's part of the parameters of ``whole``; ``split`` by the end of their names."""
    ranks, rank = ranks_of(group), dist.get_rank(group) if group is not None else 0
    found = {}
    for name, tensor in whole.items():
        dims = [dim for end, dim in split.items() if name == end or name.endswith("." + end)]
        found[name] = tensor.chunk(ranks, dims[0])[rank].clone() if dims else tensor.clone()
    return found


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


class _CrossEntropy(torch.autograd.Function):
    """The mean over rows of log sum exp minus the target's logit, of logits [rows, classes / ranks]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        index = target - dist.get_rank(group) * logits.shape[-1]
        elsewhere = (index < 0) | (index >= logits.shape[-1])
        index = index.masked_fill(elsewhere, 0).unsqueeze(-1)
        own = logits.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(-1), own])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0].unsqueeze(-1)), index, elsewhere)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        probabilities, index, elsewhere = ctx.saved_tensors
        down = probabilities.scatter_add(-1, index, elsewhere.to(probabilities.dtype).sub_(1.0).unsqueeze(-1))
        return down.mul_(gradients[0] / len(down)), None, None


def cross_entropy(logits: Tensor, target: Tensor, group: Group) -> Tensor:
    """The mean over all tokens; of a group's ranks each has its share of the classes."""
    logits, target = logits.flatten(0, -2), target.flatten()
    return F.cross_entropy(logits, target) if group is None else _CrossEntropy.apply(logits, target, group)


class GPTStage(nn.Module):
    """Some of a GPT's blocks, with the embeddings where it is ``first`` and the head where it is ``last``."""

    split: ClassVar[dict[str, int]] = {**GPTBlock.split, "tokens.weight": 0, "head.weight": 0}

    def __init__(self, shape: GPTShape, blocks: range, group: Group = None) -> None:
        super().__init__()
        self.group = group
        share = shape.vocabulary // ranks_of(group)
        self.first, self.last = blocks.start == 0, blocks.stop == shape.depth
        if self.first:
            self.tokens, self.positions = nn.Embedding(share, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleDict({str(index): GPTBlock(shape.width, shape.heads, group) for index in blocks})
        if self.last:
            self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, share, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embedded(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(copied(self.norm(x), self.group)) if self.last else x

    def embedded(self, text: Tensor) -> Tensor:
        if self.group is None:
            return self.tokens(text)
        index = text - dist.get_rank(self.group) * self.tokens.num_embeddings
        elsewhere = (index < 0) | (index >= self.tokens.num_embeddings)
        rows = self.tokens(index.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return _Summed.apply(rows, self.group)


class GPT(nn.Module):
    """All of it; returns the loss."""

    def __init__(self, shape: GPTShape, group: Group = None) -> None:
        super().__init__()
        self.stage = GPTStage(shape, range(shape.depth), group)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.stage(text), target, self.stage.group)
