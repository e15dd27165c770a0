"""Which numbers of GPUs are tried: more GPUs never make a worse answer, whatever the batch."""

from __future__ import annotations

import itertools

import pytest

from autoplan.search import search
from autoplan.search.degrees import fills_nodes
from autoplan.search.engine import Engine
from autoplan.search.space import open_space
from tests.support.layer_graphs import Dense, cluster, problem

LAYERS = [Dense(elements=20_000_000)] * 6


@pytest.mark.parametrize("global_batch", [1, 2, 3, 5, 6, 7, 10, 12, 24, 60])
def test_one_more_gpu_never_makes_the_best_step_longer(global_batch: int) -> None:
    best_s = [
        search(problem(LAYERS, cluster(gpus), global_batch=global_batch, max_tensor=1)).certificate.best_s
        for gpus in range(1, 9)
    ]
    for fewer, more in itertools.pairwise(best_s):
        assert more <= fewer * (1 + 1e-9)


def test_a_batch_that_the_gpus_do_not_divide_is_shared_by_those_that_it_divides_among() -> None:
    assert search(problem(LAYERS, cluster(8), global_batch=7, max_tensor=1)).strategy.data == 7
    plan = search(problem(LAYERS, cluster(4, nodes=4), global_batch=12, max_tensor=1))
    assert plan.strategy.data == 12 and plan.gpus_used == 12


def test_what_is_tried_is_part_of_one_node_or_whole_nodes() -> None:
    machines = cluster(4, nodes=6)
    question = problem(LAYERS, machines, global_batch=30)
    tried = Engine(space=open_space(question)).space.candidates
    assert {3, 5, 10} <= set(tried.data.tolist()) and 20 in tried.gpus
    assert all(fills_nodes(machines, int(gpus)) for gpus in tried.gpus)


def test_ranks_of_one_node_are_priced_on_its_own_links_whatever_nodes_stand_beside_it() -> None:
    forced = {"data": 3, "tensor": 1, "pipeline": 1}
    one, many = (
        search(problem(LAYERS, cluster(4, nodes=nodes), global_batch=12, forced=forced)).predicted for nodes in (1, 3)
    )
    assert one.step_time_s == many.step_time_s


def test_what_forced_degrees_leave_is_for_data_as_far_as_the_batch_goes() -> None:
    plan = search(problem(LAYERS, cluster(7), global_batch=14, forced={"tensor": 2, "pipeline": 1}))
    assert (plan.strategy.data, plan.gpus_used) == (2, 4)
    plan = search(problem(LAYERS, cluster(8), global_batch=6, forced={"tensor": 2, "pipeline": 1}))
    assert (plan.strategy.data, plan.strategy.tensor, plan.gpus_used) == (3, 2, 6)
