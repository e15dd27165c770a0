"""``autoplan models``: the presets."""

from __future__ import annotations

from autoplan.cli import console, options
from autoplan.explain.text import count


def models(json: options.Json = False) -> None:
    """List the presets and where their figures come from.

    Example: autoplan models --json
    """
    from autoplan.models import presets

    if json:
        rows = [{"name": p.name, "parameters": p.parameters, "source": p.source} for p in presets()]
        console.result_json({"schema": 1, "models": rows})
        return
    listed = console.table(("preset", False), ("parameters", True), ("source", False))
    for entry in presets():
        listed.add_row(entry.name, count(entry.parameters), entry.source)
    console.result(listed)
    console.note("MODEL may also be a Hugging Face config.json, or file.py:factory")
