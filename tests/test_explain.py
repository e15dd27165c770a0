"""explain: what was chosen and why, in 80 columns of plain text, from the plan alone."""

from __future__ import annotations

import dataclasses

import pytest

from autoplan.explain import explain, tables
from autoplan.explain.text import bar, count, seconds, shorten, size
from autoplan.search import search
from autoplan.search.problem import Problem
from tests.support.layer_graphs import Dense, cluster, problem

LARGE = [Dense(elements=100_000_000)] * 16


def text_of(question: Problem) -> str:
    text = explain(search(question))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.isascii() and "\x1b" not in text and text.endswith("\n")
    assert all(line == line.rstrip() for line in text.splitlines())
    return text


def test_every_section_is_there() -> None:
    text = text_of(problem(LARGE, cluster(4), assumptions=("the batch was assumed",)))
    titles = ["chain on 4xcard", "What is split", "Stages", "Memory of", "One step", "Why not less", "Proof"]
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "- the batch was assumed" in text


def test_the_decision_says_why() -> None:
    text = " ".join(text_of(problem(LARGE, cluster(4))).split())
    assert "does not fit one card" in text and "1.6 B parameters" in text and "A step of 32 samples" in text


def test_axes_say_what_how_often_and_how_much() -> None:
    forced = {"data": 2, "pipeline": 2, "tensor": 2, "micro_batch_size": 4, "zero_stage": 0}
    text = " ".join(text_of(problem(LARGE, cluster(8), forced=forced)).split())
    assert "pipeline x 2 splits layers by send and receive when after a stage's forward and backward" in text
    assert "over near, among GPUs 0, 4 and so on" in text
    assert "data x 2 splits the batch by all-reduce of gradients when gradients beside the last backward" in text
    assert "over near, among GPUs 0, 2 and so on" in text
    assert "tensor x 2 splits matrices by all-reduce when inside each layer, forward and backward" in text
    # 8 layers a stage, an all-reduce each way, 4 micro-batches.
    assert "over near, among GPUs 0-1 and so on a step 64 times" in text


def test_a_micro_batch_s_computation_against_its_communication() -> None:
    plan = search(problem(LARGE, cluster(8), forced={"tensor": 4, "micro_batch_size": 4}))
    terms = plan.predicted.time_terms
    computed = terms["forward"] + terms["backward"] + terms["recompute"]
    ratio = computed / (terms["tensor_communication"] + terms["sharded_state"])
    text = " ".join(explain(plan).split())
    assert f"A micro-batch of 4 computes for {seconds(computed / plan.strategy.micro_batches)}" in text
    assert f"a ratio of {ratio:.1f}: its computation covers that. Its size was asked for." in text


def test_stages_communicate_by_their_sends() -> None:
    """The slowest stage of a pipeline sends activations on and gradients back, every micro-batch."""
    plan = search(problem(LARGE, cluster(4, intra=1e9), forced={"pipeline": 4, "schedule": "1f1b"}))
    stage = max(range(4), key=lambda s: plan.stages[s].forward_s + plan.stages[s].backward_s)
    sent_s = plan.stages[stage].send_s + (plan.stages[stage - 1].send_s if stage else 0.0)
    text = " ".join(explain(plan).split())
    assert sent_s > 0 and f"communicates for {seconds(sent_s)}, a ratio of" in text
    assert "leaves fewer to fill the stages: of all sizes that fit at these degrees it takes the least time." in text


def test_the_proof_is_said_to_be_of_the_closed_form() -> None:
    plan = search(problem(LARGE, cluster(4)))
    loose = dataclasses.replace(plan.certificate, simulated_gap=0.15, confirmed=3)
    text = " ".join(explain(dataclasses.replace(plan, certificate=loose)).split())
    assert "15.0% less than the plan's" in text and "That is proven of the closed form alone." in text
    tight = dataclasses.replace(plan.certificate, simulated_gap=0.0, confirmed=3)
    text = " ".join(explain(dataclasses.replace(plan, certificate=tight)).split())
    assert "no candidate's step is shorter than the plan's" in text and "alone" not in text


def test_sixteen_stages_are_legible() -> None:
    layers = [Dense(elements=100_000_000 + i) for i in range(32)]
    text = text_of(problem(layers, cluster(8, nodes=2), forced={"pipeline": 16, "schedule": "1f1b"}))
    rows = [line for line in text.splitlines() if "layers." in line and "[" in line]
    assert len(rows) == 16
    assert rows[0].split()[:3] == ["0", "layers.0..1", "(2)"]
    assert all(row.split()[5] == "6.2%" for row in rows)  # of the FLOPs


