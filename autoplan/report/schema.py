"""The JSON Schema of a plan file, for other tools; :mod:`autoplan.consistency` checks what a schema cannot say."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from autoplan.plan import SCHEMA_VERSION, Plan


def plan_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of what ``Plan.to_json`` writes; units are in the fields' names."""
    schema = TypeAdapter(Plan).json_schema()
    schema["properties"]["schema"]["const"] = SCHEMA_VERSION
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "autoplan plan file"} | {
        name: value for name, value in schema.items() if name != "title"
    }
