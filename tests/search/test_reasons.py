"""Why the best of a family lost: what grows most of all that its step is spent on."""

from __future__ import annotations

import pytest

from autoplan.search import predict
from autoplan.search.evaluate import Evaluation, evaluate_decision
from autoplan.search.families import _largest_excess, _spent
from autoplan.search.space import open_space
from tests.support.layer_graphs import Dense, cluster, problem

LAYERS = [Dense(elements=30_000_000, core=2**20, core_flops=1e10), *[Dense(elements=100_000_000)] * 7]
EVEN, UNEVEN = (0, 2, 4, 6, 8), (0, 1, 2, 3, 8)
VIRTUAL = {"pipeline": 2, "data": 4, "schedule": "interleaved", "virtual_stages": 2, "micro_batch_size": 2}


def evaluated(forced: dict[str, object], cuts: tuple[int, ...]) -> Evaluation:
    question = problem(LAYERS, cluster(4, nodes=2, memory_gib=640.0, intra=20e9, inter=10e9), forced=forced)
    return evaluate_decision(open_space(question), predict(question).strategy, cuts)


@pytest.mark.parametrize(
    ("forced", "cuts"),
    [
        ({"data": 8, "zero_stage": 3, "micro_batch_size": 1}, (0, 8)),
        ({"data": 2, "pipeline": 4, "schedule": "1f1b", "recompute": "full"}, UNEVEN),
        ({"tensor": 2, "pipeline": 4, "schedule": "gpipe"}, EVEN),
        (VIRTUAL, EVEN),
        (VIRTUAL, UNEVEN),
        ({**VIRTUAL, "recompute": "full"}, EVEN),
    ],
)
def test_what_a_step_is_spent_on_makes_the_step(forced: dict[str, object], cuts: tuple[int, ...]) -> None:
    evaluation = evaluated(forced, cuts)
    spent, strategy = _spent(evaluation), evaluation.strategy
    assert sum(spent.values()) == pytest.approx(evaluation.step_s, rel=1e-9)
    assert all(seconds >= -1e-12 for seconds in spent.values())
    computed_s = sum(stage.compute_forward_s + stage.compute_backward_s for stage in evaluation.stages)
    assert spent["computation"] == pytest.approx(strategy.micro_batches * computed_s / strategy.pipeline, rel=1e-9)


def test_a_pipeline_of_virtual_stages_computes_what_one_of_plain_stages_does() -> None:
    plain = evaluated({"pipeline": 2, "data": 4, "schedule": "1f1b", "micro_batch_size": 2}, (0, 4, 8))
    assert _spent(plain)["computation"] == pytest.approx(_spent(evaluated(VIRTUAL, EVEN))["computation"], rel=1e-9)


def test_the_reason_beside_virtual_stages_is_what_grew() -> None:
    chosen = evaluated(VIRTUAL, EVEN)
    assert "recompute takes" in _largest_excess(evaluated({**VIRTUAL, "recompute": "full"}, EVEN), chosen)
    assert "busiest GPU's stages take" in _largest_excess(evaluated(VIRTUAL, UNEVEN), chosen)
    fewer = {"pipeline": 2, "data": 1, "tensor": 1, "schedule": "1f1b", "micro_batch_size": 2}
    assert _largest_excess(evaluated(fewer, (0, 4, 8)), chosen) == "it computes on 2 of 8 GPUs"
