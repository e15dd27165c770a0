"""``autoplan diff``: exit code 0 whatever differs, 2 for what is no plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from autoplan.plan import Plan
from tests.support.cli import Invoke


def test_two_files(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    one = str(plan.save(tmp_path / "a.json"))
    two = str(dataclasses.replace(plan, precision="fp16").save(tmp_path / "b.json"))
    assert invoke("diff", one, one).stdout == "The plans decide and predict the same.\n"
    done = invoke("diff", one, two)
    assert done.exit_code == 0 and "a.json -> b.json" in done.stdout and "fp16" in done.stdout
    facts = json.loads(invoke("diff", one, two, "--json").stdout)
    assert facts["schema"] == 1 and not facts["same"]
    assert facts["inputs"] == [{"name": "precision", "before": "bf16", "after": "fp16", "relative": None}]


def test_what_is_no_plan(plan: Plan, invoke: Invoke, tmp_path: Path) -> None:
    one = str(plan.save(tmp_path / "a.json"))
    done = invoke("diff", one, str(tmp_path / "none.json"))
    assert done.exit_code == 2 and "cannot read the plan" in done.stderr
