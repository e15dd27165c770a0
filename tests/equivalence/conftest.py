from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoplan.verification.precision import float64_throughout


@pytest.fixture(autouse=True)
def nothing_rounds_to_float32() -> Iterator[None]:
    """transformers computes norms and the loss in float32 whatever the model's dtype; see the module used."""
    with float64_throughout():
        yield
