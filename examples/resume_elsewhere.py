"""Train on 4 GPUs, lose two, go on with the rest: a checkpoint is resumed under any plan, on any number of GPUs.

    python examples/resume_elsewhere.py          # CPU processes stand for GPUs

Weights, optimizer, random state and the position in the data go on where they were, so that the losses are those of a
run that was never interrupted.
"""

from __future__ import annotations

import tempfile

import torch
from train_gpt import LEARNING_RATE, batches, build_model, read_corpus

import autoplan

HALF, STEPS = 4, 8


def train(folder: str, until: int, gpus: int, strategy: dict[str, int]) -> tuple[list[float], str]:
    """What each process runs: from the last checkpoint, if there is one, to step ``until``."""
    data = list(batches(read_corpus(), STEPS))
    program = autoplan.compile(build_model(), gpus=gpus, device="cpu", example_inputs=data[0], strategy=strategy)
    optimizer = torch.optim.AdamW(program.parameters(), lr=LEARNING_RATE)
    checkpoints = autoplan.Checkpoints(folder, program, optimizer)
    resumed = checkpoints.resume()
    losses = []
    for step in range(resumed.step if resumed else 0, until):
        losses.append(program.step(data[step]))
        optimizer.step()
        optimizer.zero_grad()
    checkpoints.save(until)
    checkpoints.wait()
    return losses, program.plan.strategy.describe()


def main() -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first, before = autoplan.launch(train, one, HALF, 4, {"pipeline": 2, "tensor": 2}, gpus=4, device="cpu")[0]
        then, after = autoplan.launch(train, one, STEPS, 2, {"data": 2, "zero_stage": 1}, gpus=2, device="cpu")[0]
        whole, _ = autoplan.launch(train, other, STEPS, 2, {"data": 2}, gpus=2, device="cpu")[0]
    print(f"steps 0 to {HALF - 1} on 4 GPUs, {before}:", " ".join(f"{loss:.4f}" for loss in first))
    print(f"steps {HALF} to {STEPS - 1} on 2 GPUs, {after}:", " ".join(f"{loss:.4f}" for loss in then))
    apart = max(abs(a - b) for a, b in zip([*first, *then], whole, strict=True))
    print(f"never interrupted: at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
