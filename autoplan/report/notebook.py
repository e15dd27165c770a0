"""A plan, and a program, as a notebook shows them: HTML that brings its own styles and needs no script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.explain import explain
from autoplan.explain.text import count
from autoplan.plan import Plan
from autoplan.report.page import fullest, stage_rows, template

if TYPE_CHECKING:
    from autoplan.runtime.program import Program

_TEMPLATE = "notebook.html.j2"


def plan_html(plan: Plan) -> str:
    """The decision, its figures and stages, and behind a fold all of ``explain``."""
    return _html(plan, f"{plan.model.name} ({count(plan.model.parameters)} parameters) on {plan.cluster.spec}")


def program_html(program: Program) -> str:
    """The program's plan."""
    plan = program.plan
    processes = f"{plan.gpus_used} processes, one a GPU" if plan.gpus_used > 1 else "one process"
    return _html(plan, f"a program of {processes}: {plan.model.name} on {plan.cluster.spec}")


def _html(plan: Plan, heading: str) -> str:
    rows = stage_rows(plan)
    capacity = plan.cluster.memory_of(fullest(plan))
    facts = {"plan": plan, "heading": heading, "capacity": capacity, "stages": rows, "explained": explain(plan)}
    return template(_TEMPLATE).render(facts) + "\n"