def test_a_stages_work_is_its_share_of_the_flops() -> None:
    layers = [Dense(flops=1e12)] * 3 + [Dense(flops=4e12, elements=10_000_001)]
    plan = search(problem(layers, cluster(2), forced={"pipeline": 2, "schedule": "1f1b", "micro_batch_size": 1}))
    shares = [f"{stage.flops / sum(s.flops for s in plan.stages):.1%}" for stage in plan.stages]
    assert shares == ["42.9%", "57.1%"]
    rows = [line for line in explain(plan).splitlines() if "[" in line]
    assert all(f" {share} " in row.split("[")[0] for row, share in zip(rows, shares, strict=True))
    older = dataclasses.replace(plan, stages=tuple(dataclasses.replace(stage, flops=0.0) for stage in plan.stages))
    assert max(len(line) for line in explain(older).splitlines()) <= 80


@pytest.mark.parametrize(
    ("first", "last", "counted", "said"),
    [
        ("layers.0", "layers.15", " (16)", "layers.0..15 (16)"),
        ("wte", "h.11", " (12)", "wte..h.11 (12)"),
        ("layers.120", "lm_head", " (8)", "lay...120..lm_head (8)"),
        ("embeddings", "classifier", " (14)", "em..ngs..cl..fier (14)"),
    ],
)
def test_layers_are_named_by_their_ends(first: str, last: str, counted: str, said: str) -> None:
    assert tables._ends(first, last, counted) == said and len(said) <= 22


def test_many_stages_share_rows() -> None:
    text = text_of(
        problem([Dense(elements=10_000_000)] * 64, cluster(8, nodes=4), forced={"pipeline": 32, "schedule": "1f1b"})
    )
    rows = [line for line in text.splitlines() if "[" in line]
    assert len(rows) < 16
    assert any("stages x 2 layers" in row for row in rows)


def test_recompute_is_shown_where_it_happens() -> None:
    text = text_of(problem(LARGE, cluster(4), forced={"recompute": "full", "pipeline": 4, "schedule": "1f1b"}))
    assert text.count("recompute: 4 full") == 4


def test_one_gpu_splits_nothing() -> None:
    text = text_of(problem([Dense(elements=1000)] * 2, cluster(1)))
    assert "Nothing: one GPU holds the whole model" in text


def test_why_not_lists_what_is_missing() -> None:
    text = text_of(problem(LARGE, cluster(4)))
    lines = text.splitlines()
    one = next(line for line in lines if line.strip().startswith("one GPU"))
    assert "short" in one


def test_a_plan_that_is_not_proven_says_so() -> None:
    plan = search(problem(LARGE, cluster(4)))
    certificate = dataclasses.replace(plan.certificate, status="feasible", gap=0.25, lower_bound_s=0.75, best_s=1.0)
    text = " ".join(dataclasses.replace(plan, certificate=certificate).explain().split())
    assert "Not proven" in text and "25.0% less" in text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (5 * 2**40, "5.0 TiB")]
)
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_times_counts_bars_and_names() -> None:
    assert [seconds(v) for v in (2.5, 0.0125, 3e-6)] == ["2.50 s", "12.5 ms", "3 us"]
    assert [seconds(v) for v in (119.0, 160.4, 7199.0, 13975.19)] == [
        "119.00 s",
        "2 min 40 s",
        "119 min 59 s",
        "3 h 53 min",
    ]
    assert [count(v) for v in (8.03e9, 124e6, 12)] == ["8.03 B", "124 M", "12"]
    assert [bar(v, 10) for v in (0, 1e-9, 0.5, 2)] == ["." * 10, "#.........", "#####.....", "#" * 10]
    assert shorten("model.layers.31.feed_forward", 12) == "mode..orward"
    assert len(shorten("model.layers.31.feed_forward", 12)) == 12


def test_what_is_given_up_and_for_what() -> None:
    """2% for less parallelism, and 10% for state that is whole on every rank."""
    plan = search(problem([Dense(elements=5_000_000)] * 8, cluster(4)))
    assert plan.strategy.axes == ("data",)
    for more, why in (
        (1.01, "the least parallel plan is preferred"),
        (1.05, "sharded only where that gains more than 10%"),
    ):
        certificate = dataclasses.replace(plan.certificate, best_s=1.0, objective_s=more)
        text = " ".join(explain(dataclasses.replace(plan, certificate=certificate)).split())
        assert f"{more - 1:.1%} more than the fastest candidate" in text and why in text
