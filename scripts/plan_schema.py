"""Write docs/plan.schema.json, the JSON Schema of a plan file, from the code."""

from __future__ import annotations

import json
from pathlib import Path

from autoplan.report.schema import plan_schema

if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "plan.schema.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(plan_schema(), indent=2) + "\n", encoding="utf-8")
