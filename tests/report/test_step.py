"""The step retold from a plan: it ends when the plan says, and every action, send and wait is there once."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.errors import StrategyError
from autoplan.plan import Plan
from autoplan.report import parts, step, terminal, trace
from autoplan.search import search
from tests.support.layer_graphs import Dense, cluster, problem
from tests.support.mixed import group, mixed
from tests.support.plans import of_revision


def planned(stages: int, *, layers: int = 16, **forced: object) -> Plan:
    nodes = max(1, stages // 8)
    each = [Dense(elements=4_000_000 + 100_000 * i, saved=128 * 2**20) for i in range(layers)]
    keys = {"pipeline": stages, "schedule": "1f1b", **forced}
    return search(problem(each, cluster(-(-stages // nodes), nodes=nodes), forced=keys))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(4)


@settings(max_examples=12, deadline=None)
@given(stages=st.sampled_from((1, 2, 4, 8)), schedule=st.sampled_from(("1f1b", "gpipe")), micro=st.sampled_from((1, 4)))
def test_the_step_ends_when_the_plan_says(stages: int, schedule: str, micro: int) -> None:
    plan = planned(stages, schedule=schedule, micro_batch_size=micro)
    simulated = step.simulate(plan)
    assert simulated.end_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert simulated.unexplained_s == 0.0
    assert sum(map(simulated.idle_share, range(stages))) / stages == pytest.approx(
        plan.predicted.bubble_fraction, abs=1e-5
    )


@pytest.mark.parametrize("keys", [{"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "zero_bubble"}])
@pytest.mark.parametrize("micro", [1, 4])
def test_so_it_does_where_ranks_hold_several_stages_or_split_their_backwards(keys: dict[str, Any], micro: int) -> None:
    plan = planned(4, micro_batch_size=micro, **keys)
    simulated = step.simulate(plan)
    assert len(simulated.lanes) == 4
    assert simulated.end_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert simulated.unexplained_s == 0.0
    assert sum(map(simulated.idle_share, range(4))) / 4 == pytest.approx(plan.predicted.bubble_fraction, abs=1e-5)
    sends = list(simulated.sends())
    assert len(sends) == 2 * (len(plan.stages) - 1) * plan.strategy.micro_batches
    assert all(send.start_s <= send.end_s <= send.used_s + 1e-12 and send.source != send.target for send in sends)
    assert all(len(line) <= 80 for line in terminal.timeline(simulated).splitlines())
    shown = [event for event in trace.trace(simulated)["traceEvents"] if event.get("args", {}).get("action")]
    assert len({event["args"]["action"] for event in shown}) == len(shown) == simulated.actions


def test_a_plan_file_without_the_stages_times_says_what_is_missing(plan: Plan) -> None:
    data = plan.to_dict()
    for stage in data["stages"]:
        for name in ("send_s", "synchronise_s", "optimizer_s"):
            del stage[name]
    simulated = step.simulate(Plan.from_json(of_revision(data, 1)))
    assert 0 < simulated.unexplained_s < 0.2 * plan.predicted.step_time_s
    assert simulated.end_s == pytest.approx(plan.predicted.step_time_s)
    text = terminal.timeline(simulated)
    assert "older plan file" in " ".join(text.split())


def test_every_send_arrives_before_it_is_used(plan: Plan) -> None:
    sends = list(step.simulate(plan).sends())
    # Three boundaries, there and back.
    assert len(sends) == 2 * 3 * plan.strategy.micro_batches
    assert all(send.start_s <= send.end_s <= send.used_s + 1e-12 for send in sends)


def test_the_trace_holds_every_action_once_and_ends_with_the_step(plan: Plan) -> None:
    made = trace.trace(step.simulate(plan))
    events = made["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    actions = [event for event in slices if event["cat"] in ("forward", "backward")]
    assert len(actions) == 2 * 4 * plan.strategy.micro_batches == made["otherData"]["actions"]
    assert len({event["args"]["action"] for event in actions}) == len(actions)
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(plan.predicted.step_time_s * 1e6, rel=1e-9)
    assert {"bubble", "gradient synchronisation", "optimizer"} >= {e["cat"] for e in slices} - {"forward", "backward"}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(names) == 4 and names[1].startswith("stage 1: rank 1, layers ")
    json.dumps(made, allow_nan=False)


def test_rows_of_ranks_that_hold_several_stages_are_called_ranks() -> None:
    plan = planned(2, schedule="interleaved", virtual_stages=2, micro_batch_size=1)
    simulated = step.simulate(plan)
    assert simulated.row == "rank" and len(simulated.lanes) == 2
    text = " ".join(terminal.timeline(simulated).split())
    assert "A row is a pipeline rank, which holds 2 stages: rank 0 the stages 0, 2." in text and " rank the" in text
    events = trace.trace(simulated)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(":")[0] for name in names] == ["pipeline rank 0, stages 0, 2", "pipeline rank 1, stages 1, 3"]
    of_rank_1 = {e["args"]["stage"] for e in events if e.get("args", {}).get("action") and e["pid"] == 1}
    assert of_rank_1 == {1, 3} and "F0 of stage 3" in {event["name"] for event in events}


def test_rows_say_which_kind_of_gpus_they_are() -> None:
    kinds = mixed([group(2, name="fast"), group(2, speed=0.5, name="slow")])
    layers = [Dense(flops=3e12, elements=20_000_000)] * 12
    plan = search(problem(layers, kinds, global_batch=64, heads=1, forced={"pipeline": 2, "data": 2}))
    simulated = step.simulate(plan)
    devices = [stage.device for stage in plan.stages]
    assert set(devices) == {"fast", "slow"}
    assert f"A row is a stage: stage 0 on {devices[0]}, stage 1 on {devices[1]}." in terminal.timeline(simulated)
    names = [e["args"]["name"] for e in trace.trace(simulated)["traceEvents"] if e["name"] == "process_name"]
    assert [device in name for device, name in zip(devices, names, strict=True)] == [True, True]


def test_slices_of_a_stage_do_not_overlap_and_fill_the_step(plan: Plan) -> None:
    slices = [event for event in trace.trace(step.simulate(plan))["traceEvents"] if event["ph"] == "X"]
    for stage in range(4):
        at = 0.0
        for event in sorted((e for e in slices if e["pid"] == stage), key=lambda e: (e["ts"], e["dur"])):
            assert event["ts"] == pytest.approx(at, abs=1.0)
            at = event["ts"] + event["dur"]
        assert at == pytest.approx(plan.predicted.step_time_s * 1e6, rel=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {"tensor": 2, "data": 2, "zero_stage": 1},
        {"data": 4, "zero_stage": 3, "recompute": "full"},
        {"data": 4, "zero_stage": 2, "micro_batch_size": 1},
        {"tensor": 2, "schedule": "zero_bubble"},
    ],
    ids=lambda keys: " ".join(f"{key}={value}" for key, value in keys.items()),
)
def test_every_action_holds_its_collectives_and_what_it_computes_again(keys: dict[str, Any]) -> None:
    layers = [Dense(elements=40_000_000, core=2**20, core_flops=1e10)] * 6
    plan = search(problem(layers, cluster(8), forced={"pipeline": 2, "schedule": "1f1b", **keys}))
    events = trace.trace(step.simulate(plan))["traceEvents"]
    for rank, stage in enumerate(plan.stages):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        waited = sum(e["dur"] for e in slices if e["cat"] == "collective") / 1e6
        both = [*stage.forward_terms.items(), *stage.backward_terms.items()]
        expected = sum(value for name, value in both if name in parts.COLLECTIVES)
        assert waited == pytest.approx(plan.strategy.micro_batches * expected, rel=1e-6)
        again = sum(e["dur"] for e in slices if e["cat"] == "recompute") / 1e6
        assert again == pytest.approx(plan.strategy.micro_batches * stage.backward_terms.get("recompute", 0.0))
        hidden = sum(e["dur"] for e in slices if e["cat"] == "hidden collective") / 1e6
        assert hidden <= stage.hidden_s * (1 + 1e-9) and (hidden > 0) == (stage.hidden_s > 0)
        assert (waited + hidden > 0) == (plan.strategy.data * plan.strategy.tensor > 1)
        actions = [e for e in slices if "action" in e.get("args", {})]
        nested = [e for e in slices if e["cat"] in ("collective", "recompute")]
        for part in nested:
            assert any(a["ts"] <= part["ts"] + 1e-3 and ends(part) <= ends(a) + 1e-3 for a in actions)
        nested.sort(key=lambda e: e["ts"])
        assert all(ends(one) <= other["ts"] + 1e-3 for one, other in pairwise(nested))


def test_a_collective_says_its_layer_its_axis_its_gpus_and_its_bytes() -> None:
    layers = [Dense(elements=40_000_000)] * 6
    plan = search(problem(layers, cluster(8), forced={"pipeline": 2, "tensor": 2, "data": 2, "schedule": "1f1b"}))
    axis = next(axis for axis in plan.axes if axis.name == "tensor")
    events = trace.trace(step.simulate(plan))["traceEvents"]
    for rank, stage in enumerate(plan.stages):
        held = [f"layers.{i}" for i in range(stage.first_layer, stage.last_layer + 1)]
        for action, order in (("F", held), ("B", held[::-1])):  # a backward begins at the last layer
            name = f"{action}0"
            whole = next(e for e in events if e["pid"] == rank and e["ph"] == "X" and e["name"] == name)
            inside = [
                e
                for e in events
                if e["pid"] == rank
                and e.get("cat") == "collective"
                and whole["ts"] - 1e-3 <= e["ts"]
                and ends(e) <= ends(whole) + 1e-3
            ]
            assert [e["args"]["layers"] for e in inside] == order
            assert [e["name"] for e in inside] == [f"tensor: all-reduce, {layer}" for layer in order]
            for event in inside:
                assert event["args"]["tensor"] == {
                    "collective": "all-reduce",
                    "gpus": 2,
                    "times_per_step": axis.times_per_step,
                    "bytes_per_step": axis.bytes_per_step,
                    "link": "near",
                }
            # The plan has their sum: how many a slice stands for is what each says.
            slices = 2 * plan.strategy.micro_batches * len(held)
            assert all(e["args"]["in_this_slice"]["tensor"] == round(axis.times_per_step / slices, 2) for e in inside)
    beside = [e for e in events if e.get("cat") == "hidden collective"]
    assert beside and all(e["args"]["data"]["gpus"] == 2 for e in beside)


def ends(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def test_arrows_join_a_send_to_its_use(plan: Plan) -> None:
    events = trace.trace(step.simulate(plan))["traceEvents"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys() and len(starts) == 2 * 3 * plan.strategy.micro_batches
    assert all(ends[i]["ts"] >= starts[i]["ts"] and abs(ends[i]["pid"] - starts[i]["pid"]) == 1 for i in starts)


def test_the_memory_counter_tops_out_at_the_stages_peak(plan: Plan) -> None:
    events = trace.trace(step.simulate(plan))["traceEvents"]
    for stage, described in enumerate(plan.stages):
        samples = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == stage]
        assert max(samples) * 2**30 == pytest.approx(described.peak_memory_bytes)
        assert samples[0] == samples[-1] < max(samples)


def test_a_very_long_step_shows_its_beginning_and_its_end(plan: Plan) -> None:
    whole = step.simulate(plan)
    made = trace.trace(whole, most_actions=64)
    actions = [e for e in made["traceEvents"] if e.get("cat") in ("forward", "backward")]
    assert made["otherData"]["left_out"] == whole.actions - len(actions) > 0
    assert {"0F0", f"0B{plan.strategy.micro_batches - 1}"} <= {event["args"]["action"] for event in actions}
    gaps = [event for event in made["traceEvents"] if event.get("cat") == "not shown"]
    assert sum(int(event["name"].split()[0]) for event in gaps) == made["otherData"]["left_out"]


def test_a_step_without_end_is_refused(plan: Plan) -> None:
    endless = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, micro_batches=10**9))
    with pytest.raises(StrategyError, match="too many to draw"):
        step.simulate(endless)
    with pytest.raises(StrategyError, match="looped_bfs"):
        step.simulate(dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, schedule="looped_bfs")))


@pytest.mark.parametrize("stages", [1, 4, 16])
def test_the_terminal_timeline_keeps_80_columns(stages: int) -> None:
    text = terminal.timeline(step.simulate(planned(stages, layers=32)))
    assert max(map(len, text.splitlines())) <= 80 and text.isascii()
    rows = [line for line in text.splitlines() if line.endswith("%")]
    assert len(rows) == stages


def test_the_terminal_timeline_is_to_scale() -> None:
    """One stage: the forwards take their share of the columns, their numbers included."""
    plan = planned(1, layers=2, micro_batch_size=16)
    simulated = step.simulate(plan)
    row = next(line for line in terminal.timeline(simulated).splitlines() if line.startswith("     0 |"))
    track = row.split("|")[1]
    assert len(track) == terminal.TRACK
    share = plan.strategy.micro_batches * plan.stages[0].forward_s / plan.predicted.step_time_s
    forwards = sum(map(len, re.findall(r"F[F\d]*", track)))
    assert forwards / terminal.TRACK == pytest.approx(share, abs=0.04)


def test_stages_wait_in_the_drawing_where_they_wait(plan: Plan) -> None:
    simulated = step.simulate(plan)
    text = terminal.timeline(simulated)
    first = text[text.index("its beginning") :].splitlines()[1:5] if "its beginning" in text else []
    rows = first or [line for line in text.splitlines() if line.endswith("%")]
    # Stage s starts with what the stages before it take: its row begins with more waiting than the one above.
    waits = [len(row.split("|")[1]) - len(row.split("|")[1].lstrip(".")) for row in rows]
    assert waits[0] == 0 and waits == sorted(waits) and waits[-1] > 0
