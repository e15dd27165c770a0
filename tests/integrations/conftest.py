from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoplan.verification.precision import float64_throughout


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    """What transformers rounds to float32 on the way stays in float64, so that 1e-10 means something."""
    with float64_throughout():
        yield
