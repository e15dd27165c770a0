"""What is proven without running: messages meet, owners are declared, stages are the graph's own, memory is there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.layers import build_layers
from autoplan.layers.types import LayerGraph
from autoplan.passes import operators, split_stages
from autoplan.plan import Plan
from autoplan.schedules import all_actions
from autoplan.verification import Check, messages, static
from tests.support import models
from tests.support.plans import hand_plan


@functools.cache
def nano() -> tuple[Capture, LayerGraph]:
    captured = capture(*models.nano_gpt(layers=2))
    return captured, build_layers(captured)


def planned(**strategy: Any) -> Plan:
    return hand_plan(nano()[1], **{"micro_batch_size": 1, "micro_batches": 4, **strategy})


def checked(plan: Plan) -> dict[str, Check]:
    checks, _ = static.check_static(*nano(), plan, Cluster.parse("16xcpu"))
    return {check.name: check for check in checks}


def test_a_sound_plan_for_many_ranks_passes_every_check() -> None:
    found = checked(planned(data=4096, pipeline=2, tensor=2))
    assert all(check.ok for check in found.values()), found
    # the block's output forward and its gradient backward, of 4 micro-batches
    assert "8 messages meet in each of 8,192 pipelines" in found["messages"].detail
    assert "1 shared between stages" in found["parameters"].detail


def test_positions_dealt_out_pass_every_check() -> None:
    found = checked(planned(data=2, context=4, tensor=2, pipeline=2))
    assert all(check.ok for check in found.values()), found


def test_an_expert_axis_without_experts_has_no_program() -> None:
    found = checked(planned(data=2, expert=2))
    assert not found["placements"].ok and "no product grouped by expert" in found["placements"].detail


def test_a_collective_lost_after_the_pass_is_found_in_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = static.sharding_pass.shard_tensors

    def losing(*arguments: Any) -> Any:
        sharded = original(*arguments)
        victims = sharded.graph_module.graph.find_nodes(op="call_function", target=operators.reduce_from_axis)
        victim = [node for node in victims if "linear" in node.name][-1]
        victim.replace_all_uses_with(victim.args[0])
        sharded.graph_module.graph.erase_node(victim)
        return sharded

    monkeypatch.setattr(static.sharding_pass, "shard_tensors", losing)
    found = checked(planned(tensor=2))["placements"]
    assert not found.ok
    assert ".py:" in found.where


def test_values_sent_under_each_others_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = split_stages.split_stages

    def swapped(*arguments: Any) -> Any:
        first, second = original(*arguments)
        output = first.graph_module.graph.output_node()
        wrong = next(node for node in first.graph_module.graph.nodes if node.op == "call_function")
        output.args = ((wrong, *output.args[0][1:]),)
        return first, second

    monkeypatch.setattr(static.split_stages, "split_stages", swapped)
    found = checked(planned(pipeline=2))["stages"]
    assert not found.ok and "sends" in found.detail


def test_a_shared_parameter_that_a_stage_takes_for_its_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = split_stages.split_stages

    def undeclared(*arguments: Any) -> Any:
        first, second = original(*arguments)
        return first, dataclasses.replace(second, shared_parameters=())

    monkeypatch.setattr(static.split_stages, "split_stages", undeclared)
    found = checked(planned(pipeline=2))["parameters"]
    assert not found.ok and "takes it for its own" in found.detail


def test_a_stage_beyond_its_memory_is_named_with_its_ranks() -> None:
    plan = planned(pipeline=2, data=2)
    full = dataclasses.replace(plan.stages[1], peak_memory_bytes=3.0 * 2**30, memory_terms={"weights": 3.0 * 2**30})
    plan = dataclasses.replace(
        plan, stages=(plan.stages[0], full), cluster=dataclasses.replace(plan.cluster, memory_bytes=2.0 * 2**30)
    )
    found = checked(plan)["memory"]
    assert not found.ok
    assert found.detail == "ranks 2 to 3 (stage 1) need 3.0 GiB of 2.0 GiB"


def _events(
    schedule: str = "1f1b", stages: int = 2, micro_batches: int = 4, virtual_stages: int = 1
) -> list[list[messages.Event]]:
    captured, layers = nano()
    plan = hand_plan(
        layers,
        pipeline=stages // virtual_stages,
        virtual_stages=virtual_stages,
        micro_batch_size=1,
        micro_batches=micro_batches,
    )
    programs = static.build_programs(captured, layers, plan, Cluster.parse("8xcpu"))
    actions = all_actions(schedule, stages=stages, micro_batches=micro_batches, virtual_stages=virtual_stages)
    return [messages.rank_events(programs.stages, own) for own in actions]


@pytest.mark.parametrize("micro_batches", [1, 3, 4, 8])
def test_messages_of_interleaved_stages_meet(micro_batches: int) -> None:
    found = messages.match(_events("interleaved", 4, micro_batches, virtual_stages=2))
    assert not found.problems
    assert found.messages == 2 * 3 * micro_batches


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 8), (4, 2), (4, 8)])
def test_schedules_complete_with_communicators_that_keep_their_order(
    schedule: str, stages: int, micro_batches: int
) -> None:
    found = messages.match(_events(schedule, stages, micro_batches))
    assert not found.problems
    assert found.messages == 2 * (stages - 1) * micro_batches  # forward and backward over every boundary


def test_messages_out_of_order_on_one_edge_are_found() -> None:
    first, second = _events("gpipe")
    sends = [index for index, event in enumerate(first) if event.kind == "send"]
    first[sends[0]], first[sends[1]] = first[sends[1]], first[sends[0]]
    (problem,) = messages.match([first, second]).problems
    assert "micro-batch 1 is sent where" in problem and "micro-batch 0 is received" in problem


def test_a_lost_send_is_a_deadlock_that_names_the_action() -> None:
    first, second = _events()
    lost = max(index for index, event in enumerate(first) if event.kind == "send")
    problems = messages.match([first[:lost] + first[lost + 1 :], second]).problems
    assert any("deadlock" in problem and "stage 1 at 1F3" in problem for problem in problems)


def test_a_gradient_that_nobody_awaits_is_found() -> None:
    first, second = _events()
    lost = max(index for index, event in enumerate(first) if event.kind == "receive")
    (problem,) = messages.match([first[:lost] + first[lost + 1 :], second]).problems
    assert "sent and never received" in problem
