"""transformers.Trainer around a planned program. Needs accelerate.

torchrun --nproc-per-node 4 examples/bridges/trainer.py
"""

from __future__ import annotations

import tempfile

import small
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

import autoplan
from autoplan.integrations.transformers import PlannedTrainer


def main() -> None:
    cpu = not torch.cuda.is_available()
    model = small.model()
    program = autoplan.compile(
        model,
        device="cpu" if cpu else "cuda",
        example_inputs=small.batch(),
        strategy={"data": 2, "tensor": 2, "micro_batch_size": 2},
    )
    folder = f"{tempfile.gettempdir()}/autoplan-trainer"
    settings = TrainingArguments(
        folder, use_cpu=cpu, num_train_epochs=2, learning_rate=1e-2, logging_steps=4, save_strategy="no", report_to=[]
    )
    trainer = PlannedTrainer(program, model=model, args=settings, train_dataset=small.dataset())
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{program.plan.strategy.describe()}: loss", " ".join(f"{float(loss):.3f}" for loss in losses))
        print("from_pretrained reads it:", type(AutoModelForCausalLM.from_pretrained(folder)).__name__)


if __name__ == "__main__":
    main()
