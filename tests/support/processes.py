"""Real ranks for tests: forked gloo processes, killed all together when one fails or time is up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autoplan.runtime.launch import launch


def run_ranks(
    fn: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 50.0, deadline_s: float = 110.0
) -> list:
    """``fn(rank, ranks, *args)`` on forked gloo ranks; what each returned, by rank.

    Raises autoplan's RuntimeFault with the failing rank's traceback. ``timeout_s``: a rank's patience with another;
    ``deadline_s``: of the whole.
    """

    def body() -> Any:
        return fn(dist.get_rank(), dist.get_world_size(), *args)

    return launch(body, gpus=ranks, device="cpu", timeout_s=timeout_s, deadline_s=deadline_s)
