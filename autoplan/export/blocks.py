"""A stage's graph as calls of functions, one function for all blocks that compute alike.

Nodes are grouped by the layer that they belong to; what depends on no parameter and is shared by the layers (position
tables, masks, sizes) comes first. Groups whose bodies read the same once names are made neutral are one function. Its
text is written from the first of them: values are named by the user's own assignments, with the user's lines beside.
"""

from __future__ import annotations

import keyword
import linecache
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from autoplan.capture.errors import node_frame
from autoplan.export.expressions import expression
from autoplan.passes.graph_facts import GraphFacts

WIDTH = 112
_ROOM = 24  # for a name and a sign in front of an expression
_MOST = 0.5  # of the user's line, to stand beside a statement
SHARED = -1  # the group of what comes before all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """``inputs``: (name, type) of each; ``returns``: types; ``body``: lines, indented by four, the return included."""

    name: str
    summary: str
    inputs: tuple[tuple[str, str], ...]
    returns: tuple[str, ...]
    body: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One group: ``outputs = function(p under prefix, *inputs)``. ``layer``: its number in the plan, None before all
    layers. ``reads``: parameters and buffers by full name."""

    function: Function
    prefix: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    layer: int | None
    reads: tuple[str, ...]
    nodes: frozenset[Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes of one layer (or shared by all), in order. ``prefix``: of its parameters, with the dot. ``core``: those
    that run again in the backward, each run of neighbours as a function of its own."""

    layer: int | None
    label: str
    prefix: str
    nodes: tuple[Node, ...]
    core: frozenset[Node] = frozenset()


@dataclass
class Functions:
    """The distinct functions of all stages, by their neutral bodies."""

    by_key: dict[object, Function] = field(default_factory=dict)
    first_call: dict[str, Call] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def call(self, group: Group, module: GraphModule) -> Call:
        """The call of ``group``, whose function is made at its first appearance."""
        inside = set(group.nodes)
        inputs = _unique(
            n for node in group.nodes for n in node.all_input_nodes if n not in inside and n.op != "get_attr"
        )
        outputs = [node for node in group.nodes if any(user not in inside for user in node.users)]
        reads = _unique(n for node in group.nodes for n in node.all_input_nodes if n.op == "get_attr")
        key = _neutral(group, inputs, outputs)
        if key not in self.by_key:
            self.by_key[key] = self._written(group, inputs, outputs, module)
        call = Call(
            function=self.by_key[key],
            prefix=group.prefix,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            layer=group.layer,
            reads=tuple(str(node.target) for node in reads),
            nodes=frozenset(inside),
        )
        self.first_call.setdefault(call.function.name, call)
        return call

    def drop(self, function: Function) -> None:
        """Take ``function`` out: it is written elsewhere."""
        self.by_key = {key: each for key, each in self.by_key.items() if each is not function}

    def _written(self, group: Group, inputs: list[Node], outputs: list[Node], module: GraphModule) -> Function:
        name = _identifier(group.label, self._taken)
        body = _Body(group, inputs, GraphFacts(module.graph, module))
        cores = {run[0]: self._core(run, group, module) for run in _core_runs(group)}
        lines = body.lines(outputs, cores)
        return Function(
            name=name,
            summary=f"{group.label}: lines of {body.file}." if body.file else f"{group.label}.",
            inputs=tuple((body.names[node], type_of(node)) for node in inputs),
            returns=tuple(type_of(node) for node in outputs),
            body=tuple(lines),
        )

    def _core(self, run: list[Node], group: Group, module: GraphModule) -> Call:
        label = f"{group.label}.core"
        return self.call(Group(layer=group.layer, label=label, prefix=group.prefix, nodes=tuple(run)), module)


def _core_runs(group: Group) -> list[list[Node]]:
    runs: list[list[Node]] = []
    previous = None
    for node in group.nodes:
        if node in group.core:
            if previous in group.core and runs:
                runs[-1].append(node)
            else:
                runs.append([node])
        previous = node
    return runs


def _unique(nodes: Iterable[Node]) -> list[Node]:
    return list(dict.fromkeys(nodes))


def type_of(node: Node) -> str:
    """The annotation of a node's value."""
    example = node.meta.get("val")
    if isinstance(example, tuple | list):
        return "tuple[Tensor, ...]"
    if isinstance(example, Tensor) or example is None:
        return "Tensor"
    return "int" if isinstance(example, int | torch.SymInt) else "float"


