"""Random numbers (dropout) of a program on several GPUs.

On one GPU the model draws from torch's generator, as it does without autoplan. On several, each step draws one number
from it, on every rank alike; rank 0's is taken, so that ``torch.manual_seed`` there decides all. The forward of micro-
batch m in stage s on data rank d then runs on a generator seeded with a hash of (that number, d, s, m), and the rank's
own generator is put back after it:

- ranks of one tensor or context group draw the same numbers, as regions that they compute twice must;
- data ranks, stages and micro-batches draw different ones;
- the order in which a schedule runs micro-batches, and what a layer recomputes, change none.

An operator that the tensor axis splits draws for each rank's part from a stream of that rank's own; dropout of a share
of the sequence takes its part of what is drawn for the whole, so that a program draws the same numbers with sequence
parallelism and without (:mod:`autoplan.passes.draw_apart`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from autoplan.passes.graph_facts import GraphFacts
from autoplan.passes.split_stages import StageGraph
from autoplan.runtime.collectives import Mesh


class Randomness:
    """Seeds the forwards of one rank; ``stages`` are all of the program's, alike on every rank."""

    def __init__(self, mesh: Mesh, stages: Iterable[StageGraph]) -> None:
        self._mesh = mesh
        self._needed = mesh.strategy.gpus > 1 and any(map(_draws, stages))
        self._step = 0

    def begin_step(self) -> None:
        """Take this step's number (a collective over all ranks, where the program draws random numbers)."""
        if self._needed:
            drawn = torch.randint(2**62, (), dtype=torch.int64).to(self._mesh.device)
            self._step = int(self._mesh.broadcast(drawn, source=0).item())

    @contextmanager
    def around_forward(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Run a stage's forward of a micro-batch on a generator of their own."""
        if not self._needed or self._mesh.at is None:
            yield
            return
        device = self._mesh.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_seed(self._step, self._mesh.data_index, stage, micro_batch))
            yield


def _seed(*numbers: int) -> int:
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _draws(stage: StageGraph) -> bool:
    facts = GraphFacts(stage.graph_module.graph, stage.graph_module)
    return any(facts.is_random(node) for node in facts.order)
