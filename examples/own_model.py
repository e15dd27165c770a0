"""A model of your own, for the command line: a function that returns (model, example inputs, loss).

    autoplan plan examples/own_model.py:build --gpus 8xA100-80GB --global-batch 512
    autoplan fit examples/own_model.py:build --gpus 1xL4
    autoplan verify examples/own_model.py:build plan.json

The model lives on `meta`: shapes and no memory, so that any size is planned on any machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, BLOCKS, CLASSES = 8192, 12, 1000


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(features)


def build() -> tuple[nn.Module, dict[str, Tensor], object]:
    """What `file.py:factory` calls. The loss takes the model's output, and of the inputs what it names."""

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float(), labels)

    with torch.device("meta"):
        model = Classifier().to(torch.bfloat16)
        inputs = {"features": torch.empty(64, WIDTH, dtype=torch.bfloat16), "labels": torch.empty(64).long()}
    return model, inputs, loss_fn


if __name__ == "__main__":
    import autoplan

    model, inputs, loss_fn = build()
    plan = autoplan.plan(model, gpus="8xA100-80GB", example_inputs=inputs, loss_fn=loss_fn, global_batch=512)
    print(plan.explain())
