"""A small GPT learns to write Python from the source of Python's own standard library, bytes as tokens.

    python examples/train_gpt.py                                       # one process
    autoplan run examples/train_gpt.py --gpus 4 --device cpu           # the plan that autoplan picks
    autoplan run examples/train_gpt.py --gpus 4 --device cpu --strategy pipeline=2,tensor=2 --metrics run

With `--metrics DIR` each step is measured beside what the plan predicted; `tensorboard --logdir DIR` shows the curves.

Nothing in the model knows of more than one GPU.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoplan

VOCABULARY = 256  # bytes
CONTEXT = 64
BATCH = 32
LEARNING_RATE = 1e-3
STEPS = 120


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a LayerNorm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.attention(self.norm_1(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in (query, key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the token embedding; returns the mean loss."""

    def __init__(self, *, layers: int = 4, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor, next_bytes: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), next_bytes.view(-1))


def build_model() -> GPT:
    """The same weights in every process and every run."""
    torch.manual_seed(0)
    return GPT()


def read_corpus() -> Tensor:
    """The standard library's top-level modules, in order of name, as one row of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(folder.glob("*.py")))), dtype=torch.uint8)


def batches(corpus: Tensor, steps: int) -> Iterator[dict[str, Tensor]]:
    """``steps`` random batches [BATCH, CONTEXT], the same in every process and every run."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(corpus) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
        rows = torch.stack([corpus[start : start + CONTEXT + 1] for start in starts]).long()
        yield {"text": rows[:, :-1].contiguous(), "next_bytes": rows[:, 1:].contiguous()}


def train_alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch in one process: the losses and the final weights."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches(read_corpus(), steps):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def train_planned(
    steps: int, *, gpus: int, device: str, strategy: dict[str, int] | None, metrics: str | None = None
) -> tuple[list[float], dict[str, Tensor], autoplan.Plan]:
    """The same loop around a compiled program; every process of the program runs it."""
    corpus = read_corpus()
    example = next(batches(corpus, 1))
    program = autoplan.compile(build_model(), gpus=gpus, device=device, example_inputs=example, strategy=strategy)
    optimizer = torch.optim.AdamW(program.parameters(), lr=LEARNING_RATE)
    losses = []
    measured = autoplan.Metrics(program, log_dir=metrics) if metrics else None
    feed = batches(corpus, steps)
    for batch in measured.track(feed, steps=steps) if measured else feed:
        losses.append(program.step(batch))
        optimizer.step()
        optimizer.zero_grad()
    if measured and os.environ.get("RANK") == "0":
        print(measured.report())
    return losses, program.state_dict(), program.plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--strategy", default="", help="such as pipeline=2,tensor=2; empty: autoplan decides")
    parser.add_argument("--metrics", metavar="DIR", help="measure each step, and write TensorBoard's files there")
    arguments = parser.parse_args()
    forced = {key: int(value) for key, value in (part.split("=") for part in arguments.strategy.split(",") if part)}

    started = time.perf_counter()
    if "WORLD_SIZE" not in os.environ:  # not under `autoplan run`
        losses, _ = train_alone(arguments.steps)
        print("one process")
    else:
        gpus, device = int(os.environ["WORLD_SIZE"]), os.environ["AUTOPLAN_DEVICE"]
        losses, _, plan = train_planned(
            arguments.steps, gpus=gpus, device=device, strategy=forced or None, metrics=arguments.metrics
        )
        if int(os.environ["RANK"]) > 0:
            return
        print(f"{gpus} processes: {plan.strategy.describe()}")
    for step in range(0, len(losses), 20):
        print(f"step {step:4d}  loss {losses[step]:.4f}")
    print(f"last       loss {losses[-1]:.4f}, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
