"""Write docs/plan.schema.json and docs/answers.schema.json, the JSON Schemas of a plan file and of what the commands
print with --json, from the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoplan.report.answers import answers_schema
from autoplan.report.schema import plan_schema


def write(name: str, schema: dict[str, Any]) -> None:
    target = Path(__file__).parents[1] / "docs" / name
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write("plan.schema.json", plan_schema())
    write("answers.schema.json", answers_schema())
