"""Several machines: the same script on each, started by torchrun (torchrun.sh) or Slurm (train.sbatch).

Rank 0 plans and the others follow its plan. `AUTOPLAN_DEVICE=cpu` runs it on gloo processes, as its test does.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import autoplan

STEPS, BATCH, WIDTH = 5, 16, 64


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.layers(x)), y)


def main() -> None:
    torch.manual_seed(0)
    model = Regression()
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(BATCH, WIDTH, generator=generator), "y": torch.randn(BATCH, 1, generator=generator)}
    # On GPUs say which they are, "2x8xH100": links between machines are slower than inside, and plans depend on it.
    program = autoplan.compile(model, gpus=os.environ.get("AUTOPLAN_GPUS"), example_inputs=batch)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}  loss {loss:.4f}  ({program.plan.strategy.describe()})", flush=True)


if __name__ == "__main__":
    main()
