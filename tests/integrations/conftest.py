from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autoplan.verification.precision import float64_throughout


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    """What transformers rounds to float32 on the way stays in float64, so that 1e-10 means something."""
    with float64_throughout():
        yield


@pytest.fixture(autouse=True)
def nothing_left_in_this_process() -> Iterator[None]:
    """A trainer that runs here leaves a process group, and the variables by which the next one makes its own: ranks
    forked later would inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if dist.is_initialized():
        dist.destroy_process_group()
