"""Each rank's rows of every global batch, in an order that does not depend on the plan.

The position is counted in global batches, so that a run resumes under another plan or on other GPUs with the next
samples that nobody has seen yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autoplan.errors import StrategyError
from autoplan.plan import Strategy
from autoplan.runtime.batch import rows_of_rank


class PlannedLoader:
    """Batches of this rank's rows, for ``program.step(batch, local=True)``.

    Iterating runs over what is left of the current epoch; the next iteration begins the next one. Every epoch's order
    is drawn from ``seed`` and the epoch's number, alike on all ranks. ``state_dict()`` after a batch resumes behind it,
    whatever workers have read ahead.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        strategy: Strategy,
        data_rank: int,
        global_batch: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        **loader_options: Any,
    ) -> None:
        self._dataset, self._strategy, self._data_rank = dataset, strategy, data_rank
        self.global_batch, self._shuffle, self._seed = global_batch, shuffle, seed
        self._samples = _length(dataset)
        self._batches = self._samples // global_batch
        rest = self._samples % global_batch
        if rest and not drop_last:
            rows_of_rank(rest, strategy, data_rank)  # refuses what does not divide before the first step
            self._batches += 1
        if not self._batches:
            raise StrategyError(
                f"{self._samples} samples make no global batch of {global_batch}",
                where="dataset",
                legal=f"at least {global_batch} samples, or drop_last=False",
                attempt="a smaller global_batch",
            )
        self._options = loader_options
        self._epoch = self._taken = 0

    def __len__(self) -> int:
        """Global batches an epoch."""
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            self._dataset,  # type: ignore[arg-type]
            batch_sampler=self._rows(self._taken),
            **self._options,
        )
        for batch in loader:
            self._taken += 1
            yield batch
        self._epoch, self._taken = self._epoch + 1, 0

    def _rows(self, first: int) -> list[list[int]]:
        """Indices of this rank's rows of every global batch of the epoch from ``first`` on."""
        order = torch.arange(self._samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._samples, generator=generator)
        batches = []
        for batch in order[first * self.global_batch : self._batches * self.global_batch].split(self.global_batch):
            rows = rows_of_rank(len(batch), self._strategy, self._data_rank)
            batches.append(batch[rows.start : rows.stop].tolist())
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``; the current one is left where it stands."""
        if epoch != self._epoch:
            self._epoch, self._taken = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins; small integers, the same on every rank."""
        epoch, taken = (self._epoch + 1, 0) if self._taken == self._batches else (self._epoch, self._taken)
        return {
            "epoch": epoch,
            "batch": taken,
            "seed": self._seed,
            "samples": self._samples,
            "global_batch": self.global_batch,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go where :meth:`state_dict` was taken, under any plan. Raises StrategyError where the data or the global
        batch is another one, because the position would mean other samples."""
        own = self.state_dict()
        for key, what in (("samples", "samples"), ("global_batch", "samples a global batch"), ("seed", "as its seed")):
            if state[key] != own[key]:
                raise StrategyError(
                    f"the position was taken with {state[key]} {what}, and this loader has {own[key]}",
                    where="load_state_dict",
                    legal="the same dataset, global batch and seed",
                )
        self._epoch, self._taken = state["epoch"], state["batch"]


def _length(dataset: Any) -> int:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise StrategyError(
            f"{type(dataset).__name__} has no length and no items by number, so ranks cannot take rows of it",
            where="dataset",
            legal="a dataset with __len__ and __getitem__",
            attempt="iterate it on every rank alike and pass whole global batches: program.step(batch)",
        )
    return len(dataset)


def loader_options(**options: Any) -> dict[str, Any]:
    """What may be passed on to ``DataLoader``; raises StrategyError for what the plan decides."""
    for name in ("batch_size", "sampler", "batch_sampler"):
        if name in options:
            raise StrategyError(
                f"{name} is the plan's to choose",
                where=f"{name}=",
                legal="global_batch, shuffle, seed, drop_last, and the other options of torch's DataLoader",
            )
    return options
