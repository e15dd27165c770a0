"""Stage functions: the calls of a stage in order, equal layers in a loop; stages that read the same share a function.

A loop runs over the numbers of consecutive layers, in its stage's ``layers``; so one text serves stages that hold
different layers of one kind, and does not grow with their number.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from autoplan.export.blocks import WIDTH, Call, bracketed, pretty, type_of
from autoplan.passes.split_stages import StageGraph

Policies = Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageText:
    """``body`` of the function of a stage; ``ranges``: the layers of its loops, as (first number, one past the last);
    ``received``: what it calls the values that it receives, in order."""

    body: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    received: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive calls that one loop makes; or a single call, where ``number`` is None."""

    calls: tuple[Call, ...]
    before: str  # the prefix around the number
    number: int | None
    after: str


def stage_text(stage: StageGraph, calls: Sequence[Call], policies: Policies, values: Sequence[str]) -> StageText:
    """``policies``: the recompute policy of each layer; ``values``: all that stages send, in the order of a stage's
    arguments."""
    writer = _Writer(stage, calls, policies)
    body = tuple(writer.lines())
    received = tuple(writer.received[name] for name in sorted(writer.received, key=values.index))
    return StageText(body=body, ranges=tuple(writer.ranges), received=received)


class _Writer:
    def __init__(self, stage: StageGraph, calls: Sequence[Call], policies: Policies) -> None:
        self._stage, self._policies = stage, policies
        self._runs = _runs(calls, policies)
        self.ranges: list[tuple[int, int]] = []
        self.received: dict[str, str] = {}
        self._names: dict[Node, str] = {}
        self._taken = {"p", "batch", "i"}

    def lines(self) -> list[str]:
        nodes = list(self._stage.graph_module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder" and node.name in {value.name for value in self._stage.receives}:
                self._names[node] = self._called_free("received")
                self.received[node.name] = self._names[node]
            elif node.op == "placeholder":
                self._names[node] = f'batch["{node.name}"]'
        answer: list[str] = []
        for index, run in enumerate(self._runs):
            if run.number is None:
                answer += self._single(run.calls[0])
            else:
                answer += self._loop(run, index)
        output = nodes[-1].args[0]
        results = output if isinstance(output, list | tuple) else (output,)
        only = f"    {self._names[results[0]]} = "
        if len(results) == 1 and answer and answer[-1].startswith(only):  # what the last line computes, and no more
            return [*answer[:-1], f"    return ({answer[-1].removeprefix(only)},)"]
        return [*answer, f"    return ({''.join(f'{self._names[node]}, ' for node in results).rstrip()})"]

    def _name(self, node: Node) -> str:
        return self._called_free(re.sub(r"\W", "_", pretty(node)))

    def _called_free(self, wanted: str) -> str:
        name, count = wanted, 2
        while name in self._taken:
            name, count = f"{wanted}_{count}", count + 1
        self._taken.add(name)
        return name

    def _single(self, call: Call) -> list[str]:
        given = [self._names[node] for node in call.inputs]
        for node in call.outputs:
            self._names[node] = self._name(node)
        within = f'p.of("{call.prefix}")' if call.prefix else "p"
        return self._called("    ", call, [self._names[n] for n in call.outputs], [within, *given])

    def _called(self, indent: str, call: Call, results: list[str], given: list[str]) -> list[str]:
        function = call.function.name
        if _policy(call, self._policies) == "full":
            function, given = "recomputed", [function, *given]
        left = f"{', '.join(results)} = " if results else ""
        return [f"{indent}{line}" for line in bracketed(f"{left}{function}(", given, ")", WIDTH + 8 - len(indent))]

    def _loop(self, run: _Run, index: int) -> list[str]:
        first, last = run.calls[0], run.calls[-1]
        assert run.number is not None
        self.ranges.append((run.number, run.number + len(run.calls)))
        carried = _carried(run.calls)
        answer: list[str] = []
        # What goes round the loop bears one name, from before its first turn.
        names = [self._name(node) for node in last.outputs]
        for position, output in carried.items():
            node = first.inputs[position]
            if self._names[node].isidentifier() and all(user in first.nodes for user in node.users):
                self._taken.discard(names[output])
                names[output] = self._names[node]
            else:
                answer.append(f"    {names[output]} = {self._names[node]}")
        given = [names[carried[i]] if i in carried else self._names[node] for i, node in enumerate(first.inputs)]
        answer.append(f"    for i in layers_{len(self.ranges)}:")
        within = f'p.of(f"{run.before}{{i}}{run.after}")'
        answer += self._called("        ", first, names, [within, *given])
        self._names |= dict(zip(last.outputs, names, strict=True))
        return answer


def _runs(calls: Sequence[Call], policies: Policies) -> list[_Run]:
    answer: list[_Run] = []
    for call in calls:
        before, number, after = _numbered(call.prefix)
        if answer and _continues(answer[-1], call, (before, number, after), policies, calls):
            previous = answer[-1]
            answer[-1] = _Run((*previous.calls, call), before, previous.number, after)
        else:
            answer.append(_Run((call,), before, number, after))
    return answer


def _numbered(prefix: str) -> tuple[str, int | None, str]:
    found = re.fullmatch(r"(.*?\.)(\d+)(\..*)", prefix) or re.fullmatch(r"()(\d+)(\..*)", prefix)
    return (found.group(1), int(found.group(2)), found.group(3)) if found else (prefix, None, "")


def _continues(
    run: _Run, call: Call, numbered: tuple[str, int | None, str], policies: Policies, calls: Sequence[Call]
) -> bool:
    """Whether ``call`` is one more turn of the loop that ``run`` makes."""
    last = run.calls[-1]
    before, number, after = numbered
    if run.number is None or number != run.number + len(run.calls) or (before, after) != (run.before, run.after):
        return False
    if call.function is not last.function or _policy(call, policies) != _policy(last, policies):
        return False
    own = set(last.outputs)
    if any(user not in call.nodes for node in last.outputs for user in node.users):
        return False
    if set(call.inputs) & own != own:
        return False
    try:
        _carried((*run.calls, call))
    except ValueError:
        return False
    return True


def _policy(call: Call, policies: Policies) -> str:
    return policies.get(call.layer, "none") if call.layer is not None else "none"


def _carried(calls: Sequence[Call]) -> dict[int, int]:
    """Position of each input that is the turn before's output: which output. Others are the same in every turn."""
    carried: dict[int, int] | None = None
    for previous, call in itertools.pairwise(calls):
        mine: dict[int, int] = {}
        for position, node in enumerate(call.inputs):
            if node in previous.outputs:
                mine[position] = previous.outputs.index(node)
            elif node is not calls[0].inputs[position]:
                raise ValueError("an input changes from turn to turn")
        if carried is not None and mine != carried:
            raise ValueError("what is carried changes from turn to turn")
        carried = mine
    if carried is None:  # one turn: nothing is known; treat the first output's like as carried
        carried = _alone(calls[0])
    return carried


def _alone(call: Call) -> dict[int, int]:
    """A loop of one turn still names what a longer one would carry: the first input of the type and shape of each
    output."""
    answer: dict[int, int] = {}
    for index, output in enumerate(call.outputs):
        for position, node in enumerate(call.inputs):
            if position not in answer and _alike(node, output):
                answer[position] = index
                break
    return answer


def _alike(a: Node, b: Node) -> bool:
    one, other = a.meta.get("val"), b.meta.get("val")
    return type_of(a) == type_of(b) and getattr(one, "shape", None) == getattr(other, "shape", None)
