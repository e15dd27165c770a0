"""From the user's batch to this rank's micro-batches.

Rows d x per to (d + 1) x per of dimension 0 belong to data rank d. A rank cuts its rows into as many micro-batches as
keep each at or below the planned size, as evenly as they divide; a batch of the planned size gives the planned ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autoplan.capture import Capture, InputSpec
from autoplan.errors import StrategyError
from autoplan.plan import Strategy


def micro_batch_sizes(rows: int, strategy: Strategy, *, fixed: int | None = None) -> tuple[int, ...]:
    """Sizes of the micro-batches of one data rank's ``rows``, largest first; never more than one where the plan has
    one, because its loss may not be splittable. ``fixed``: the only size that the graph runs at.

    Raises StrategyError where ``rows`` is not a multiple of ``fixed``.
    """
    unsplit = strategy.data == 1 and strategy.micro_batches == 1
    if fixed is not None:
        if rows % fixed or (unsplit and rows != fixed):
            legal = str(fixed) if unsplit else f"a multiple of {fixed * strategy.data} samples"
            raise StrategyError(
                f"a global batch of {rows * strategy.data} samples, and this model could only be traced at "
                f"micro-batches of {fixed}",
                where="batch",
                legal=legal,
                attempt="pad or drop the last batch",
            )
        return (fixed,) * (rows // fixed)
    count = 1 if unsplit else -(-rows // strategy.micro_batch_size)
    return even_sizes(rows, count)


def even_sizes(rows: int, count: int) -> tuple[int, ...]:
    """``rows`` in ``count`` parts, largest first."""
    base, larger = divmod(rows, count)
    return (base + 1,) * larger + (base,) * (count - larger)


def rows_of_rank(batch: int, strategy: Strategy, data_rank: int) -> range:
    """The rows of a global batch that belong to ``data_rank``. Raises StrategyError where they do not divide."""
    per_rank, rest = divmod(batch, strategy.data)
    if rest or not per_rank:
        below = per_rank * strategy.data
        counts = [str(count) for count in (below, below + strategy.data) if count]
        raise StrategyError(
            f"a global batch of {batch} samples does not divide over {strategy.data} data-parallel ranks",
            where="batch",
            legal=f"a multiple of {strategy.data}, such as {' or '.join(counts)}",
            attempt="drop the last, smaller batch (drop_last=True of a DataLoader), or plan with fewer data ranks",
        )
    return range(data_rank * per_rank, (data_rank + 1) * per_rank)


def uneven_rows(batch: int, strategy: Strategy, data_rank: int) -> tuple[range, int]:
    """The rows of any global batch that ``data_rank`` evaluates, as evenly as they divide, and in how many
    micro-batches: equally many on every rank, because ranks may meet in each. Raises StrategyError where a rank would
    have no row."""
    base, larger = divmod(batch, strategy.data)
    if not base:
        raise StrategyError(
            f"a batch of {batch} samples leaves some of {strategy.data} data-parallel ranks without any",
            where="batch",
            legal=f"{strategy.data} samples or more",
            attempt="a larger batch, or its samples with the next batch's",
        )
    start = data_rank * base + min(data_rank, larger)
    most = base + (larger > 0)
    unsplit = strategy.data == 1 and strategy.micro_batches == 1
    count = 1 if unsplit else min(base, -(-most // strategy.micro_batch_size))
    return range(start, start + base + (data_rank < larger)), count


def batch_rows(capture: Capture, tensors: Mapping[str, Tensor]) -> int:
    """Samples in a batch, from its first batched tensor; 1 where none is."""
    for spec in capture.inputs:
        if spec.batched:
            return int(tensors[spec.placeholder].shape[0])
    return 1


def part(specs: tuple[InputSpec, ...], tensors: Mapping[str, Tensor], rows: range) -> dict[str, Tensor]:
    """Those rows of the batched tensors, and the others whole."""
    return {
        spec.placeholder: tensors[spec.placeholder][rows.start : rows.stop]
        if spec.batched
        else tensors[spec.placeholder]
        for spec in specs
    }


def to_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
