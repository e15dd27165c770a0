"""``autoplan explain``: a plan in words and tables, why not less or more, and what would change it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli import completions, console, options, plans
from autoplan.cli.output import check_file, is_stdout, write
from autoplan.errors import AutoplanError
from autoplan.plan import Plan

if TYPE_CHECKING:
    from autoplan.what_if import Question

Operators = Annotated[
    bool, typer.Option("--operators", help="What each operator takes in a micro-batch; traces the model again.")
]
Layer = Annotated[
    str | None,
    typer.Option(
        "--layer",
        metavar="NAME",
        help="One layer and its operators; traces the model again.",
        autocompletion=completions.layers,
    ),
]
WhatIf = Annotated[
    bool, typer.Option("--what-if", help="Search again: which memory or links would change the decision.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The model, where its name in the plan is none to build.",
        autocompletion=completions.presets,
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="SPEC", help="The cluster, where the plan's is not at hand.", autocompletion=completions.specs
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="With --what-if: write the plan with its answers; - is stdout."
    ),
]


def explain(
    path: options.PlanFile,
    operators: Operators = False,
    layer: Layer = None,
    what_if: WhatIf = False,
    model: Model = None,
    gpus: Gpus = None,
    output: Output = None,
    json: options.Json = False,
) -> None:
    """Say what a plan splits, what that costs, why the alternatives lost and what would change the decision.

    Example: autoplan explain plan.json
    Example: autoplan explain plan.json --what-if -o plan.json
    Example: autoplan explain plan.json --layer layers.7
    """
    plan = plans.load(path)
    if sum((operators, layer is not None, what_if)) > 1:
        raise AutoplanError("--operators, --layer and --what-if are three questions", attempt="one at a time")
    if output is not None and not what_if:
        attempt = f"autoplan explain {path} --what-if -o {output}"
        raise AutoplanError("-o keeps the answers of --what-if", attempt=attempt)
    if operators or layer is not None:
        _deeper(plan, layer, model, gpus, json=json)
        return
    if what_if:
        check_file(output, what="plan", name="plan.json", json=json)
        from autoplan.what_if import what_if as answers

        with console.progress(f"Asking {plan.model.name} again"):
            plan = answers(plan, model=model, gpus=gpus)
        if output is not None:
            write(output, plan.to_json(), what="plan")
    if json:
        from autoplan.explain.answer import answer

        console.result_json(answer(plan))
    elif is_stdout(output):
        return
    elif what_if:
        from autoplan.explain.changes import would_change
        from autoplan.explain.text import columns

        with columns(console.out().width):
            console.told("\n".join(would_change(plan)))
        if output is not None:
            console.note(f"wrote {output}; next: autoplan report {output}")
    else:
        from autoplan.explain import explain as told

        console.told(told(plan, width=console.out().width, file=_as_argument(path)))


def _as_argument(path: Path) -> str:
    """What to write for the plan's file in the command that is recommended."""
    return "PLAN.json" if plans.is_stdin(path) else shlex.quote(str(path))


def _deeper(plan: Plan, layer: str | None, model: str | None, gpus: str | None, *, json: bool) -> None:
    with console.progress(f"Tracing {model or plan.model.name}"):
        from autoplan.explain import operators as told
        from autoplan.what_if import question

        asked = question(plan, model=model, gpus=gpus)
    kinds = _kinds(plan, asked)
    devices = [
        next((g.device for g in asked.cluster.groups if g.name in stage.device.split(" + ")), asked.cluster.device)
        for stage in plan.stages
    ]
    if layer is None:
        rows = told.operators(plan, asked.traced.layers, kinds, devices)
        if json:
            console.result_json({"schema": 1, "operators": [_row(row) for row in rows], "unchecked": plan.unchecked})
        else:
            console.told(told.operators_text(plan, rows))
        return
    found = told.one_layer(plan, asked.traced.layers, kinds, devices, layer)
    if json:
        about = {name: value for name, value in dataclasses.asdict(found).items() if name != "rows"}
        of_layer = [_row(row) for row in found.rows]
        console.result_json({"schema": 1, **about, "operators": of_layer, "unchecked": plan.unchecked})
    else:
        console.told(told.layer_text(plan, found))


def _row(row: Any) -> dict[str, Any]:
    return dataclasses.asdict(row)


def _kinds(plan: Plan, asked: Question) -> Any:
    """The layer kinds on one GPU under the plan's tensor degree."""
    strategy, problem = plan.strategy, asked.problem
    if strategy.tensor == 1:
        return asked.traced.layers.kinds
    if strategy.sequence_parallel and problem.sequence_kinds is not None:
        return problem.sequence_kinds(strategy.tensor)
    return problem.tensor_kinds(strategy.tensor)
