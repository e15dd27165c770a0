"""A plan as one HTML page that needs nothing else: no network, pictures inline, one script that reads them aloud.

The template is escaped throughout, and a content security policy in the page forbids it to load anything and to run any
script but its own, by its hash.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from autoplan.errors import StrategyError
from autoplan.explain import axis_words, changes, reasons
from autoplan.explain.text import count, percent, seconds, size
from autoplan.plan import Plan, Stage
from autoplan.report import drawing, machines, model_graph, scatter, step

_TEMPLATE, _SCRIPT = "page.html.j2", "script.js.j2"
_MOST_RANKS = 4  # whose stages are named in a sentence
_LETTER = 6.0  # pixels of a letter of the font


def page(plan: Plan) -> str:
    """The page's text."""
    return template(_TEMPLATE).render(_facts(plan)) + "\n"


@functools.cache
def template(name: str) -> Template:
    """The template of that file name, which escapes whatever it is given."""
    environment = Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seconds": seconds, "size": size, "count": count, "percent": percent, "words": _words}
    return environment.get_template(name)


def _read(name: str) -> str:
    return resources.files("autoplan.report").joinpath("templates", name).read_text(encoding="utf-8")


def _facts(plan: Plan) -> dict[str, Any]:
    try:
        simulated, refused = step.simulate(plan), ""
    except StrategyError as error:
        simulated, refused = None, error.what
    script, drawn = _read(_SCRIPT), machines.picture(plan)
    return {
        "plan": plan,
        "capacity": plan.cluster.memory_of(fullest(plan)),
        "samples_are_tokens": plan.model.tokens_per_sample == 1,
        "by_group": any(" of " in part.where for part in (*drawn.inside, *drawn.between)),
        "decision": " ".join(reasons.decision(plan)[1:]),
        "proof": " ".join(reasons.proof(plan)[1:]),
        "axes": [(axis, axis_words.when(plan, axis), axis_words.members(plan, axis)) for axis in plan.axes],
        "stages": stage_rows(plan),
        "groups": [(kind, label) for kind, label, _ in drawing.GROUPS] + [drawing.ELSE],
        "memory_terms": _memory_terms(plan),
        "time_terms": [(name, value) for name, value in plan.predicted.time_terms.items() if value > 0],
        "model": model_graph.picture(plan),
        "machines": drawn,
        "scatter": scatter.picture(plan),
        "changes": list(changes.groups(plan)),
        "basis": changes.basis(plan),
        "search_again": changes.command("PLAN.json"),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "several": len(plan.stages) > plan.strategy.pipeline,
        "ranks": _ranks(plan),
        "row_names": _row_names(plan),
        "row_label": 30 if not plan.cluster.groups else 30 + _LETTER * max(len(s.device) for s in plan.stages),
        "pictures": drawing.pipeline(simulated) if simulated else (),
        "not_drawn": refused,
        "missing_s": simulated.unexplained_s if simulated else 0.0,
        "strategy": json.dumps(asdict(plan.strategy), indent=2),
        "width": drawing.WIDTH,
        "row": drawing.ROW,
    }


def _ranks(plan: Plan) -> list[str]:
    """Which stages the first pipeline ranks hold, and the last."""
    ranks, stages = plan.strategy.pipeline, len(plan.stages)
    said = [f"rank {rank} holds {', '.join(map(str, range(rank, stages, ranks)))}" for rank in range(ranks)]
    return said if ranks <= _MOST_RANKS else [*said[: _MOST_RANKS - 1], f"and so on to {said[-1]}"]


def _row_names(plan: Plan) -> list[str]:
    """What stands before each row of the timeline: its number, and the kind of GPU where there are several."""
    held = plan.stages[: plan.strategy.pipeline]
    return [f"{stage.device} {number}".strip() for number, stage in enumerate(held)]


def fullest(plan: Plan) -> Stage:
    """The stage that takes most of one GPU, as the plan's peak says."""
    return max(plan.stages, key=lambda stage: stage.peak_memory_bytes)


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """Each stage as the templates show it; ``work`` is its share of the model's FLOPs, 0 where no stage says."""
    flops = sum(stage.flops for stage in plan.stages) or 1.0
    return [_stage(plan, index, stage, work=stage.flops / flops) for index, stage in enumerate(plan.stages)]


def _stage(plan: Plan, index: int, stage: Stage, *, work: float) -> dict[str, Any]:
    width = plan.gpus_used // max(1, plan.strategy.pipeline)
    first = index % plan.strategy.pipeline * width
    names = plan.model.layers
    layers = [names[i] for i in dict.fromkeys((stage.first_layer, stage.last_layer))]
    return {
        "index": index,
        "gpus": f"{first}" if width == 1 else f"{first}-{first + width - 1}",
        "layers": " to ".join(map(model_graph.short, layers)),
        "layers_in_full": " to ".join(layers),
        "number": stage.last_layer - stage.first_layer + 1,
        "work": percent(work) if work else "",
        "recompute": ", ".join(f"{number} {name}" for name, number in stage.recompute.items() if name != "none"),
        "bar": drawing.memory_bar(stage, plan.cluster.memory_of(stage)),
        "capacity": plan.cluster.memory_of(stage),
        "of": stage,
    }


def _memory_terms(plan: Plan) -> list[tuple[str, list[float]]]:
    """Every term with its bytes on each stage, the largest first."""
    names = dict.fromkeys(name for stage in plan.stages for name in stage.memory_terms)
    rows = [(name, [stage.memory_terms.get(name, 0.0) for stage in plan.stages]) for name in names]
    return sorted(rows, key=lambda row: -max(row[1]))


def _words(name: str) -> str:
    return name.replace("_", " ")