def _read(node: Node, prefix: str) -> str:
    """A parameter or buffer: ``p`` holds those of the block under their own names, ``p.root`` all."""
    name = str(node.target)
    return f'p["{name[len(prefix) :]}"]' if prefix and name.startswith(prefix) else f'p.root["{name}"]'


def _neutral(group: Group, inputs: Sequence[Node], outputs: Sequence[Node]) -> object:
    names: dict[Node, str] = {node: f"in{index}" for index, node in enumerate(inputs)}
    lines = []
    for index, node in enumerate(group.nodes):
        names |= {n: _read(n, group.prefix) for n in node.all_input_nodes if n.op == "get_attr"}
        lines.append(expression(node, names))
        names[node] = f"v{index}"
    cores = tuple(index for index, node in enumerate(group.nodes) if node in group.core)
    return (cores, tuple(lines), tuple(names[node] for node in outputs), tuple(type_of(node) for node in inputs))


# ------------------------------------------------------------------------------------------------ a function's body


class _Body:
    """Writes a group's statements: a user's line at a time, inner values in place."""

    def __init__(self, group: Group, inputs: Sequence[Node], facts: GraphFacts) -> None:
        self._group, self._facts = group, facts
        self._writes = any(map(facts.writes, group.nodes))
        self._taken: set[str] = {"p"}
        self.names: dict[Node, str] = {}
        self._inside: set[Node] = set()  # those whose name is an expression
        files = [os.path.basename(frame[0]) for node in group.nodes if (frame := _frame(node))]
        self.file = max(dict.fromkeys(files), key=files.count, default="")
        for node in inputs:
            self.names[node] = _identifier(pretty(node), self._taken)

    def lines(self, outputs: Sequence[Node], cores: Mapping[Node, Call]) -> list[str]:
        answer: list[str] = []
        shown = ""
        kept = {*outputs, *(node for call in cores.values() for node in (*call.inputs, *call.outputs))}
        for run in self._runs():
            core = cores.get(run[0])
            statements = self._statements(run, kept) if run[0] not in self._group.core else self._recomputed(core)
            line = self._comment(run[0])
            if line and line != shown and statements:
                statements = _commented(statements, line)
                shown = line
            answer.extend(f"    {statement}" for statement in statements)
        if outputs:
            answer = _returning(answer, [self.names[node] for node in outputs])
        return answer

    def _comment(self, node: Node) -> str:
        """The user's line behind its number, and behind the file where that is not the one most lines are from."""
        frame = _frame(node)
        if frame is None:
            return ""
        file = os.path.basename(frame[0])
        return f"{'' if file == self.file else f'{file} '}{frame[1]}: {_source(node)}"

    def _runs(self) -> list[list[Node]]:
        """Neighbours that one line of the user's makes."""
        runs: list[list[Node]] = []
        core = self._group.core
        for node in self._group.nodes:
            alike = runs and (node in core) == (runs[-1][-1] in core)
            if alike and (node in core or _user_line(node) == _user_line(runs[-1][-1])):
                runs[-1].append(node)
            else:
                runs.append([node])
        return runs

    def _statements(self, run: list[Node], kept: set[Node]) -> list[str]:
        statements: list[str] = []
        inside = set(run)
        for node in run:
            self.names |= {n: _read(n, self._group.prefix) for n in node.all_input_nodes if n.op == "get_attr"}
            if self._is_its_operand(node):
                self.names[node] = self.names[node.all_input_nodes[0]]
                continue
            text = expression(node, self.names)
            while len(text) > WIDTH - len(pretty(node)) and (longest := self._longest_inside(node)):
                statements += self._named(longest, self.names[longest])
                text = expression(node, self.names)
            if node not in kept and self._may_stand_inside(node, inside):
                self.names[node] = text
                self._inside.add(node)
            elif not node.users:
                statements.append(text)
            else:
                statements += self._named(node, text)
        return statements

    def _named(self, node: Node, text: str) -> list[str]:
        self._inside.discard(node)
        self.names[node] = _identifier(pretty(node), self._taken)
        return _wrapped(f"{self.names[node]} = {text}")

    def _longest_inside(self, node: Node) -> Node | None:
        """Of the operands that are expressions, the longest, unless a name would be no shorter."""
        found = [n for n in node.all_input_nodes if n in self._inside and len(self.names[n]) > _ROOM]
        return max(found, key=lambda n: len(self.names[n]), default=None)

    def _is_its_operand(self, node: Node) -> bool:
        """Whether the value is the operand's own: times one, plus nothing, or another name, where nothing is written
        in place."""
        if self._writes or node in self._group.core or not node.args or not isinstance(node.args[0], Node):
            return False
        return node.target is torch.ops.aten.alias.default or _changes_nothing(node)

    def _recomputed(self, core: Call | None) -> list[str]:
        assert core is not None
        for node in core.outputs:
            self.names[node] = _identifier(pretty(node), self._taken)
        given = ", ".join(["p", *(self.names[node] for node in core.inputs)])
        return [f"{', '.join(self.names[n] for n in core.outputs)} = recomputed({core.function.name}, {given})"]

    def _may_stand_inside(self, node: Node, run: set[Node]) -> bool:
        """Used once, by the same line, and computed the same a moment later."""
        users = list(node.users)
        if len(users) != 1 or users[0] not in run or users[0].all_input_nodes.count(node) != 1:
            return False
        between = self._group.nodes[self._group.nodes.index(node) + 1 : self._group.nodes.index(users[0])]
        facts = self._facts
        return not facts.is_random(node) and not facts.writes(node) and not any(map(facts.writes, between))


