"""A plan in words and tables: what was chosen, what each axis does, and why not less or more.

Plain text of 80 columns; reads nothing but the plan, so a plan file from another machine explains itself.
"""

from __future__ import annotations

from autoplan.explain.reasons import alternatives, assumptions, decision, other_answers, proof
from autoplan.explain.tables import axes, memory, stages, step
from autoplan.plan import Plan

__all__ = ["explain"]


def explain(plan: Plan) -> str:
    """The plan as text; every line has at most 80 columns."""
    sections = (decision, axes, stages, memory, step, alternatives, other_answers, proof, assumptions)
    texts = ["\n".join(lines) for section in sections if (lines := section(plan))]
    return "\n".join(line.rstrip() for line in "\n\n".join(texts).split("\n")) + "\n"
