"""The zoo's table as a Markdown page: written from cells, and read back to see that it still holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.zoo.entry import Entry
from tests.zoo.matrix import AXES, Cell

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
SHOWN = {"equal": "equal", "refused": "refused", "n.a.": "·", "differs": "DIFFERS"}
Rows = Mapping[str, Mapping[str, Cell]]

_HEAD = """# The zoo

Every model here is trained two steps alone (eager, one process, float64, AdamW) and as a program on forked ranks, once
for each way of splitting it. *equal*: loss, gradient norm, every gradient, every updated weight and every buffer agree
to 1e-10. *refused*: the compiler says that it does not do this, and why (below). `·`: there is nothing to split.
*divided*: the share of the weights that tensor parallelism of degree 2 keeps a part of on each rank; operators without
a rule (an LSTM's) run whole on every rank.

`make zoo` runs it; `python scripts/zoo.py NAME ...` runs some of it. The wide tests run all of it and compare with this
page. The models are built in [tests/zoo](../tests/zoo).
"""


def page(entries: Iterable[Entry], rows: Rows) -> str:
    """The whole page."""
    lines = [_HEAD, counts(rows), "", "| model | " + " | ".join(AXES) + " | divided |"]
    lines.append("|---|" + "---|" * (len(AXES) + 1))
    refusals: list[str] = []
    for entry in entries:
        cells = rows[entry.name]
        lines.append(row(entry.name, cells))
        refusals += refused(entry.name, cells)
    return "\n".join([*lines, "", "## What is refused, and why", "", *refusals, ""])


def counts(rows: Rows) -> str:
    """One sentence: how many pairs there are, and how many of them are equal."""
    cells = [cell for row_cells in rows.values() for cell in row_cells.values() if cell.status != "n.a."]
    equal = sum(cell.status == "equal" for cell in cells)
    share = equal / max(1, len(cells))
    return (
        f"{len(rows)} models x {len(AXES)} axes: {len(cells)} pairs apply, {equal} are equal ({share:.1%}), "
        f"{sum(cell.status == 'refused' for cell in cells)} are refused, "
        f"{sum(cell.status == 'differs' for cell in cells)} differ."
    )


def row(name: str, cells: Mapping[str, Cell]) -> str:
    split = cells["tensor 2"].split if "tensor 2" in cells else None
    divided = "" if split is None else f"{split:.0%}"
    return f"| {name} | " + " | ".join(SHOWN[cells[axis].status] for axis in AXES) + f" | {divided} |"


def refused(name: str, cells: Mapping[str, Cell]) -> list[str]:
    """A line a reason, with the axes that it is the reason of."""
    by_reason: dict[str, list[str]] = {}
    for axis, cell in cells.items():
        if cell.status == "refused":
            by_reason.setdefault(cell.reason, []).append(axis)
    return [f"- **{name}**: {'; '.join(axes)}: {reason}" for reason, axes in by_reason.items()]


def recorded() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The page's cells of each model, and its refusals."""
    cells: dict[str, list[str]] = {}
    refusals: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("| model |"):
            name, *rest = (part.strip() for part in line.strip("|").split("|"))
            cells[name] = rest[:-1]
        elif line.startswith("- **"):
            refusals.setdefault(line[4:].partition("**")[0], []).append(line)
    return cells, refusals
