"""An operator of your own, its rule, and what `autoplan verify` says of a rule that is not true.

    autoplan plan examples/own_operator.py:build --gpus 2xA100 --strategy tensor=2 -o plan.json
    autoplan verify examples/own_operator.py:build plan.json     # the same numbers
    autoplan verify examples/own_operator.py:wrong plan.json     # different, first in layer blocks.0

A rule names the dimensions of what goes in and comes out: one that stands on both sides may be split over GPUs, and
`!` forbids it. Without a rule an operator is computed whole on every GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoplan


@torch.library.custom_op("example::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """What is left of each row without its mean."""
    return x - x.mean(-1, keepdim=True)


@centre.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


centre.register_autograd(lambda context, gradient: centre(gradient))

RIGHT = "example.centre: x[*b, c!] -> y[*b, c!]"  # a mean over all of c: every GPU needs whole rows
WRONG = "example.centre: x[*b, c] -> y[*b, c]"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(centre(self.up(x))))


class Classifier(nn.Module):
    def __init__(self, width: int = 256, blocks: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def build(rule: str = RIGHT) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """What `file.py:factory` calls."""
    autoplan.register_rule(rule)
    torch.manual_seed(0)
    return Classifier(), (torch.randn(8, 256), torch.randint(10, (8,)))


def wrong() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The same model, with a rule by which each GPU takes the mean of its own part."""
    return build(WRONG)
