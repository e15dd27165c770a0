"""A plan in words and tables: what was chosen, what each axis does, and why not less or more.

Plain text, of 80 columns unless more are there; reads nothing but the plan, so a plan file from another machine
explains itself.
"""

from __future__ import annotations

from autoplan.explain.changes import would_change
from autoplan.explain.reasons import alternatives, assumptions, decision, proof
from autoplan.explain.tables import axes, memory, stages, step
from autoplan.explain.text import WIDTH, columns
from autoplan.plan import Plan

__all__ = ["explain"]


def explain(plan: Plan, *, width: int = WIDTH, file: str = "PLAN.json") -> str:
    """The plan as text; every line has at most ``width`` columns. ``file`` is what its plan is called in commands."""
    before, after = (decision, axes, stages, memory, step, alternatives), (proof, assumptions)
    with columns(width):
        parts = [
            *(section(plan) for section in before),
            would_change(plan, file),
            *(section(plan) for section in after),
        ]
    texts = ["\n".join(lines) for lines in parts if lines]
    return "\n".join(line.rstrip() for line in "\n\n".join(texts).split("\n")) + "\n"
