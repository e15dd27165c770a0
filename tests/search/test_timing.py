"""The quick step time is the schedule simulator's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import schedules
from autoplan.cost_models import schedule
from autoplan.search.timing import StageTimes, brief_step_s, step_s

seconds = st.floats(0.001, 3.0)


@st.composite
def stage_times(draw: st.DrawFn, *, most: int = 12) -> StageTimes:
    schedule = draw(st.sampled_from(schedules.SCHEDULES))
    virtual_stages = draw(st.integers(1, 3)) if schedule in schedules.CHUNKED else 1
    stages = draw(st.integers(1, 6 if virtual_stages == 1 else 3)) * virtual_stages
    per_stage = st.lists(seconds, min_size=stages, max_size=stages).map(tuple)
    sends = st.lists(st.floats(0.0, 1.0), min_size=stages - 1, max_size=stages - 1).map(tuple)
    backward = draw(per_stage)
    share = draw(st.floats(0.0, 1.0)) if schedule == "zero_bubble" else 0.0
    return StageTimes(
        schedule=schedule,
        micro_batches=draw(st.integers(1, most)),
        forward_s=draw(per_stage),
        backward_s=backward,
        send_s=draw(sends),
        tail_s=draw(per_stage),
        weight_s=tuple(share * seconds for seconds in backward),
        virtual_stages=virtual_stages,
    )


def simulated(times: StageTimes) -> float:
    actions = schedules.all_actions(
        times.schedule,
        stages=len(times.forward_s),
        micro_batches=times.micro_batches,
        virtual_stages=times.virtual_stages,
    )
    return schedule.simulate(
        actions,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        send_s=times.send_s,
        tail_s=[sum(times.tail_s[rank :: times.ranks]) for rank in range(times.ranks)],
        weight_s=times.weight_s,
    ).step_s


@settings(max_examples=300, deadline=None)
@given(stage_times())
def test_equal_to_the_simulator(times: StageTimes) -> None:
    assert step_s(times) == pytest.approx(simulated(times), rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(stage_times(most=600))
def test_a_brief_step_is_near(times: StageTimes) -> None:
    assert brief_step_s(times) == pytest.approx(step_s(times), rel=0.01)
