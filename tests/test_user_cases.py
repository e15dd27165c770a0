"""Reports by users of other tools (data/user_cases.jsonl): each has its line in docs/user_cases.md, and the tests that
the lines name exist. Small cases that no room's own tests hold are at the end."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoplan
from autoplan.search import search
from tests.support import models
from tests.support.layer_graphs import Dense, cluster, problem

ROOT = Path(__file__).parents[1]
CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "user_cases.jsonl").read_text().splitlines()]
PAGE = (ROOT / "docs" / "user_cases.md").read_text()
VERDICTS = ("holds", "in part", "otherwise, by choice", "not yet")


class Line(NamedTuple):
    name: str
    source: str
    kind: str
    case: str
    verdict: str
    answer: str
    tests: tuple[str, ...]


def lines() -> list[Line]:
    found = []
    for text in PAGE.splitlines():
        if text.startswith("| ["):
            link, kind, case, verdict, answer, tests = (cell.strip() for cell in text.strip("|").split(" | "))
            name, source = re.fullmatch(r"\[(.+?)\]\((.+?)\)", link).groups()  # type: ignore[union-attr]
            found.append(Line(name, source, kind, case, verdict, answer, tuple(re.findall(r"`(.+?)`", tests))))
    return found


@functools.cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def exists(path: str, name: str) -> bool:
    return name.startswith("test_") and (ROOT / path).is_file() and name in names_in(path)


def test_every_case_has_one_line_that_answers_it() -> None:
    told = lines()
    assert [line.name for line in told] == [case["id"] for case in CASES]
    for line, case in zip(told, CASES, strict=True):
        assert (line.source, line.kind, line.case) == (case["source"], case["kind"], case["case"].replace("|", "/"))
        assert line.verdict in VERDICTS, line.name
        assert line.answer and line.tests, line.name


def test_the_tests_that_are_named_exist() -> None:
    missing = [f"{line.name}: {test}" for line in lines() for test in line.tests if not exists(*test.split("::"))]
    assert not missing


def test_the_page_counts_its_lines() -> None:
    counts = Counter(line.verdict for line in lines())
    numbers = [int(number) for number in re.search(r"^Of (\d+) .*$", PAGE, re.MULTILINE)[0].split() if number.isdigit()]  # type: ignore[index]
    assert numbers == [len(CASES), *(counts[verdict] for verdict in VERDICTS)]


# -------------------------------------------------------------------------------------------------------- small cases


@pytest.mark.parametrize(("layers", "stages"), [(5, 4), (7, 3), (38, 8), (42, 16)])
def test_equal_layers_are_shared_out_as_evenly_as_they_divide(layers: int, stages: int) -> None:
    forced = {"pipeline": stages, "virtual_stages": 1, "schedule": "1f1b", "tensor": 1, "data": 1}
    plan = search(problem([Dense()] * layers, cluster(stages), forced=forced))
    sizes = [stage.last_layer - stage.first_layer + 1 for stage in plan.stages]
    assert len(sizes) == stages and sum(sizes) == layers
    assert min(sizes) >= 1 and max(sizes) == -(-layers // stages)


def test_three_gpus_are_used_where_heads_do_not_divide_by_three() -> None:
    """Layers whose matrices may be split over 1 or 2 ranks; one card is short of their state, or is not."""
    large = search(problem([Dense(elements=400_000_000)] * 6, cluster(3), heads=2, global_batch=12))
    small = search(problem([Dense()] * 6, cluster(3), heads=2, global_batch=12))
    for plan in (large, small):
        assert plan.strategy.tensor == 1 and plan.gpus_used == 3
    assert large.strategy.pipeline == 3 or large.strategy.zero_stage > 0


class Attention(nn.Module):
    """Projections under names that no list of names has."""

    def __init__(self) -> None:
        super().__init__()
        self.wq2, self.zz, self.proj_x = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        heads = lambda t: t.view(*x.shape[:2], 4, 8).transpose(1, 2)  # noqa: E731
        key, value = self.zz(x).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(heads(self.wq2(x)), heads(key), heads(value))
        return F.mse_loss(self.proj_x(mixed.transpose(1, 2).reshape(x.shape)), y)


class Between(nn.Module):
    """Indexing, filling, extremes and norms between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden.masked_fill(hidden > 1, 0.5).flip(1) - hidden.amax(-1, keepdim=True)
        hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        return F.mse_loss(self.second(hidden)[:, 0] + self.second(hidden).select(1, 3), y[:, 0])


def assert_equal_over_tensor_ranks(model: nn.Module, batch: Any = None, *, ranks: int = 2) -> None:
    batch = batch or {"x": torch.randn(4, 8, 32), "y": torch.randn(4, 8, 32)}
    forced = {"tensor": ranks, "data": 1, "pipeline": 1}
    plan = autoplan.plan(model, gpus=f"{ranks}xcpu", example_inputs=batch, strategy=forced)
    report = autoplan.verify(model, plan, batch)
    report.raise_if_different()
    assert report.numeric.status == "equal" and report.numeric.ranks == ranks


@pytest.mark.wide
def test_names_of_modules_do_not_matter() -> None:
    assert_equal_over_tensor_ranks(Attention())


@pytest.mark.wide
def test_operators_between_the_products_leave_the_numbers_equal() -> None:
    assert_equal_over_tensor_ranks(Between())


@pytest.mark.wide
def test_more_ranks_than_key_value_heads_leave_the_numbers_equal() -> None:
    assert_equal_over_tensor_ranks(*models.tiny_llama(layers=2, num_key_value_heads=2), ranks=4)


@pytest.mark.wide
def test_an_odd_vocabulary_leaves_the_numbers_equal() -> None:
    assert_equal_over_tensor_ranks(*models.tiny_llama(layers=2, vocab_size=101))
