"""Messages between stages, matched and run through without running the program.

Each pipeline rank's action list becomes the sends and receives that :mod:`autoplan.runtime.interpreter` posts for it,
in its order. A directed edge between two stages is a communicator of its own (one forward, one backward), and
communicators complete operations *in order*, as NCCL's do: the k-th send of an edge meets the k-th receive, whatever
their tags. A receive blocks its rank before it computes, a send does not; what one stage hands over to another of its
rank must be there likewise. Ranks that differ in data and tensor coordinates alone exchange alike messages with their
own neighbours, so one of them stands for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from autoplan.schedules import Action

if TYPE_CHECKING:
    from autoplan.passes.split_stages import StageGraph, Value


class Edge(NamedTuple):
    """A communicator: "forward" or "backward" between the stage that computes a value and one that reads it."""

    direction: str
    source: int
    reader: int

    def __str__(self) -> str:
        arrow = f"{self.source} -> {self.reader}" if self.direction == "forward" else f"{self.reader} -> {self.source}"
        return f"stages {arrow} ({self.direction})"


class Message(NamedTuple):
    """What is sent: a value (or its gradient) of one micro-batch."""

    value: str
    micro_batch: int

    def __str__(self) -> str:
        return f"`{self.value}` of micro-batch {self.micro_batch}"


class Event(NamedTuple):
    """``kind``: "send" or "receive"; ``wait`` (without an edge) for all receives posted before."""

    kind: str
    edge: Edge | None = None
    message: Message | None = None
    action: Action | None = None


@dataclass(slots=True)
class Matched:
    """``messages``: how many met; ``problems``: in words, none where all is well."""

    messages: int = 0
    problems: list[str] = field(default_factory=list)


def rank_events(stages: Sequence[StageGraph], actions: Sequence[Action]) -> list[Event]:
    """What one rank posts for its actions; ``stages`` are all of the model's."""
    events: list[Event] = []
    for action in actions:
        stage, here, m = stages[action.stage], action.stage, action.micro_batch
        if action.kind == "W":
            continue
        if action.kind == "F":
            events += [_post("receive", "forward", v, here, m, action) for v in stage.receives]
            events.append(Event("wait", action=action))
            events += [_post("send", "forward", v, d, m, action) for v in stage.sends for d in v.destinations]
        else:
            sent = [v for v in stage.sends if v.differentiable]
            events += [_post("receive", "backward", v, d, m, action) for v in sent for d in v.destinations]
            events.append(Event("wait", action=action))
            received = [v for v in stage.receives if v.differentiable]
            events += [_post("send", "backward", v, here, m, action) for v in received]
    return events


def _post(kind: str, direction: str, value: Value, reader: int, micro_batch: int, action: Action) -> Event:
    return Event(kind, Edge(direction, value.source, reader), Message(value.name, micro_batch), action)


def match(events: Sequence[Sequence[Event]]) -> Matched:
    """Run the lists against each other: order, completeness, deadlock."""
    found = Matched()
    sent: dict[Edge, list[Message]] = defaultdict(list)
    received: dict[Edge, list[Message]] = defaultdict(list)
    positions = [0] * len(events)
    owed: list[list[tuple[Edge, int]]] = [[] for _ in events]  # receives posted since the last wait
    moved = True
    while moved:
        moved = False
        for rank, lane in enumerate(events):
            while positions[rank] < len(lane):
                event = lane[positions[rank]]
                if event.edge is None:
                    if any(len(sent[edge]) <= index for edge, index in owed[rank]):
                        break
                    owed[rank] = []
                elif event.kind == "send":
                    assert event.message is not None
                    sent[event.edge].append(event.message)
                else:
                    assert event.message is not None
                    owed[rank].append((event.edge, len(received[event.edge])))
                    received[event.edge].append(event.message)
                positions[rank] += 1
                moved = True
    _judge(events, positions, sent, received, found)
    return found


def _judge(
    events: Sequence[Sequence[Event]],
    positions: list[int],
    sent: dict[Edge, list[Message]],
    received: dict[Edge, list[Message]],
    found: Matched,
) -> None:
    for edge in sorted({*sent, *received}):
        pairs = list(zip(sent[edge], received[edge], strict=False))
        found.messages += len(pairs)
        wrong = next(((s, r) for s, r in pairs if s != r), None)
        if wrong is not None:
            found.problems.append(f"{edge}: {wrong[0]} is sent where {wrong[1]} is received")
    stuck = [lane[at].action for lane, at in zip(events, positions, strict=True) if at < len(lane)]
    if stuck:
        waits = ", ".join(f"stage {action.stage} at {action}" for action in stuck if action is not None)
        found.problems.append(f"deadlock: {waits} wait for messages that never come")
        return
    for edge in sorted({*sent, *received}):
        extra = len(sent[edge]) - len(received[edge])
        if extra:
            lone = sent[edge][len(received[edge])] if extra > 0 else received[edge][len(sent[edge])]
            what = "sent and never received" if extra > 0 else "awaited and never sent"
            found.problems.append(f"{edge}: {lone} is {what}")
