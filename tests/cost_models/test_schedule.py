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


def run(schedule: str, *, micro_batches: int, virtual_stages: int = 1, **times: list[float]):
    stages = len(times["forward_s"])
    lists = schedules.all_actions(schedule, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)
    return simulate(lists, **times)


@st.composite
def pipelines(draw: st.DrawFn, schedule: str = "1f1b", *, uniform: bool = False) -> dict:
    """Times of a pipeline's stages, with virtual stages or weight gradients where the schedule has them."""
    virtual_stages = draw(st.integers(1, 3)) if schedule in schedules.CHUNKED else 1
    stages = draw(st.integers(1, 6 if virtual_stages == 1 else 4)) * virtual_stages

    def each(values: st.SearchStrategy[float], count: int = stages) -> list[float]:
        return [draw(values)] * count if uniform else draw(st.lists(values, min_size=count, max_size=count))

    times = {"forward_s": each(seconds), "backward_s": each(seconds)}
    if schedule == "zero_bubble":
        # Of equal stages the closed form holds while weight gradients are the shortest of the three parts.
        most = [min(b / 2, f) if uniform else b for f, b in zip(times["forward_s"], times["backward_s"], strict=True)]
        times["weight_s"] = [share * m for share, m in zip(each(st.floats(0, 1)), most, strict=True)]
    if not uniform:
        times["send_s"] = each(st.floats(0, 2), stages - 1)
    micro_batches = draw(st.integers(1, 12))
    if uniform and schedule == "interleaved":
        micro_batches *= stages // virtual_stages
    if uniform and schedule == "zero_bubble":
        micro_batches = max(micro_batches, stages)
    return {**times, "micro_batches": micro_batches} | (
        {"virtual_stages": virtual_stages} if schedule in schedules.CHUNKED else {}
    )


ONE_STAGE_A_RANK = ("gpipe", "1f1b")
schedule_names = st.sampled_from(schedules.SCHEDULES)


@pytest.mark.parametrize("schedule", ONE_STAGE_A_RANK)
def test_uniform_stages_take_m_plus_s_minus_1_slots(schedule: str) -> None:
    timeline = run(schedule, micro_batches=8, forward_s=[1.0] * 4, backward_s=[2.0] * 4)
    assert timeline.step_s == pytest.approx((8 + 4 - 1) * 3.0)
    assert timeline.bubble_fraction == pytest.approx((4 - 1) / (8 + 4 - 1))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    # 4 ranks work 8 x 3 s each and wait for 3 x 3 s, a chunk's share of it (Narayanan et al. 2021, section 2.2).
    share = [1.0 / chunks] * (4 * chunks), [2.0 / chunks] * (4 * chunks)
    timeline = run("interleaved", micro_batches=8, virtual_stages=chunks, forward_s=share[0], backward_s=share[1])
    assert timeline.step_s == pytest.approx(8 * 3.0 + 3 * 3.0 / chunks)


def test_weight_gradients_fill_the_bubble() -> None:
    # F = I = W = 1 s: 1F1B waits (p - 1) (F + I + W) = 9 s, ZB-H1 (p - 1) (F + I - W) = 3 s (Qi et al. 2024, table 1).
    timeline = run("zero_bubble", micro_batches=8, forward_s=[1.0] * 4, backward_s=[2.0] * 4, weight_s=[1.0] * 4)
    assert timeline.step_s == pytest.approx(8 * 3.0 + 3.0)


def test_chunks_of_one_rank_hand_over_without_a_send() -> None:
    timeline = run(
        "interleaved",
        micro_batches=1,
        virtual_stages=2,
        forward_s=[1.0, 1.0],
        backward_s=[1.0, 1.0],
        send_s=[5.0],
    )
    assert timeline.step_s == pytest.approx(4.0)


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


@given(schedule=schedule_names, data=st.data())
@settings(max_examples=300)
def test_every_action_runs_once_after_its_inputs_and_never_beside_another(schedule: str, data: st.DataObject) -> None:
    pipeline = data.draw(pipelines(schedule))
    timeline = run(schedule, **pipeline)
    stages, ranks = len(pipeline["forward_s"]), len(timeline.events)
    ends = {event.action: event.end_s for lane in timeline.events for event in lane}
    assert len(ends) == (3 if schedule == "zero_bubble" else 2) * stages * pipeline["micro_batches"]
    backward = "I" if schedule == "zero_bubble" else "B"
    for lane in timeline.events:
        for before, after in itertools.pairwise(lane):
            assert after.start_s >= before.end_s
        for event in lane:
            stage, kind, micro_batch = event.action
            if kind == "F" and stage:
                source, wait = Action(stage - 1, "F", micro_batch), pipeline["send_s"][stage - 1]
            elif kind == backward and stage + 1 < stages:
                source, wait = Action(stage + 1, backward, micro_batch), pipeline["send_s"][stage]
            elif kind == "W":
                source, wait = Action(stage, "I", micro_batch), 0.0
            else:
                continue
            assert event.start_s >= ends[source] + (wait if ranks > 1 else 0.0) - 1e-9


@given(schedule=schedule_names, data=st.data())
@settings(max_examples=600)
def test_the_lower_bound_never_exceeds_the_simulation(schedule: str, data: st.DataObject) -> None:
    pipeline = data.draw(pipelines(schedule))
    assert lower_bound_s(schedule, **pipeline) <= run(schedule, **pipeline).step_s * (1 + 1e-9)


@given(schedule=schedule_names, data=st.data())
@settings(max_examples=300)
def test_for_uniform_stages_without_sends_all_three_agree(schedule: str, data: st.DataObject) -> None:
    pipeline = data.draw(pipelines(schedule, uniform=True))
    step = run(schedule, **pipeline).step_s
    assert closed_form_s(schedule, **pipeline) == pytest.approx(step)
    assert lower_bound_s(schedule, **pipeline) == pytest.approx(step)


@given(schedule=st.sampled_from(ONE_STAGE_A_RANK), pipeline=pipelines())
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
