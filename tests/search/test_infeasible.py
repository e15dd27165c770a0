"""Nothing fits: by how much, which term, and changes that were tried."""

from __future__ import annotations

import dataclasses
import re

import pytest

from autoplan.cost_models import memory
from autoplan.errors import InfeasibleError
from autoplan.search import search
from autoplan.search.infeasible import fits, smallest_count
from autoplan.search.problem import Problem
from tests.support.layer_graphs import GIB, Dense, cluster, problem

# 2.4 G parameters: 16 bytes of state each and 4 of the step's temporary, 44.7 GiB, on two cards of 12 GiB.
LAYERS = [Dense(elements=150_000_000)] * 16


def infeasible(question: Problem) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        search(question)
    assert caught.value.exit_code == 1
    return caught.value


def test_says_by_how_much_and_which_term() -> None:
    error = infeasible(problem(LAYERS, cluster(2, memory_gib=12), zero_stages=(0,)))
    # Half the parameters a card: 1.2 G x (16 + 4) bytes = 22.4 GiB, the step's temporary with the allocator's share,
    # one communicator's buffers and the workspace: about 23 GiB of 12.
    temporary = 1.2e9 * 4 * (1 + memory.ALLOCATOR_RESERVE)
    expected = 1.2e9 * 16 + temporary + memory.COMMUNICATOR_BYTES + memory.WORKSPACE_BYTES - 12 * GIB
    assert error.short_by_bytes == pytest.approx(expected, rel=1e-6)
    assert error.term == "optimizer_state"
    assert f"{expected / GIB:.2f} GiB" in error.what and "optimizer state, 8.94 GiB" in error.what


def test_the_smallest_count_is_searched() -> None:
    question = problem(LAYERS, cluster(2, memory_gib=12), zero_stages=(0,))
    found = smallest_count(question)
    assert found is not None
    count = found.problem.cluster.gpus
    assert f"{count} GPUs of this kind are the fewest" in "; ".join(infeasible(question).suggestions)
    # 45 GiB of state and temporaries: 4 cards hold 48 GiB, less what is fixed.
    assert count == 4 and found.strategy.gpus == 4
    machines = dataclasses.replace(question.cluster, gpus_per_node=count)
    assert search(dataclasses.replace(question, cluster=machines)).gpus_used <= count


def test_whole_nodes_are_counted_between_doublings() -> None:
    """On 2 nodes of 2 it does not fit; 3 nodes are enough, and 4 would be the next doubling."""
    layers = [Dense(elements=150_000_000)] * 24  # 67 GiB
    question = problem(layers, cluster(2, nodes=2, memory_gib=13), zero_stages=(0,), global_batch=6)
    infeasible(question)
    found = smallest_count(question)
    assert found is not None and found.problem.cluster.gpus == 6


def test_a_forced_key_that_is_in_the_way_is_named() -> None:
    layers = [Dense(elements=10_000_000, saved=float(GIB))] * 4
    question = problem(layers, cluster(2, memory_gib=12), forced={"micro_batch_size": 16}, recompute_policies=("none",))
    error = infeasible(question)
    assert error.term == "saved_activations"
    named = [text for text in error.suggestions if text.startswith("leave `micro_batch_size` free")]
    assert named and re.search(r"micro-batch \d+", named[0])
    assert fits(dataclasses.replace(question, forced={}))


def test_what_would_fit_but_is_not_executed_yet() -> None:
    layers = [Dense(elements=10_000_000, saved=20.0 * GIB, input=float(2**20))] * 2
    error = infeasible(problem(layers, cluster(1, memory_gib=12), global_batch=1, recompute_policies=("none",)))
    assert not any("recompute" in text for text in error.suggestions)  # recomputing opens a window as large
    layers = [Dense(elements=10_000_000, saved=2.0 * GIB, input=float(2**20))] * 8
    error = infeasible(problem(layers, cluster(1, memory_gib=12), global_batch=1, recompute_policies=("none",)))
    assert any("with recompute" in text for text in error.suggestions)
