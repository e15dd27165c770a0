"""Sequence parallelism in the search: forced, it prices the kinds and the sends that go with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoplan.errors import InfeasibleError, StrategyError
from autoplan.layers.types import Edge, LayerKind
from autoplan.search import Problem, predict, search
from tests.support.layer_graphs import Dense, cluster, problem

LAYERS = [Dense(elements=1_000_000)] * 6


def question(forced: dict[str, Any], *, gpus: int = 8) -> Problem:
    """Under sequence parallelism a kind keeps half of what it keeps without, and a rank sends its share."""
    plain = problem(LAYERS, cluster(gpus), forced=forced)

    def kinds(degree: int) -> tuple[LayerKind, ...]:
        if degree > 4:
            raise StrategyError(f"{degree} does not divide the sequence of 4")
        return tuple(_halved(kind) for kind in plain.tensor_kinds(degree))

    def edges(degree: int) -> tuple[Edge, ...]:
        whole = plain.layers.edges
        return tuple(dataclasses.replace(e, bytes_per_sample=e.bytes_per_sample / degree) for e in whole)

    return dataclasses.replace(plain, sequence_kinds=kinds, sequence_edges=edges)


def _halved(kind: LayerKind) -> LayerKind:
    operators = tuple(dataclasses.replace(op, saved_bytes=op.saved_bytes / 2) for op in kind.operators)
    return dataclasses.replace(kind, operators=operators)


def test_forced_it_keeps_and_sends_shares() -> None:
    degrees = {"data": 1, "tensor": 4, "pipeline": 2, "micro_batch_size": 2, "recompute": "none", "schedule": "1f1b"}
    whole, shares = (predict(question({**degrees, "sequence_parallel": on})) for on in (False, True))
    assert not whole.strategy.sequence_parallel
    assert shares.strategy == dataclasses.replace(whole.strategy, sequence_parallel=True)
    kept = [[stage.memory_terms["saved_activations"] for stage in plan.stages] for plan in (whole, shares)]
    assert kept[1] == pytest.approx([bytes_ / 2 for bytes_ in kept[0]])
    sent = [next(axis.bytes_per_step for axis in plan.axes if axis.name == "pipeline") for plan in (whole, shares)]
    assert sent[1] == pytest.approx(sent[0] / 4)


def test_left_open_it_is_taken_where_it_gains_and_only_there() -> None:
    needs_tensor = {"data": 1, "pipeline": 1, "tensor": 4}
    slower = question(needs_tensor)
    assert not search(slower).strategy.sequence_parallel  # as fast without: nothing is gained
    assert slower.sequence_kinds is not None
    quick = dataclasses.replace(
        slower, sequence_kinds=lambda degree: tuple(_quicker(kind) for kind in slower.tensor_kinds(degree))
    )
    plan = search(quick)
    assert plan.strategy.sequence_parallel and plan.certificate.status == "optimal"
    assert plan.predicted.step_time_s < search(slower).predicted.step_time_s
    assert "sequence_parallel" not in plan.forced
    forbidden = dataclasses.replace(quick, forced={**needs_tensor, "sequence_parallel": False})
    assert not search(forbidden).strategy.sequence_parallel


def test_left_open_it_is_taken_where_nothing_fits_without() -> None:
    layers = [Dense(elements=1_000_000, saved=2.0**31)] * 4
    degrees = {"data": 1, "pipeline": 1, "tensor": 4, "micro_batch_size": 32, "recompute": "none"}
    plain = problem(layers, cluster(4, memory_gib=60.0), forced=degrees)
    with pytest.raises(InfeasibleError):
        search(plain)
    halved = dataclasses.replace(
        plain, sequence_kinds=lambda degree: tuple(_halved(kind) for kind in plain.tensor_kinds(degree))
    )
    assert search(halved).strategy.sequence_parallel


def _quicker(kind: LayerKind) -> LayerKind:
    operators = tuple(
        dataclasses.replace(op, flops=op.flops / 2, backward_flops=op.backward_flops / 2) for op in kind.operators
    )
    return dataclasses.replace(kind, operators=operators)


@pytest.mark.parametrize("value", [True, "true"])
def test_forced_alone_it_takes_a_tensor_axis(value: object) -> None:
    plan = search(question({"sequence_parallel": value}))
    assert plan.strategy.sequence_parallel and plan.strategy.tensor in (2, 4)


@pytest.mark.parametrize(
    ("forced", "gpus", "what"),
    [
        ({"sequence_parallel": True, "tensor": 1}, 8, "tensor axis"),
        ({"sequence_parallel": True}, 1, "tensor axis"),
        ({"sequence_parallel": True, "tensor": 8}, 8, "does not divide the sequence"),
        ({"sequence_parallel": "maybe"}, 8, "cannot be"),
    ],
)
def test_where_it_cannot_be_the_reason_is_given(forced: dict[str, Any], gpus: int, what: str) -> None:
    with pytest.raises(StrategyError, match=what):
        search(question(forced, gpus=gpus))


def test_without_kinds_for_it_it_is_refused() -> None:
    with pytest.raises(StrategyError, match="not offered"):
        search(problem(LAYERS, cluster(8), forced={"sequence_parallel": True}))
