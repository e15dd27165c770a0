"""Lightning trains a program to the numbers of the module alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from autoplan.cluster import Cluster
from autoplan.errors import ModelError, StrategyError
from autoplan.layers import build_layers
from autoplan.plan import Strategy
from autoplan.runtime import Program
from tests.integrations.test_trainer import PLANS, assert_same, rows
from tests.support import models
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks
from tests.support.training import capture_double

pytestmark = pytest.mark.bridges
pytest.importorskip("lightning", reason="`make bridges` installs it")

GLOBAL_BATCH = 8


def lit_module(model: nn.Module) -> Any:
    from lightning.pytorch import LightningModule

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.log("held_out", self.model(**batch).loss)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Language()


def trainer(directory: Path, **more: Any) -> Any:
    from lightning.pytorch import Trainer

    options = {"max_epochs": 2, "enable_checkpointing": False} | more
    return Trainer(
        default_root_dir=directory,
        accelerator="cpu",
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def loader(plan: str = "", rank: int = 0) -> DataLoader[Any]:
    """Global batches in the order of the rows; a rank's part of them under ``plan``."""
    strategy = Strategy(**PLANS[plan]) if plan else Strategy()
    sampler = DistributedSampler(
        rows(),  # type: ignore[arg-type]
        num_replicas=strategy.data,
        rank=strategy.coordinates(rank).data,
        shuffle=False,
    )
    return DataLoader(rows(), batch_size=GLOBAL_BATCH // strategy.data, sampler=sampler)  # type: ignore[arg-type]


def strategy(captured: Any, plan: str) -> Any:
    from autoplan.integrations.lightning import PlannedStrategy

    layers = build_layers(captured)
    made = hand_plan(layers, **PLANS[plan])
    program = Program(captured, made, layers, cluster=Cluster.parse(f"{made.gpus}xcpu"), device="cpu")
    return PlannedStrategy(program=program)


@pytest.mark.parametrize("plan", PLANS)
def test_lightning_takes_the_single_processs_steps(plan: str, tmp_path: Path) -> None:
    model, _, captured = capture_double(*models.tiny_llama())
    alone = lit_module(copy.deepcopy(model))
    trainer(tmp_path).fit(alone, loader(), loader())
    ranks = Strategy(**PLANS[plan]).gpus

    def on_rank(rank: int, world: int) -> tuple[list[float], dict[str, Tensor], float]:
        module, planned = lit_module(model), strategy(captured, plan)
        run = trainer(tmp_path, strategy=planned, devices=ranks)
        run.fit(module, loader(plan, rank), loader())
        return module.losses, planned.program.state_dict(), float(run.callback_metrics["held_out"])

    for losses, weights, _ in run_ranks(on_rank, ranks):
        assert losses == pytest.approx(alone.losses, abs=1e-9)
        assert_same(weights, dict(alone.model.state_dict()))


def test_a_checkpoint_resumes_under_another_plan(tmp_path: Path) -> None:
    model, _, captured = capture_double(*models.tiny_llama())
    alone = lit_module(copy.deepcopy(model))
    trainer(tmp_path, max_epochs=3).fit(alone, loader())

    def first(rank: int, world: int) -> None:
        run = trainer(tmp_path, strategy=strategy(captured, "dp2"), devices=2, max_epochs=2)
        run.fit(lit_module(model), loader("dp2", rank))
        run.save_checkpoint(tmp_path / "two.ckpt")

    def second(rank: int, world: int) -> dict[str, Tensor]:
        planned = strategy(captured, "pp2")
        run = trainer(tmp_path, strategy=planned, devices=2, max_epochs=3)
        run.fit(lit_module(model), loader("pp2", rank), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
        return planned.program.state_dict()

    run_ranks(first, 2)
    for weights in run_ranks(second, 2):
        assert_same(weights, dict(alone.model.state_dict()))


def test_parameters_outside_the_planned_model_are_refused() -> None:
    from autoplan.integrations.lightning import _planned

    module = nn.ModuleDict({"model": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    with pytest.raises(ModelError, match=r"2 trainable parameters are outside `model`, `head\.weight` first"):
        _planned(module, "model")
    with pytest.raises(ModelError, match="no submodule `net` to plan"):
        _planned(module, "net")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed", "64-true"])
def test_a_precision_that_the_plan_would_not_follow_is_refused(precision: Any, tmp_path: Path) -> None:
    from autoplan.integrations.lightning import PlannedStrategy

    run = trainer(tmp_path, strategy=PlannedStrategy(gpus=1), devices=1, precision=precision)
    model, _ = models.tiny_llama()
    with pytest.raises(StrategyError, match=f"precision {precision}: the plan decides that"):
        run.fit(lit_module(model), loader())
