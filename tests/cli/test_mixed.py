"""Every command that reads a plan reads one for several kinds of GPUs, and says which kind does what."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autoplan.errors import PlanFileError, StrategyError
from autoplan.plan import Plan
from autoplan.search import search
from autoplan.search.questions import compare, fit, min_gpus
from tests.support.cli import Invoke, too_wide
from tests.support.layer_graphs import Dense, problem
from tests.support.mixed import group, mixed

QUESTION = problem(
    [Dense(flops=3e12, elements=20_000_000)] * 12,
    mixed([group(2, name="fast"), group(2, speed=0.5, memory_gib=8.0, name="slow")]),
    global_batch=64,
    heads=1,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(QUESTION)


@pytest.fixture
def file(plan: Plan, tmp_path: Path) -> str:
    return str(plan.save(tmp_path / "plan.json"))


def test_show_and_explain_name_the_kind_of_every_stage(invoke: Invoke, file: str) -> None:
    shown = invoke("show", file)
    assert shown.exit_code == 0, shown.output
    assert "2 fast + 2 slow" in shown.output
    explained = invoke("explain", file)
    assert "on fast" in explained.output and "on slow" in explained.output
    assert "Layers are split over kinds by their pace" in " ".join(explained.output.split())
    assert not too_wide(explained.output)


def test_report_simulate_and_diff_read_it(invoke: Invoke, file: str, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert invoke("report", file, "-o", str(page)).exit_code == 0
    assert "(slow)" in page.read_text()
    assert invoke("simulate", file, "-o", str(trace)).exit_code == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert "the same" in invoke("diff", file, file).output


def test_its_json_names_groups_and_devices(plan: Plan) -> None:
    data = plan.to_dict()
    assert [g["name"] for g in data["cluster"]["groups"]] == ["fast", "slow"]
    assert sorted({s["device"] for s in data["stages"]}) == ["fast", "slow"]
    assert {g["name"]: g["first_rank"] for g in data["cluster"]["groups"] if g["gpus_used"]}.keys() == {"fast", "slow"}


@pytest.mark.parametrize(("field", "value"), [("device", "other"), ("device", ""), ("peak_memory_bytes", 9 * 2.0**30)])
def test_a_plan_file_that_contradicts_its_groups_is_refused(plan: Plan, field: str, value: object) -> None:
    slow = next(i for i, stage in enumerate(plan.stages) if stage.device == "slow")
    changed = dataclasses.replace(plan.stages[slow], **{field: value})  # type: ignore[arg-type]
    if field == "peak_memory_bytes":
        changed = dataclasses.replace(changed, memory_terms={"weights": 9 * 2.0**30})
    stages = tuple(changed if i == slow else stage for i, stage in enumerate(plan.stages))
    with pytest.raises(PlanFileError, match=f"stages.{slow}.{field}"):
        Plan.from_json(dataclasses.replace(plan, stages=stages).to_json())


def test_fit_counts_what_is_free_on_each_stages_own_gpus() -> None:
    found = fit(QUESTION)
    free = [found.plan.cluster.memory_of(stage) - stage.peak_memory_bytes for stage in found.plan.stages]
    assert found.headroom_bytes == min(free) > 0


def test_compare_sets_the_ways_to_use_the_kinds_side_by_side() -> None:
    rows = {contender.family: contender for contender in compare(QUESTION)}
    assert set(rows) == {"fast alone", "slow alone", "all GPUs alike", "pipeline across kinds"}
    chosen = [contender for contender in rows.values() if contender.chosen]
    assert [contender.family for contender in chosen] == ["pipeline across kinds"]
    assert all(other.step_time_s is None or other.step_time_s >= chosen[0].step_time_s for other in rows.values())


def test_the_fewest_gpus_are_counted_of_one_kind() -> None:
    with pytest.raises(StrategyError, match="of one kind"):
        min_gpus(QUESTION)
