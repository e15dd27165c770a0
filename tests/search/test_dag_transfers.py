"""What is priced between stages is what the runtime sends: each value once to every stage that reads it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.capture import Capture, capture
from autoplan.cost_models.communication import send_s
from autoplan.layers import LayerGraph, build_layers
from autoplan.layers.types import Edge
from autoplan.passes.split_stages import split_stages
from autoplan.plan import Strategy
from autoplan.search.axes import axes
from autoplan.search.dag_transfers import crossing, is_chain, transfers
from autoplan.search.decisions import solve_strategy
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.space import Space, open_space
from tests.support import branching_models, models
from tests.support.layer_graphs import Dense, cluster, graph, problem

MIB = float(2**20)


def with_edges(layers: LayerGraph, *edges: tuple[int, tuple[int, ...], float]) -> LayerGraph:
    """The same layers with values (source, readers, bytes a sample)."""
    made = tuple(Edge(value=f"v{k}", source=u, targets=t, bytes_per_sample=b) for k, (u, t, b) in enumerate(edges))
    return dataclasses.replace(layers, edges=made)


# A chain of 2 MiB with a skip of 3 MiB from layer 0 to 3, and 5 MiB made by layer 1 that layers 2 and 3 read.
SKIPPING = with_edges(
    graph([Dense()] * 4),
    (0, (1,), 2 * MIB),
    (0, (3,), 3 * MIB),
    (1, (2, 3), 5 * MIB),
    (2, (3,), 2 * MIB),
)


def test_a_worked_example() -> None:
    spans = crossing(SKIPPING, samples=2)
    inside = (
        spans.received[1, 2],
        spans.received[2, 3],
        spans.received[3, 4],
        spans.received[1, 4],
        spans.received[2, 4],
    )
    # Layer 3 reads the skip, layer 1's value and layer 2's; as one stage, layers 2 and 3 get layer 1's value once.
    assert inside == (4 * MIB, 10 * MIB, 20 * MIB, 10 * MIB, 16 * MIB)
    assert (spans.sent[0, 1], spans.sent[1, 2], spans.sent[0, 2], spans.sent[2, 3]) == (
        10 * MIB,
        10 * MIB,
        16 * MIB,
        4 * MIB,
    )
    # The last stage hands nothing over; the third hands on 2 MiB of its own for the 5 that it gets.
    assert (spans.held[3, 4], spans.held[2, 3], spans.held[0, 1]) == (20 * MIB, 6 * MIB, 0.0)
    found = transfers(SKIPPING, (0, 1, 2, 3), samples=2)
    assert [(t.value, t.source, t.destinations, t.bytes_each) for t in found] == [
        ("v0", 0, (1,), 4 * MIB),
        ("v1", 0, (3,), 6 * MIB),
        ("v2", 1, (2, 3), 10 * MIB),
        ("v3", 2, (3,), 4 * MIB),
    ]


def skipping(**more: object) -> Space:
    asked = problem([Dense()] * 4, cluster(8, memory_gib=40.0), global_batch=8, **more)
    return open_space(dataclasses.replace(asked, layers=SKIPPING))


def test_the_plan_pays_for_a_skip_once() -> None:
    space = skipping()
    strategy = Strategy(pipeline=4, micro_batches=4, micro_batch_size=2)
    evaluation = evaluate_decision(space, strategy, (0, 1, 2, 3, 4))
    link = functools.partial(send_s, space.problem.cluster, distance=1)
    received = [link(b * MIB) for b in (4, 10, 20)]
    sent = [link(b * MIB) for b in (10, 10, 4)]
    assert evaluation.sends_s == pytest.approx(received, rel=1e-12)
    around = [sent[0], received[0] + sent[1], received[1] + sent[2], received[2]]
    periods = [stage.period_s + seconds for stage, seconds in zip(evaluation.stages, around, strict=True)]
    tail = max(stage.tail_s for stage in evaluation.stages)
    assert evaluation.objective_s == pytest.approx(3 * max(periods) + sum(periods) + tail, rel=1e-12)
    solution = solve_strategy(space, strategy)
    assert solution is not None and solution.split is not None
    assert solution.split.value_s == pytest.approx(evaluation.objective_s, rel=1e-12)
    # The last stage keeps the three values that it gets, one micro-batch at a time; the third two micro-batches of 6.
    held = [stage.memory_terms["received_activations"] for stage in evaluation.stages]
    assert held == [0.0, 0.0, 12 * MIB, 20 * MIB]
    pipeline = axes(space, evaluation)[0]
    assert pipeline.bytes_per_step == 4 * (4 + 2 * 10) * MIB  # stage 1 gets 4 and sends 10 to two stages


@st.composite
def layer_graphs(draw: st.DrawFn) -> LayerGraph:
    size = draw(st.integers(2, 7))
    edges = []
    for source in draw(st.lists(st.integers(0, size - 2), max_size=8)):
        targets = draw(st.sets(st.integers(source + 1, size - 1), min_size=1, max_size=3))
        edges.append((source, tuple(sorted(targets)), float(draw(st.integers(1, 9)))))
    found = with_edges(graph([Dense()] * size), *edges)
    batched = tuple(dataclasses.replace(e, batched=draw(st.booleans())) for e in found.edges)
    return dataclasses.replace(found, edges=batched)


@settings(max_examples=150, deadline=None)
@given(layer_graphs(), st.data())
def test_every_span_gets_and_sends_what_crosses_its_ends(layers: LayerGraph, data: st.DataObject) -> None:
    size = len(layers.layers)
    inner = data.draw(st.sets(st.integers(1, size - 1), max_size=3))
    cuts = (0, *sorted(inner), size)
    spans = crossing(layers, samples=3)
    stage_of = [s for s, (i, j) in enumerate(itertools.pairwise(cuts)) for _ in range(i, j)]
    found = transfers(layers, stage_of, samples=3)
    for stage, (first, end) in enumerate(itertools.pairwise(cuts)):
        received = sum(t.bytes_each for t in found if stage in t.destinations)
        assert spans.received[first, end] == received
        assert spans.sent[first, end] == sum(t.bytes_each for t in found if t.source == stage)
        handed = sum(
            e.bytes_per_sample * (3 if e.batched else 1)
            for e in layers.edges
            if first <= e.source < end <= e.targets[0]
        )
        assert spans.held[first, end] == max(0.0, received - handed)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.floats(1e3, 1e8), st.integers(2, 4), st.sampled_from(["1f1b", "gpipe"]))
def test_a_chain_costs_the_same_either_way(size: int, amount: float, pipeline: int, schedule: str) -> None:
    """Without values that go further than the next layer, spans' bytes are the cuts' bytes."""
    layers = graph([Dense()] * size, crossing=float(int(amount)))
    assert is_chain(layers)
    spans = crossing(layers, samples=2)
    cut = np.array([0.0, *(layers.crossing_bytes(c) * 2 for c in range(1, size)), 0.0])
    for first, end in itertools.combinations(range(size + 1), 2):
        assert (spans.received[first, end], spans.sent[first, end]) == (cut[first], cut[end])


@functools.cache
def traced(name: str) -> tuple[Capture, LayerGraph]:
    source = branching_models if hasattr(branching_models, name) else models
    model, batch = getattr(source, name)()
    captured = capture(model, batch)
    return captured, build_layers(captured)


CUTS = {
    "unet": [(0, 7, 11), (0, 3, 5, 8, 11), (0, 1, 3, 4, 6, 8, 11)],
    "tiny_t5": [(0, 5, 11), (0, 3, 7, 11), (0, 2, 3, 6, 8, 9, 11)],
    "two_towers": [(0, 5, 11), (0, 3, 8, 11), (0, 1, 3, 5, 7, 10, 11)],
    "encoder_decoder": [(0, 4, 9), (0, 2, 5, 7, 9)],
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("samples", [1, 3])
def test_the_runtime_sends_what_is_priced(name: str, samples: int) -> None:
    captured, layers = traced(name)
    for cuts in CUTS[name]:
        stage_of = [s for s, (i, j) in enumerate(itertools.pairwise(cuts)) for _ in range(i, j)]
        nodes = {node: s for layer, s in zip(layers.layers, stage_of, strict=True) for node in layer.nodes}
        stages = split_stages(captured.graph_module, nodes)
        sends = {
            value.name: (
                value.source,
                value.destinations,
                float(math.prod(value.shape(samples)) * value.dtype.itemsize),
            )
            for stage in stages
            for value in stage.sends
        }
        found = transfers(layers, stage_of, samples=samples)
        assert {t.value: (t.source, t.destinations, t.bytes_each) for t in found} == sends
        spans = crossing(layers, samples=samples)
        for stage, (first, end) in zip(stages, itertools.pairwise(cuts), strict=True):
            assert spans.received[first, end] == sum(sends[value.name][2] for value in stage.receives)
            assert spans.sent[first, end] == sum(sends[value.name][2] for value in stage.sends)
