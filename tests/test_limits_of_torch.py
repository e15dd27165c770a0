"""docs/limits_of_torch.md: eighteen limits, each answered, with tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "limits_of_torch.md").read_text()
ROWS = [line.strip("|").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ ", line)]


@functools.cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_limit_has_its_line() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 19))
    assert {row[3] for row in ROWS} == {"worked around", "forbidden", "does not apply"}


def test_every_line_names_tests_that_exist() -> None:
    for number, *_, shown_by in ROWS:
        named = re.findall(r"`(.+?)::(test_.+?)`", shown_by)
        assert named, number
        assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
