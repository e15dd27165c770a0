"""N ranks as threads of one process: a :class:`autoplan.passes.operators.Communicator` without processes.

Sums go in the order of the ranks, so a run repeats bit for bit. A rank that raises takes the others down with it, and
its error is the one that comes out. Tensors must be contiguous, as gloo needs them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoplan.passes.operators import communicating

TIMEOUT_S = 30.0


class ThreadWorld:
    """``counts[rank]``: collectives by name that each rank has taken part in."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.counts = [Counter[str]() for _ in range(size)]
        self._box: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """``function(rank)`` on every rank, each in its own communicator; the results by rank."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                with communicating(ThreadCommunicator(self, rank)):
                    results[rank] = function(rank)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self._barrier.broken:
            raise TimeoutError(f"a rank waited {TIMEOUT_S} s for the others: {self.counts}")
        return results

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        self._box[rank] = value
        self._barrier.wait(TIMEOUT_S)
        found = list(self._box)
        self._barrier.wait(TIMEOUT_S)
        return found


class ThreadCommunicator:
    """One rank's view; every axis is the whole world."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world, self._rank = world, rank

    def rank(self, axis: str) -> int:
        return self._rank

    def size(self, axis: str) -> int:
        return self._world.size

    def all_reduce(self, tensor: Tensor, axis: str, operation: str = "sum") -> None:
        values = self._exchange("all_reduce", tensor)
        stacked = torch.stack(values)
        tensor.copy_(stacked.amax(0) if operation == "max" else stacked.sum(0))

    def all_gather(self, tensor: Tensor, axis: str) -> list[Tensor]:
        return self._exchange("all_gather", tensor)

    def reduce_scatter(self, parts: list[Tensor], axis: str) -> Tensor:
        values = self._exchange("reduce_scatter", torch.stack(parts))
        return torch.stack([value[self._rank] for value in values]).sum(0)

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], axis: str) -> Tensor:
        assert len(rows) == sum(sent)
        values = self._exchange("all_to_all", torch.cat([torch.tensor(sent, dtype=rows.dtype), rows.reshape(-1)]))
        parts = []
        for value in values:
            sizes = [int(size) for size in value[: self._world.size]]
            runs = value[self._world.size :].view(sum(sizes), *rows.shape[1:]).split(sizes)
            parts.append(runs[self._rank])
        assert [len(part) for part in parts] == received
        return torch.cat(parts)

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        if not tensor.is_contiguous():
            raise AssertionError(f"{name} of a tensor that is not contiguous")
        self._world.counts[self._rank][name] += 1
        return self._world.exchange(self._rank, tensor.detach().clone())
