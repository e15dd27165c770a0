"""transformers.Trainer trains a program to the numbers of the model alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoplan.cluster import Cluster
from autoplan.errors import StrategyError
from autoplan.layers import build_layers
from autoplan.plan import Strategy
from tests.support import models
from tests.support.plans import hand_plan
from tests.support.processes import run_ranks
from tests.support.training import assert_close, capture_double

pytestmark = pytest.mark.bridges
pytest.importorskip("accelerate", reason="the Trainer needs it; `make bridges` installs it")

GLOBAL_BATCH = 8
STEPS = 5
PLANS = {
    "dp2": {"data": 2, "micro_batch_size": 2, "micro_batches": 2},
    "pp2": {"pipeline": 2, "micro_batch_size": 2, "micro_batches": 4},
    "tp2": {"tensor": 2, "micro_batch_size": 4, "micro_batches": 2},
    "dp2-zero3": {"data": 2, "micro_batch_size": 4, "zero_stage": 3},
}


def rows() -> list[dict[str, Tensor]]:
    batch = models.token_batch(3 * GLOBAL_BATCH)
    return [{name: tensor[i] for name, tensor in batch.items()} for i in range(3 * GLOBAL_BATCH)]


def settings(directory: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", "learning_rate": 1e-2} | more,
    )


def train_alone(model: nn.Module, directory: Path) -> tuple[list[float], dict[str, Tensor]]:
    from transformers import Trainer

    from autoplan.runtime.loader import PlannedLoader

    class InOurOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return PlannedLoader(
                self.train_dataset,
                strategy=Strategy(),
                data_rank=0,
                global_batch=GLOBAL_BATCH,
                shuffle=True,
                seed=self.args.seed,
            )

        def num_examples(self, dataloader: Any) -> int:
            return len(dataloader) * GLOBAL_BATCH

    model = copy.deepcopy(model)
    trainer = InOurOrder(model=model, args=settings(directory), train_dataset=rows())
    trainer.train()
    return losses(trainer), dict(model.state_dict())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(name, found[name], tensor)


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def planned_trainer(model: nn.Module, captured: Any, plan: str, directory: Path, **more: Any) -> Any:
    from autoplan.integrations.transformers import PlannedTrainer
    from autoplan.runtime import Program

    layers = build_layers(captured)
    made = hand_plan(layers, **PLANS[plan])
    program = Program(captured, made, layers, cluster=Cluster.parse(f"{made.gpus}xcpu"), device="cpu")
    held_out = rows()[:8]
    return PlannedTrainer(
        program, model=model, args=settings(directory, **more), train_dataset=rows(), eval_dataset=held_out
    )


@pytest.mark.parametrize("plan", PLANS)
def test_the_trainer_takes_the_single_processs_steps(plan: str, tmp_path: Path) -> None:
    model, _, captured = capture_double(*models.tiny_llama())
    expected_losses, expected = train_alone(model, tmp_path / "alone")

    def on_rank(rank: int, ranks: int) -> tuple[list[float], dict[str, Tensor], float]:
        trainer = planned_trainer(model, captured, plan, tmp_path / "planned")
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        held_out = trainer.evaluate(rows()[:8])["eval_loss"]
        return losses(trainer), trainer._program.state_dict(), held_out

    found = run_ranks(on_rank, Strategy(**PLANS[plan]).gpus)
    for found_losses, weights, _ in found:
        assert found_losses == pytest.approx(expected_losses, abs=1e-4)  # the Trainer rounds what it logs
        assert_same(weights, expected)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert_same(dict(loaded.state_dict()), expected)


def test_a_checkpoint_resumes_under_another_plan(tmp_path: Path) -> None:
    model, _, captured = capture_double(*models.tiny_llama())
    _, expected = train_alone(model, tmp_path / "alone")
    run = tmp_path / "run"

    def first(rank: int, ranks: int) -> None:
        trainer = planned_trainer(model, captured, "dp2", run, save_strategy="steps", save_steps=2)
        trainer.train()

    def second(rank: int, ranks: int) -> dict[str, Tensor]:
        trainer = planned_trainer(model, captured, "pp2", run)
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
        return trainer._program.state_dict()

    run_ranks(first, 2)
    for weights in run_ranks(second, 2):
        assert_same(weights, expected)


def test_the_best_weights_are_the_programs_when_they_are_asked_for(tmp_path: Path) -> None:
    """A learning rate that is far too high makes the first evaluation the best."""
    model, _, captured = capture_double(*models.tiny_llama())
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}

    def on_rank(rank: int, ranks: int) -> tuple[list[float], float, dict[str, Tensor]]:
        more = often | {"load_best_model_at_end": True, "learning_rate": 3.0}
        trainer = planned_trainer(model, captured, "pp2", tmp_path / "run", **more)
        trainer.train()
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        return evaluated, trainer.evaluate()["eval_loss"], trainer._program.state_dict()

    from safetensors.torch import load_file

    for evaluated, afterwards, weights in run_ranks(on_rank, 2):
        assert min(evaluated) < evaluated[-1]
        assert afterwards == pytest.approx(min(evaluated), abs=1e-4)
        best = load_file(tmp_path / "run" / f"checkpoint-{1 + evaluated.index(min(evaluated))}" / "model.safetensors")
        assert_same(weights, {name: best.get(name, weights[name]) for name in weights})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"bf16": True}, "bf16 and fp16"),
    ({"fsdp": True}, "deepspeed"),
    ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
    ({"gradient_checkpointing": True}, "gradient_checkpointing"),
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size"),
]


@pytest.mark.parametrize(("setting", "message"), REFUSED)
def test_what_the_plan_decides_is_refused(setting: dict[str, Any], message: str, tmp_path: Path) -> None:
    from autoplan.integrations.transformers import PlannedTrainer

    with pytest.raises(StrategyError, match=message):
        PlannedTrainer(None, model=nn.Linear(1, 1), args=settings(tmp_path, **setting))  # type: ignore[arg-type]
