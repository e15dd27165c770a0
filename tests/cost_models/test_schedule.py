"""The simulator against closed forms, and the lower bound against the simulator."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import schedules
from autoplan.cost_models.schedule import closed_form_s, lower_bound_s, simulate
from autoplan.errors import StrategyError
from autoplan.schedules import Action

seconds = st.floats(0.01, 10)


def run(schedule: str, *, micro_batches: int, **times: list[float]):
    stages = len(times["forward_s"])
    return simulate(schedules.all_actions(schedule, stages=stages, micro_batches=micro_batches), **times)


@st.composite
def pipelines(draw: st.DrawFn) -> dict:
    stages = draw(st.integers(1, 6))
    times = {key: draw(st.lists(seconds, min_size=stages, max_size=stages)) for key in ("forward_s", "backward_s")}
    sends = draw(st.lists(st.floats(0, 2), min_size=stages - 1, max_size=stages - 1))
    return {**times, "send_s": sends, "micro_batches": draw(st.integers(1, 12))}


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_uniform_stages_take_m_plus_s_minus_1_slots(schedule: str) -> None:
    timeline = run(schedule, micro_batches=8, forward_s=[1.0] * 4, backward_s=[2.0] * 4)
    assert timeline.step_s == pytest.approx((8 + 4 - 1) * 3.0)
    assert timeline.bubble_fraction == pytest.approx((4 - 1) / (8 + 4 - 1))


def test_one_stage_has_no_bubble() -> None:
    timeline = run("1f1b", micro_batches=5, forward_s=[1.0], backward_s=[2.5])
    assert timeline.step_s == pytest.approx(17.5)
    assert timeline.bubble_fraction == pytest.approx(0)


def test_two_stages_by_hand() -> None:
    # F0 on stage 0 [0,1], on stage 1 [2,3] after a send of 1; B0 there [3,5]; back at 6, B0 on stage 0 [6,8].
    timeline = run("gpipe", micro_batches=1, forward_s=[1.0, 1.0], backward_s=[2.0, 2.0], send_s=[1.0])
    assert [(e.start_s, e.end_s) for lane in timeline.events for e in lane] == [(0, 1), (6, 8), (2, 3), (3, 5)]


def test_a_tail_counts_where_it_ends_last() -> None:
    plain = run("1f1b", micro_batches=4, forward_s=[1.0, 1.0], backward_s=[1.0, 1.0])
    # Stage 1 finishes a backward before stage 0, so that much of its tail is hidden.
    late = run("1f1b", micro_batches=4, forward_s=[1.0, 1.0], backward_s=[1.0, 1.0], tail_s=[0.0, 1.5])
    assert late.step_s == pytest.approx(plain.step_s + 0.5)


def test_lists_that_wait_on_each_other_are_refused() -> None:
    lists = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(StrategyError, match="deadlocks: 0B0, 1F0"):
        simulate(lists, forward_s=[1, 1], backward_s=[1, 1])


@given(schedule=st.sampled_from(schedules.SCHEDULES), pipeline=pipelines())
@settings(max_examples=300)
def test_every_action_runs_once_after_its_inputs_and_never_beside_another(schedule: str, pipeline: dict) -> None:
    timeline = run(schedule, **pipeline)
    ends = {event.action: event.end_s for lane in timeline.events for event in lane}
    assert len(ends) == 2 * len(timeline.events) * pipeline["micro_batches"]
    for stage, lane in enumerate(timeline.events):
        for before, after in itertools.pairwise(lane):
            assert after.start_s >= before.end_s
        for event in lane:
            if event.action.kind == "F" and stage:
                source, wait = Action(stage - 1, "F", event.action.micro_batch), pipeline["send_s"][stage - 1]
            elif event.action.kind == "B" and stage + 1 < len(timeline.events):
                source, wait = Action(stage + 1, "B", event.action.micro_batch), pipeline["send_s"][stage]
            else:
                continue
            assert event.start_s >= ends[source] + wait - 1e-9


@given(schedule=st.sampled_from(schedules.SCHEDULES), pipeline=pipelines())
@settings(max_examples=500)
def test_the_lower_bound_never_exceeds_the_simulation(schedule: str, pipeline: dict) -> None:
    assert lower_bound_s(schedule, **pipeline) <= run(schedule, **pipeline).step_s * (1 + 1e-9)


@given(
    schedule=st.sampled_from(schedules.SCHEDULES),
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 16),
    forward=seconds,
    backward=seconds,
)
def test_for_uniform_stages_without_sends_all_three_agree(schedule, stages, micro_batches, forward, backward) -> None:
    times = {"forward_s": [forward] * stages, "backward_s": [backward] * stages, "micro_batches": micro_batches}
    step = run(schedule, **times).step_s
    assert closed_form_s(**times) == pytest.approx(step)
    assert lower_bound_s(schedule, **times) == pytest.approx(step)


@given(schedule=st.sampled_from(schedules.SCHEDULES), pipeline=pipelines())
@settings(max_examples=300)
def test_the_closed_form_is_off_by_no_more_than_what_other_stages_hide(schedule: str, pipeline: dict) -> None:
    # It charges every other stage's T once, of which the slowest stage may hide all.
    totals = [f + b for f, b in zip(pipeline["forward_s"], pipeline["backward_s"], strict=True)]
    hidden = sum(totals) - max(totals) + 2 * sum(pipeline["send_s"])
    assert closed_form_s(**pipeline) - hidden <= run(schedule, **pipeline).step_s * (1 + 1e-9)


def test_the_closed_form_may_exceed_the_simulation() -> None:
    # A slow first stage hides the fast ones: its 4 x 20 s are all there is, the closed form adds 3 x 2 s.
    times = {"forward_s": [10.0, 1.0, 1.0, 1.0], "backward_s": [10.0, 1.0, 1.0, 1.0]}
    assert run("1f1b", micro_batches=4, **times).step_s == pytest.approx(80.0)
    assert closed_form_s(**times, micro_batches=4) == pytest.approx(86.0)
    assert lower_bound_s("1f1b", **times, micro_batches=4) == pytest.approx(80.0)


@given(pipeline=pipelines(), slower=st.floats(0, 5), data=st.data())
def test_no_stage_gets_faster_by_being_slower(pipeline: dict, slower: float, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, len(pipeline["forward_s"]) - 1))
    before = run("1f1b", **pipeline).step_s
    pipeline["forward_s"][stage] += slower
    assert run("1f1b", **pipeline).step_s >= before - 1e-9