def _returning(lines: list[str], names: list[str]) -> list[str]:
    """``lines`` and the return of ``names``: of what the last line computes, where that is all."""
    assigned = f"    {names[0]} = "
    if len(names) == 1 and lines and lines[-1].startswith(assigned):
        return [*lines[:-1], f"    return {lines[-1].removeprefix(assigned)}"]
    return [*lines, f"    return {', '.join(names)}"]


def _changes_nothing(node: Node) -> bool:
    """Times or divided by one; plus or minus the whole number 0 (a float's -0.0 would change)."""
    if len(node.args) != 2 or node.kwargs or isinstance(node.args[1], Node | bool):
        return False
    value, operand = (each.meta.get("val") for each in (node, node.all_input_nodes[0]))
    if not isinstance(value, Tensor) or not isinstance(operand, Tensor) or value.dtype != operand.dtype:
        return False
    neutral = node.args[1]
    if node.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor):
        return bool(neutral == 1)
    whole = not value.is_floating_point() and not value.is_complex()
    return node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor) and whole and bool(neutral == 0)


def _commented(statements: list[str], line: str) -> list[str]:
    """``statements`` with the user's line beside the first, where there is room for most of it, else above."""
    room = WIDTH - len(statements[-1])
    if len(statements) == 1 and "\n" not in statements[0] and room >= _MOST * len(line):
        return [f"{statements[0]}  # {line if len(line) <= room else f'{line[: room - 3].rstrip()}...'}"]
    return [f"# {line}"[: WIDTH + 4].rstrip(), *statements]


_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)\s*=[^=]")


def pretty(node: Node) -> str:
    """The user's own name for a value, where a line that assigns one ends with it; else the operator's name."""
    if isinstance(node.meta.get("val"), torch.SymInt | int):
        return "samples"
    found = _ASSIGNED.match(_source(node))
    if found and not any(_user_line(user) == _user_line(node) for user in node.users):
        return found.group(1)
    return re.sub(r"_\d+$", "", node.name)


def _frame(node: Node) -> tuple[str, int] | None:
    if "autoplan_frame" not in node.meta:
        frame = node_frame(node)
        node.meta["autoplan_frame"] = (frame.filename, frame.lineno or 0) if frame else None
    return node.meta["autoplan_frame"]


def _source(node: Node) -> str:
    frame = _frame(node)
    return linecache.getline(*frame).strip() if frame else ""


def _user_line(node: Node) -> str:
    frame = _frame(node)
    return f"{os.path.basename(frame[0])}:{frame[1]}: {_source(node)}" if frame else ""


