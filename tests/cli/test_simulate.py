"""``autoplan simulate`` and ``autoplan show --timeline``."""

from __future__ import annotations

import json
from pathlib import Path

from autoplan.plan import Plan
from tests.support.cli import Invoke


def test_the_trace_is_written(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    path, target = plan.save(tmp_path / "plan.json"), tmp_path / "trace.json"
    done = invoke("simulate", str(path), "-o", str(target))
    assert done.exit_code == 0 and done.stdout == "" and "32 actions" in done.stderr
    made = json.loads(target.read_text())
    assert made["otherData"]["end_s"] == plan.predicted.step_time_s
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json", "trace.json"]


def test_a_dash_is_stdout(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    done = invoke("simulate", str(path), "-o", "-")
    assert json.loads(done.stdout)["traceEvents"] and not Path("-").exists()


def test_json_says_what_was_simulated(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    facts = json.loads(invoke("simulate", str(path), "--json").stdout)
    assert facts["schema"] == 1 and facts["actions"] == 32 and len(facts["idle_share_of_stages"]) == 2


def test_an_older_plan_file_is_told_so(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    assert "older one" in invoke("simulate", str(plan.save(tmp_path / "plan.json"))).stderr


def test_a_folder_that_is_not_there(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    done = invoke("simulate", str(path), "-o", str(tmp_path / "none" / "trace.json"))
    assert done.exit_code == 2 and "no folder" in done.stderr


def test_show_draws_the_timeline(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("show", str(plan.save(tmp_path / "plan.json")), "--timeline")
    assert done.exit_code == 0 and "a column is" in done.stdout and "     1 |" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
