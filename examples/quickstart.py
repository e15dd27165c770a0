"""Plan a model that no machine here could hold, and read the answer. Needs no GPU and no memory.

python examples/quickstart.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autoplan


class Classifier(nn.Module):
    """Any module that returns its loss will do."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        self.head = nn.Linear(width, 1000)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(features)), labels)


def main() -> None:
    with torch.device("meta"):  # shapes without storage
        model = Classifier(width=16384, layers=48).to(torch.bfloat16)
        batch = {"features": torch.empty(512, 16384, dtype=torch.bfloat16), "labels": torch.empty(512).long()}

    plan = autoplan.plan(model, gpus="8xA100-80GB", example_inputs=batch)
    print(plan.explain())

    try:
        autoplan.plan(model, gpus="1xL4", example_inputs=batch)
    except autoplan.InfeasibleError as error:
        print(f"On one L4 the answer is no: {error}")


if __name__ == "__main__":
    main()
