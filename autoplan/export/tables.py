"""``specs(stage)`` and ``STAGES``: numbered names and like stages in loops, so that the text does not grow."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoplan.export.blocks import WIDTH, bracketed
from autoplan.passes.split_stages import Value

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """``text``: the arguments of a Spec behind its name, as Python. ``stages``: those that hold it."""

    name: str
    text: str
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pattern:
    before: str
    after: str
    text: str


def specs_source(entries: Sequence[Entry], loops: Sequence[Sequence[tuple[int, int]]]) -> str:
    """The function ``specs`` and the tables that it reads. ``loops``: those of each stage, as in ``STAGES``."""
    stages = len(loops)
    single, numbered = _sorted(entries)
    looped = tuple(tuple(n for first, end in ranges for n in range(first, end)) for ranges in loops)
    tables: dict[tuple[tuple[int, ...], ...], str] = {looped: "STAGES"}
    lines = [
        "def specs(stage: int) -> Iterator[Spec]:",
        '    """Every parameter and buffer of a stage: its name in the model, its whole shape, how it is split."""',
    ]
    for held, group in _together((entry.stages, entry) for entry in single):
        lines += _where(held, stages)
        indent = " " * (4 if len(held) == stages else 8)
        lines += [line for entry in group for line in _spec(indent, f'"{entry.name}"', entry.text)]
    by_numbers = [(_numbers_of(numbers, stages), pattern) for pattern, numbers in numbered.items()]
    for table, patterns in _together(by_numbers):
        name = tables.setdefault(table, f"NUMBERS_{len(tables)}" if len(tables) > 1 else "NUMBERS")
        numbers = "chain(*STAGES[stage].layers)" if name == "STAGES" else f"{name}[stage]"
        lines.append(f"    for i in {numbers}:")
        lines += [line for p in patterns for line in _spec(" " * 8, f'f"{p.before}{{i}}{p.after}"', p.text)]
    if len(lines) == 2:
        lines.append("    yield from ()")
    del tables[looped]
    return "\n\n\n".join([*(_table(name, table) for table, name in tables.items()), "\n".join(lines)])


def _where(held: tuple[int, ...], stages: int) -> list[str]:
    """The line in front of what the stages ``held`` hold; none where all do."""
    if len(held) == stages:
        return []
    if len(held) == 1:
        return [f"    if stage == {held[0]}:"]
    if len(held) > 3 and held == tuple(range(held[0], held[-1] + 1)):
        return [f"    if {held[0]} <= stage <= {held[-1]}:"]
    return bracketed("    if stage in (", [*map(str, held)], "):", WIDTH + 8)


def stages_source(stages: Sequence[tuple[str, tuple[tuple[int, int], ...]]]) -> str:
    """``STAGES``: the function and the loops of each; neighbours that hold as many layers each in one line."""
    rows: list[str] = []
    at = 0
    while at < len(stages):
        count = _like(stages[at:])
        name, loops = stages[at]
        if count > 2:
            first, end = loops[0]
            each = end - first
            span = f"range({first}, {first + count * each}{f', {each}' if each > 1 else ''})"
            rows.append(f"    *(Stage({name}, (range(a, a + {each}),)) for a in {span}),")
        else:
            count = 1
            ranges = ", ".join(f"range({first}, {end})" for first, end in loops)
            held = f", ({ranges}{',' if len(loops) == 1 else ''})" if loops else ""
            rows.append(f"    Stage({name}{held}),")
        at += count
    return "\n".join(["STAGES = [", *rows, "]"])


def _like(stages: Sequence[tuple[str, tuple[tuple[int, int], ...]]]) -> int:
    """How many of the first stages have one function and one loop, over as many layers, that follow one another."""
    name, loops = stages[0]
    if len(loops) != 1:
        return 1
    (first, end), count = loops[0], 1
    while count < len(stages):
        start = first + count * (end - first)
        if stages[count] != (name, ((start, start + end - first),)):
            break
        count += 1
    return count


def values_source(values: Sequence[Value]) -> list[str]:
    """``VALUES``: what stages send to each other; a chain of alike ones in one line."""
    comment = "  # that stages send to each other"
    rows = [_value(value, f'"{value.name}"', str(value.source), str(value.destinations)) for value in values]
    alike = {_value(value, 'f"from_{s}"', "s", "(s + 1,)") for value in values}
    chain = [(value.source, value.destinations) for value in values] == [(s, (s + 1,)) for s in range(len(values))]
    if len(values) > 2 and chain and len(alike) == 1:
        return [f"VALUES = [{comment}", f"    {alike.pop()} for s in range({len(values)})", "]"]
    return [f"VALUES: list[Value] = [{comment}", *(f"    {row}," for row in rows), "]"]


def chain_source(values: Sequence[Value]) -> list[str]:
    """``VALUES`` of stages in a row; alike ones once."""
    rows = [f"Value({value.sizes}, {value.dtype})" for value in values]
    if rows and len(set(rows)) == 1:
        return [f"VALUES = [{rows[0]}] * {len(rows)}  # what each stage sends to the next"]
    return ["VALUES: list[Value] = [  # what each stage sends to the next", *(f"    {row}," for row in rows), "]"]


def _value(value: Value, name: str, source: str, readers: str) -> str:
    return f"Value({name}, {source}, {readers}, {value.sizes}, {value.order}, {value.dtype}, {value.differentiable})"


def _sorted(entries: Sequence[Entry]) -> tuple[list[Entry], dict[_Pattern, dict[int, tuple[int, ...]]]]:
    numbered: dict[_Pattern, dict[int, tuple[int, ...]]] = {}
    members: dict[_Pattern, list[Entry]] = {}
    for entry in entries:
        found = re.fullmatch(r"(.*?\.|)(\d+)(\..*)", entry.name)
        if found:
            pattern = _Pattern(found.group(1), found.group(3), entry.text)
            numbered.setdefault(pattern, {})[int(found.group(2))] = entry.stages
            members.setdefault(pattern, []).append(entry)
    rare = {pattern for pattern, numbers in numbered.items() if len(numbers) == 1}
    alone = {entry.name for pattern in rare for entry in members[pattern]}
    looped = {entry.name for pattern in members.keys() - rare for entry in members[pattern]}
    single = [entry for entry in entries if entry.name in alone or entry.name not in looped]
    return single, {pattern: numbers for pattern, numbers in numbered.items() if pattern not in rare}


def _numbers_of(numbers: dict[int, tuple[int, ...]], stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(n for n, held in sorted(numbers.items()) if stage in held) for stage in range(stages))


def _together(pairs: Iterable[tuple[K, V]]) -> list[tuple[K, list[V]]]:
    found: dict[K, list[V]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return list(found.items())


def _table(name: str, table: tuple[tuple[int, ...], ...]) -> str:
    """Numbers of layers by stage; runs as ranges."""
    bounds = [table[0][0] if table[0] else 0, *(numbers[-1] + 1 for numbers in table if numbers)]
    if len(table) > 2 and table == tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds)):
        return f"BOUNDS = {_tuple(bounds)}\n{name} = [range(a, b) for a, b in itertools.pairwise(BOUNDS)]  # by stage"
    rows = [f"    {_run(numbers)}," for numbers in table]
    return "\n".join([f"{name}: tuple[Sequence[int], ...] = (  # by stage", *rows, ")"])


def _run(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"range({numbers[0]}, {numbers[-1] + 1})"
    return _tuple(numbers)


def _tuple(numbers: Sequence[int]) -> str:
    return f"({numbers[0]},)" if len(numbers) == 1 else f"({', '.join(map(str, numbers))})"


def _spec(indent: str, name: str, text: str) -> list[str]:
    line = f"{indent}yield Spec({name}, {text})"
    if len(line) <= WIDTH + 8:
        return [line]
    return [f"{indent}yield Spec(", f"{indent}    {name}, {text}", f"{indent})"]
