"""Nothing fits: by how much, which term, and changes that were tried."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoplan.cluster import Cluster
from autoplan.cost_models import memory
from autoplan.errors import InfeasibleError
from autoplan.search import search
from autoplan.search.engine import Engine
from autoplan.search.infeasible import fits, like, smallest_count
from autoplan.search.problem import Problem
from autoplan.search.questions import min_gpus
from autoplan.search.shortfall import nearest
from autoplan.search.space import open_space
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


def test_no_plan_is_nearer_than_the_nearest() -> None:
    """The nearest is not among the first 64 by their bounds: of the first 100, each alone, none is short of less."""
    body = Dense(elements=200_000_000, saved=GIB / 2, core=GIB / 8, core_flops=1e10, input=2.0**22)
    head = Dense(elements=300_000_000, saved=2 * GIB)
    layers = [Dense(elements=600_000_000, input=2.0**24), *[body] * 16, head]
    question = problem(layers, cluster(8, nodes=2, memory_gib=4), global_batch=64)
    engine = Engine(space=open_space(question), solver=None)
    found = nearest(engine)
    assert found is not None and found.short_bytes > 0
    first = np.argsort(engine.bounds.short_bytes, kind="stable")[:100]
    alone = [nearest(engine, np.arange(len(engine.space.candidates)) == index) for index in first]
    shorts = [short.short_bytes for short in alone if short is not None]
    assert found.short_bytes == min(shorts) < min(shorts[:64])


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


# State of 6.4 GB and 1.6 of the step's temporary, 1 GiB of activations a sample, on cards of 12 GiB.
HEAVY = [Dense(elements=50_000_000, saved=128 * 2.0**20)] * 8


@pytest.mark.parametrize(
    ("key", "value", "change"),
    [
        ("micro_batch_size", 8, "micro_batch_size=4 fits"),
        ("recompute", "none", "recompute=full fits"),
        ("zero_stage", 0, "zero_stage=1 fits"),
        ("tensor", 1, "tensor=2 fits"),
    ],
)
def test_the_nearest_change_of_what_was_forced(key: str, value: object, change: str) -> None:
    """All four are forced, and any one of them changed would do; each was tried for real."""
    forced = {"micro_batch_size": 8, "recompute": "none", "zero_stage": 0, "tensor": 1, "pipeline": 1}
    assert forced[key] == value
    error = infeasible(problem(HEAVY, cluster(4, memory_gib=12), forced=forced))
    (found,) = (text for text in error.suggestions if text.startswith(change))
    changed = {**forced, key: re.findall(r"=(\w+) ", found)[0]}
    search(problem(HEAVY, cluster(4, memory_gib=12), forced=changed))


def test_more_gpus_and_larger_ones() -> None:
    """Nothing forced, so no value is left to change: more cards of the kind, or cards with more memory."""
    layers = [Dense(elements=150_000_000)] * 16
    error = infeasible(problem(layers, cluster(1, memory_gib=12)))
    assert any(text.startswith("4 GPUs of this kind are the fewest that fit") for text in error.suggestions)
    (larger,) = (text for text in error.suggestions if "each) fit" in text)
    assert re.match(r"1 \S+ \(\d+\.\d\d GiB each\) fit", larger)


def test_a_smaller_batch_where_it_cannot_be_split() -> None:
    layers = [Dense(elements=10_000_000, saved=float(GIB))] * 4
    whole: dict[str, Any] = {"batch_coupling": "batch_norm at n.py:3", "recompute_policies": ("none",)}
    error = infeasible(problem(layers, cluster(1, memory_gib=12), global_batch=8, **whole))
    (found,) = (text for text in error.suggestions if text.startswith("global_batch="))
    batch = int(re.findall(r"=(\d+) fits", found)[0])
    search(problem(layers, cluster(1, memory_gib=12), global_batch=batch, **whole))
    infeasible(problem(layers, cluster(1, memory_gib=12), global_batch=2 * batch, **whole))


FOURS = 'device = "H100"\nnodes = 3\ngpus_per_node = 4\n[inter]\ngbit_per_s = 100\n'


@pytest.mark.parametrize(
    ("spec", "gpus", "nodes", "each", "named"),
    [
        ("fours.toml", 1, 1, 1, "1 GPU as in fours.toml"),
        ("fours.toml", 4, 1, 4, "4 GPUs as in fours.toml"),
        ("fours.toml", 8, 2, 4, "2 nodes of 4 GPUs as in fours.toml"),
        ("fours.toml", 6, 0, 0, ""),
        ("3x4xH100", 8, 2, 4, "2 nodes of 4 GPUs as in 3x4xH100-80GB-SXM"),
        ("3x4xH100", 2, 1, 2, "2xH100-80GB-SXM"),
        ("8xH100", 16, 2, 8, "2x8xH100-80GB-SXM"),
    ],
)
def test_other_counts_of_a_cluster_are_in_its_nodes_and_named_for_what_they_are(
    spec: str, gpus: int, nodes: int, each: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fours.toml").write_text(FOURS)
    have = Cluster.parse(spec)
    found = like(have, gpus, have.device.name)
    if not nodes:
        assert found is None
        return
    assert found is not None
    assert (found.nodes, found.gpus_per_node, found.spec) == (nodes, each, named)
    assert found.device == have.device and (nodes == 1 or found.inter == have.inter)


def test_the_fewest_of_a_cluster_file_are_whole_nodes_of_its_size(tmp_path: Path) -> None:
    """2.4 G parameters take 44.7 GiB, on cards of 4: of nodes of three, the doublings 4 and 8 fill none."""
    path = tmp_path / "threes.toml"
    device = '{ base = "H100", memory_bytes = 4.3e9, context_bytes = 1.0 }'
    path.write_text(f"device = {device}\nnodes = 2\ngpus_per_node = 3\n")
    question = problem([Dense(elements=150_000_000)] * 16, Cluster.parse(path), recompute_policies=("none",))
    found = min_gpus(question)
    assert found.gpus % 3 == 0 and found.cluster.gpus_per_node == 3
    search(dataclasses.replace(question, cluster=found.cluster, global_batch=found.global_batch))