def _identifier(wanted: str, taken: set[str]) -> str:
    """A Python name near ``wanted`` that is not taken; it is from now on."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", wanted)
    base = re.sub(r"\W+", "_", snake).strip("_").lower() or "value"
    if base[0].isdigit() or keyword.iskeyword(base):
        base = f"{base}_" if keyword.iskeyword(base) else f"x{base}"
    name, count = base, 2
    while name in taken:
        name, count = f"{base}_{count}", count + 1
    taken.add(name)
    return name


# ------------------------------------------------------------------------------------------------------ what a group is


def groups(
    module: GraphModule, layer_of: Mapping[str, int], layers: range, label: Callable[[int], tuple[str, str]]
) -> list[Group]:
    """The nodes of a stage that holds ``layers``, by layer. ``label(layer)``: what it is called, and its parameters'
    prefix. One group where the nodes cannot be sorted by layer."""
    facts = GraphFacts(module.graph, module)
    nodes = [node for node in facts.order if node.op == "call_function"]
    place = _places(nodes, layer_of, layers, facts)
    by_layer: dict[int, list[Node]] = {}
    for node in nodes:
        by_layer.setdefault(place[node], []).append(node)
    sorted_ = sorted(by_layer)
    if not _in_order([node for layer in sorted_ for node in by_layer[layer]], facts):
        return [Group(layer=None, label="stage", prefix="", nodes=tuple(nodes))]
    answer = []
    for layer in sorted_:
        name, prefix = ("shared values", "") if layer == SHARED else label(layer)
        answer.append(
            Group(layer=None if layer == SHARED else layer, label=name, prefix=prefix, nodes=tuple(by_layer[layer]))
        )
    return answer


def _places(nodes: list[Node], layer_of: Mapping[str, int], layers: range, facts: GraphFacts) -> dict[Node, int]:
    place: dict[Node, int] = {}
    tables = _tables(nodes, layer_of, facts)
    for node in nodes:
        own = SHARED if node in tables else layer_of.get(node.name)
        if own == SHARED:
            place[node] = SHARED
            continue
        if own is not None and own in layers:
            place[node] = own
            continue
        before = [place[n] for n in node.all_input_nodes if n in place]
        steady = not facts.is_random(node) and not facts.writes(node)
        reads = any(n.op == "get_attr" and _is_parameter(n, facts) for n in node.all_input_nodes)
        place[node] = max(before, default=SHARED) if steady and not reads else max([*before, layers.start])
    for node in reversed(nodes):  # what only prepares a parameter, or what a loss divides by, goes with its reader
        prepares = facts.is_parameter_view(node) or all(n.name.startswith("loss_total_") for n in node.all_input_nodes)
        if layer_of.get(node.name) not in layers and prepares and node.all_input_nodes:
            place[node] = min((place[user] for user in node.users if user in place), default=place[node])
    return place


def _tables(nodes: list[Node], layer_of: Mapping[str, int], facts: GraphFacts) -> set[Node]:
    """What depends on no parameter and no stage before, and other layers use: positions, rotary tables, masks."""
    free: set[Node] = set()
    for node in nodes:
        known = all(n in free or n.op == "get_attr" or _of_batch(n) for n in node.all_input_nodes)
        reads = any(n.op == "get_attr" and _is_parameter(n, facts) for n in node.all_input_nodes)
        if known and not reads and not facts.is_random(node) and not facts.writes(node):
            free.add(node)
    found: set[Node] = set()
    for node in reversed(nodes):
        own = layer_of.get(node.name, SHARED)
        if node in free and any(user in found or layer_of.get(user.name, own) != own for user in node.users):
            found.add(node)
    return found


def _of_batch(node: Node) -> bool:
    return node.op == "placeholder" and not node.name.startswith("loss_total_")


def _is_parameter(node: Node, facts: GraphFacts) -> bool:
    return isinstance(facts.attribute(str(node.target)), torch.nn.Parameter)


def _in_order(nodes: list[Node], facts: GraphFacts) -> bool:
    position = {node: index for index, node in enumerate(nodes)}
    return all(position[n] < position[node] for node in nodes for n in facts.dependencies(node) if n in position)


def _wrapped(statement: str) -> list[str]:
    """A statement that ends with a call, whose arguments go on a line of their own where it is too long."""
    if len(statement) <= WIDTH + 4 or not statement.endswith(")"):
        return [statement]
    depth = 0
    for at in range(len(statement) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(statement[at], 0)
        if not depth:
            return bracketed(statement[: at + 1], _arguments(statement[at + 1 : -1]), ")", WIDTH + 4)
    return [statement]


def _arguments(text: str) -> list[str]:
    """Split at the commas that stand in no brackets and no quotes."""
    parts, depth, quoted, start = [], 0, False, 0
    for at, letter in enumerate(text):
        quoted ^= letter == '"'
        depth += 0 if quoted else {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and not depth and not quoted:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def bracketed(head: str, items: Sequence[str], tail: str, width: int = WIDTH + 8) -> list[str]:
    """``head items tail`` on one line, with the items on a line of their own, or on one each."""
    text = f"{head}{', '.join(items)}{tail}"
    if len(text) <= width:
        return [text]
    inner = f"    {', '.join(items)}"
    if len(inner) <= width:
        return [head, inner, tail]
    return [head, *(f"    {item}," for item in items), tail]
