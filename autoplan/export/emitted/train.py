"""Train. Replace `batches` by your data; everything else stands.

torchrun --nproc-per-node GPUS_A_NODE [--nnodes N --rdzv-endpoint HOST:PORT] train.py --steps 100
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import model
from program import Program


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Global batches of random data, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        batch = {}
        for name, spec in model.INPUTS.items():
            shape = (model.GLOBAL_BATCH, *spec.shape[1:]) if spec.batched else spec.shape
            draw: Any = torch.randn if spec.dtype.is_floating_point else partial(torch.randint, spec.below)
            batch[name] = draw(shape, generator=generator).to(spec.dtype)
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser(description=model.__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--weights", help="directory with whole tensors to start from")
    parser.add_argument("--compile", metavar="BACKEND", help="torch.compile the stages, e.g. with inductor")  # if EAGER
    parser.add_argument("--compile", metavar="BACKEND", default="inductor", help="of torch.compile")  # if COMPILED
    parser.add_argument("--save", help="directory to write the weights to at the end")
    options = parser.parse_args()
    program = Program(options.weights, compiler=options.compile)
    optimizer = torch.optim.AdamW(program.parameters(), lr=options.learning_rate)
    for step, batch in zip(range(options.steps), batches(seed=0), strict=False):
        loss = program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
    if options.save:
        program.save(options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
