"""One step as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

A process is a stage, or a pipeline rank that holds several (all its GPUs do the same: one class). Its first lane is
what it does: forward, backward, bubble, gradient synchronisation, optimizer, and inside a forward or a backward the
collectives that it waits for and what it computes again (:mod:`.parts`), dealt out over its layers alike: a slice is
all collectives of one kind of one layer, and says how many those are. A second lane holds what the data axis transfers
beside the computation. What it sends are asynchronous slices, with arrows from a send to where it is used; a counter is
its memory. Times are microseconds, as the format wants.

The counter stands at ``saved activations / in flight`` a micro-batch between its forward and its backward, over all
other terms at their peak: its top is the stage's peak, and between the micro-batches it is an upper bound. It is flat
where the optimizer's step is the peak, since the plan's terms are then those of a moment without saved activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autoplan.cost_models.schedule import Event
from autoplan.plan import Plan, Stage
from autoplan.report import parts
from autoplan.report.step import Send, Step

# Above this many actions only the first and the last windows are written, which show the warm-up and the end.
MOST_ACTIONS = 20_000
# Above this many slices inside of actions, each action has one a kind instead of one a layer.
MOST_INSIDE = 40_000
_COMPUTE, _BESIDE = 0, 1
_MICRO = 1e6
_GIB = 2**30
_NAMES = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
_COLOURS = {
    "F": "thread_state_running",
    "B": "rail_animation",
    "I": "rail_animation",
    "W": "rail_response",
    "bubble": "grey",
}


def trace(step: Step, *, most_actions: int = MOST_ACTIONS) -> dict[str, Any]:
    """The trace as JSON-ready data; ``otherData.left_out`` is how many actions it does not show."""
    plan = step.plan
    head, tail = _windows(step, most_actions)
    shown = [[e for e in lane if e.end_s <= head or e.start_s >= tail] for lane in step.lanes]
    events: list[dict[str, Any]] = []
    whole = sum(map(len, shown)) * max(s.last_layer - s.first_layer + 1 for s in plan.stages) > MOST_INSIDE
    for stage in range(len(step.lanes)):
        events += _names(plan, stage)
        events += (_action(plan, stage, event) for event in shown[stage])
        events += (part for event in shown[stage] for part in _inside(plan, stage, event, whole))
        events += _beside(plan, stage, shown[stage])
        events += _gaps(step, stage, head, tail)
        events += _tails(step, stage)
        events += _memory(plan, stage, step.lanes[stage], shown[stage])
    for number, send in enumerate(step.sends()):
        if send.used_s <= head or send.start_s >= tail:
            events += _send(send, number)
    return {
        "traceEvents": sorted(events, key=lambda event: event.get("ts", -1.0)),
        "displayTimeUnit": "ms",
        "otherData": {
            "model": plan.model.name,
            "cluster": plan.cluster.spec,
            "strategy": plan.strategy.describe(),
            "predicted_step_s": plan.predicted.step_time_s,
            "end_s": step.end_s,
            "not_attributed_s": step.unexplained_s,
            "actions": step.actions,
            "left_out": step.actions - sum(map(len, shown)),
        },
    }


def _windows(step: Step, most_actions: int) -> tuple[float, float]:
    """Seconds: what ends before the first or starts after the second is written."""
    if step.actions <= most_actions:
        return step.end_s, step.end_s
    half = max(1, most_actions // (2 * len(step.lanes)))
    return min(lane[half].start_s for lane in step.lanes), max(lane[-half].start_s for lane in step.lanes)


def _names(plan: Plan, stage: int) -> Iterator[dict[str, Any]]:
    width = plan.gpus_used // plan.strategy.pipeline
    first = stage * width
    ranks = f"rank {first}" if width == 1 else f"ranks {first}-{first + width - 1}, all alike"
    held = range(stage, len(plan.stages), plan.strategy.pipeline)
    layers = ", ".join(f"{plan.stages[s].first_layer}-{plan.stages[s].last_layer}" for s in held)
    row = f"stage {stage}" if len(held) == 1 else f"pipeline rank {stage}, stages {', '.join(map(str, held))}"
    on = f" on {plan.stages[stage].device}" if plan.stages[stage].device else ""
    name = f"{row}: {ranks}{on}, layers {layers}"
    yield {"ph": "M", "pid": stage, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": stage, "name": "process_sort_index", "args": {"sort_index": stage}}
    yield {"ph": "M", "pid": stage, "tid": _COMPUTE, "name": "thread_name", "args": {"name": "compute"}}
    if any(plan.stages[s].hidden_s for s in held):
        beside = {"name": "transfers beside the computation"}
        yield {"ph": "M", "pid": stage, "tid": _BESIDE, "name": "thread_name", "args": beside}


def _slice(
    stage: int, name: str, category: str, start_s: float, end_s: float, *, lane: int = _COMPUTE, **more: Any
) -> dict[str, Any]:
    span = {"ts": start_s * _MICRO, "dur": (end_s - start_s) * _MICRO}
    return {"ph": "X", "pid": stage, "tid": lane, "name": name, "cat": category, **span, **more}


def _inside(plan: Plan, rank: int, event: Event, whole: bool) -> Iterator[dict[str, Any]]:
    """The collectives and the recompute of an action, a slice a layer, or (``whole``) one a kind."""
    stage = plan.stages[event.action.stage]
    pieces = 1 if whole else stage.last_layer - stage.first_layer + 1
    for part in parts.inside(event, stage, pieces=pieces):
        category = "recompute" if part.term == "recompute" else "collective"
        of = _layers(plan, stage, event.action.kind, None if whole else part.piece)
        name, arguments = f"{parts.named(plan, part.term)}, {of}", {"layers": of, **_transfers(plan, part.term)}
        if part.term == "tensor_communication":
            arguments["in_this_slice"] = _together(plan, rank, pieces)
        yield _slice(rank, name, category, part.start_s, part.end_s, args=arguments)


def _together(plan: Plan, rank: int, pieces: int) -> dict[str, float | str]:
    """How many collectives of each axis a slice stands for on average, the plan having their sums and not each:
    slices are a forward's and a backward's of every micro-batch, of as many layers as the rank holds."""
    held = range(rank, len(plan.stages), plan.strategy.pipeline)
    layers = sum(plan.stages[s].last_layer - plan.stages[s].first_layer + 1 for s in held)
    slices = 2 * plan.strategy.micro_batches * (layers if pieces > 1 else len(held))
    found: dict[str, float | str] = {
        axis.name: round(axis.times_per_step / slices, 2) for axis in parts.axes_of(plan, "tensor_communication")
    }
    return found | {"which": "all that the layers wait for in this action, one after the other; the mean of all slices"}


def _layers(plan: Plan, stage: Stage, kind: str, piece: int | None) -> str:
    """The layer of a piece of an action, whose backward begins at the last; of None, all layers of the stage."""
    first, last = stage.first_layer, stage.last_layer
    if piece is not None:
        first = last = first + piece if kind == "F" else last - piece
    names = plan.model.layers
    return names[first] if first == last else f"{names[first]} to {names[last]}"


def _transfers(plan: Plan, term: str) -> dict[str, Any]:
    """What the axes of ``term`` transfer in a step, from each GPU."""
    return {
        axis.name: {
            "collective": axis.collective,
            "gpus": axis.degree,
            "times_per_step": axis.times_per_step,
            "bytes_per_step": axis.bytes_per_step,
            "link": axis.link,
        }
        for axis in parts.axes_of(plan, term)
    }


def _beside(plan: Plan, rank: int, shown: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """What the data axis transfers while this rank computes."""
    for event in shown:
        lasts_s = parts.hidden_s(plan, event)
        if lasts_s > 0:
            name, arguments = parts.named(plan, "sharded_state"), _transfers(plan, "sharded_state")
            yield _slice(
                rank, name, "hidden collective", event.end_s - lasts_s, event.end_s, lane=_BESIDE, args=arguments
            )


def _action(plan: Plan, rank: int, event: Event) -> dict[str, Any]:
    stage, kind, micro_batch = event.action
    arguments = {"stage": stage, "micro_batch": micro_batch, "action": str(event.action)}
    several = len(plan.stages) > plan.strategy.pipeline
    name = f"{kind}{micro_batch} of stage {stage}" if several else f"{kind}{micro_batch}"
    return _slice(rank, name, _NAMES[kind], event.start_s, event.end_s, cname=_COLOURS[kind], args=arguments)


def _gaps(step: Step, stage: int, head: float, tail: float) -> Iterator[dict[str, Any]]:
    for since, to in step.bubbles(stage):
        if to <= head or since >= tail:
            yield _slice(stage, "bubble", "bubble", since, to, cname=_COLOURS["bubble"])
    hidden = [e for e in step.lanes[stage] if e.end_s > head and e.start_s < tail]
    if hidden:
        name = f"{len(hidden)} actions not shown"
        yield _slice(stage, name, "not shown", hidden[0].start_s, hidden[-1].end_s)


def _tails(step: Step, stage: int) -> Iterator[dict[str, Any]]:
    for tail in step.tails[stage]:
        yield _slice(stage, tail.what, tail.what, tail.start_s, tail.end_s)


def _memory(plan: Plan, stage: int, lane: Sequence[Event], shown: list[Event]) -> Iterator[dict[str, Any]]:
    """A sample where a forward begins (what it saves is there at its end at the latest) and where a backward ends."""
    described = plan.stages[stage]
    counts, held = [], 0
    for event in lane:
        held += {"F": 1, "W": 0}.get(event.action.kind, -1)
        counts.append(held)
    most = max(counts, default=0) or 1
    saved = described.memory_terms.get("saved_activations", 0.0)
    others = described.peak_memory_bytes - saved
    yield _counter(stage, 0.0, others, 0.0)
    held_after = {event.action: count for event, count in zip(lane, counts, strict=True)}
    for event in shown:
        if event.action.kind == "W":
            continue
        at_s = event.start_s if event.action.kind == "F" else event.end_s
        yield _counter(stage, at_s, others, saved * held_after[event.action] / most)


def _counter(stage: int, at_s: float, others: float, saved: float) -> dict[str, Any]:
    values = {"all else, at its peak": others / _GIB, "saved activations": saved / _GIB}
    return {"ph": "C", "pid": stage, "name": "memory (GiB)", "ts": at_s * _MICRO, "args": values}


def _send(send: Send, number: int) -> Iterator[dict[str, Any]]:
    what = "activations" if send.kind == "F" else "gradients"
    name = f"send {what} {send.micro_batch} to stage {send.reader}"
    span = {"pid": send.source, "tid": _COMPUTE, "cat": "send", "name": name, "id": number}
    yield {"ph": "b", **span, "ts": send.start_s * _MICRO}
    yield {"ph": "e", **span, "ts": send.end_s * _MICRO}
    flow = {"cat": "send", "name": what, "id": number, "tid": _COMPUTE}
    # An arrow starts inside the slice that sends: at its very end it would belong to the next one.
    yield {"ph": "s", **flow, "pid": send.source, "ts": send.start_s * _MICRO - 1e-3}
    yield {"ph": "f", "bp": "e", **flow, "pid": send.target, "ts": send.used_s * _MICRO}
