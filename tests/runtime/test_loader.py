"""Data ranks share every global batch out among them, and a run resumes where it stopped under another plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, default_collate

from autoplan.errors import StrategyError
from autoplan.plan import Strategy
from autoplan.runtime.loader import PlannedLoader, loader_options
from tests.runtime.test_program import PLANS
from tests.support import models
from tests.support.processes import run_ranks
from tests.support.training import capture_double, program_of

SAMPLES = list(range(101))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(SAMPLES)


def loader(data: int, rank: int, *, dataset: Any = SAMPLES, **options: Any) -> PlannedLoader:
    options = {"global_batch": 12, "shuffle": True, "seed": 7} | options
    return PlannedLoader(dataset, strategy=Strategy(data=data), data_rank=rank, **options)


def global_batches(data: int, **options: Any) -> list[list[int]]:
    """An epoch's batches, each put together from its ranks' rows in order."""
    ranks = [[batch.tolist() for batch in loader(data, rank, **options)] for rank in range(data)]
    return [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("data", [2, 3, 4, 6, 12])
def test_ranks_rows_make_the_batches_of_one_process(data: int) -> None:
    assert global_batches(data) == global_batches(1)


def test_an_epoch_has_every_sample_once_and_epochs_differ() -> None:
    whole = loader(1, 0, global_batch=1)
    first, second = [b.item() for b in whole], [b.item() for b in whole]
    assert sorted(first) == sorted(second) == SAMPLES
    assert first != second
    assert [b.item() for b in loader(1, 0, global_batch=1, shuffle=False)] == SAMPLES


@given(taken=st.integers(0, 24), before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 3, 6]), rank=st.data())
def test_a_position_means_the_same_under_any_plan(taken: int, before: int, after: int, rank: st.DataObject) -> None:
    stopped = loader(before, 0)
    running = endless(stopped)
    for _ in range(taken):
        next(running)
    resumed = loader(after, rank.draw(st.integers(0, after - 1), label="rank"))
    resumed.load_state_dict(stopped.state_dict())
    undisturbed = endless(loader(after, resumed._data_rank))
    for _ in range(taken):
        next(undisturbed)
    again = endless(resumed)
    for _ in range(10):  # over the end of an epoch of 8
        assert torch.equal(next(again), next(undisturbed))


def endless(each: PlannedLoader) -> Any:
    while True:
        yield from each


def test_workers_that_read_ahead_do_not_move_the_position() -> None:
    reading = loader(2, 0, num_workers=1)
    running = iter(reading)
    next(running)
    next(running)
    assert reading.state_dict()["batch"] == 2
    running.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": [1, 2, 3]}, "3 samples make no global batch of 12"),
        ({"drop_last": False}, "a global batch of 5 samples does not divide over 2"),
        ({"dataset": Stream()}, "Stream has no length"),
        ({"dataset": (n for n in SAMPLES)}, "generator has no length"),
    ],
)
def test_what_ranks_cannot_share_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        loader(2, 0, **options)


def test_a_position_in_other_data_is_refused() -> None:
    with pytest.raises(StrategyError, match="taken with 101 samples, and this loader has 50"):
        loader(2, 0, dataset=SAMPLES[:50]).load_state_dict(loader(2, 0).state_dict())
    with pytest.raises(StrategyError, match="12 samples a global batch, and this loader has 24"):
        loader(2, 0, global_batch=24).load_state_dict(loader(2, 0).state_dict())
    with pytest.raises(StrategyError, match="batch_size is the plan's to choose"):
        loader_options(batch_size=3)


@pytest.mark.parametrize("plan", ["dp2", "dp2-pp2"])
def test_a_program_trains_on_its_loaders_rows(plan: str) -> None:
    _, _, captured = capture_double(*models.mlp())
    chosen, _ = PLANS[plan]
    generator = torch.Generator().manual_seed(0)
    rows = [{name: torch.randn(16, generator=generator, dtype=torch.float64) for name in ("x", "y")} for _ in range(24)]

    def on_rank(rank: int, ranks: int) -> list[tuple[float, float]]:
        program = program_of(captured, **chosen)
        whole = [default_collate(rows[first : first + 8]) for first in (0, 8, 16)]
        return [
            (program.step(batch, local=True), program.step(expected))
            for batch, expected in zip(program.dataloader(rows), whole, strict=True)
        ]

    for found in run_ranks(on_rank, Strategy(**chosen).gpus):
        assert len(found) == 3
        for by_rows, by_whole in found:
            assert by_rows == pytest.approx(by_whole, abs=1e-12)
