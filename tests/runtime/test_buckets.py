"""Gradient buckets: every trainable parameter once, last first, one dtype each, within the limit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoplan.runtime.data_parallel import fill_buckets

LIMIT = 64


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]), st.booleans())))
def test_buckets(specs: list[tuple[int, torch.dtype, bool]]) -> None:
    parameters = {
        f"p{index}": nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=trainable)
        for index, (size, dtype, trainable) in enumerate(specs)
    }
    buckets = fill_buckets(parameters, limit_bytes=LIMIT)
    names = [name for bucket in buckets for name in bucket.names]
    assert names == [name for name, p in reversed(list(parameters.items())) if p.requires_grad]
    for bucket in buckets:
        held = [parameters[name] for name in bucket.names]
        assert len({p.dtype for p in held}) == 1
        assert len(held) == 1 or sum(p.numel() * p.element_size() for p in held) <= LIMIT
