"""A LightningModule trained under a plan. Needs lightning.

torchrun --nproc-per-node 2 examples/bridges/lightning_fit.py
"""

from __future__ import annotations

import os
from typing import Any

import small
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from autoplan.integrations.lightning import PlannedStrategy


class Language(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = small.model()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss  # the whole planned step
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    strategy = PlannedStrategy(example_inputs=small.batch(), strategy={"pipeline": 2, "micro_batch_size": 2})
    trainer = Trainer(
        strategy=strategy,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        accelerator="auto",
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Language()
    trainer.fit(module, DataLoader(small.dataset(), batch_size=small.GLOBAL_BATCH))  # type: ignore[arg-type]
    if trainer.is_global_zero:
        planned = strategy.program.plan.strategy.describe()
        print(f"{planned}: loss", " ".join(f"{loss:.3f}" for loss in module.losses))


if __name__ == "__main__":
    main()
