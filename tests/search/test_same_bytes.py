"""One question, ten processes with ten hash seeds: one plan, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import dataclasses
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem

ends = Dense(flops=4e12, elements=60_000_000, shared="table")
layers = [ends, *[Dense(flops=1e12 * (1 + i % 3), elements=70_000_000 + 9_000_000 * (i % 2)) for i in range(10)], ends]
plan = search(problem(layers, cluster(4, nodes=2, memory_gib=8.0), global_batch=16))
print(dataclasses.replace(plan, seconds={}).to_json())
"""


def plan_of(seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_two_hash_seeds_give_the_same_plan() -> None:
    first, second = plan_of(1), plan_of(2)
    assert "pipeline" in first
    assert first == second


@pytest.mark.wide
def test_ten_hash_seeds_give_the_same_plan() -> None:
    assert len({plan_of(seed) for seed in range(10)}) == 1
