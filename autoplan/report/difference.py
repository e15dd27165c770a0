"""What differs between two plans, and what it costs: the facts first, then the text.

Memory is compared stage by stage where both have as many stages, else by the fullest GPU alone.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoplan.explain.text import WIDTH, count, heading, paragraph, seconds, size
from autoplan.explain.text import change as told
from autoplan.plan import Plan, Stage

# Relative: figures that are nearer than this are equal (sums in another order).
SAME = 1e-9
_INPUTS = ("model.name", "model.fingerprint", "cluster.spec", "gpus", "global_batch", "precision", "optimizer")
_INPUTS_TOO = ("model.tokens_per_sample", "cluster.memory_bytes", "cluster.fingerprint")
_FIGURES = (
    "step_time_s",
    "tokens_per_s",
    "model_tflops_per_gpu",
    "mfu",
    "bubble_fraction",
    "exposed_communication_s",
    "peak_memory_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """``name`` was ``before`` and is ``after``; ``relative`` is (after - before) / before of numbers, else None."""

    name: str
    before: Any
    after: Any
    relative: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Only what differs. ``inputs``: the questions differ, so that times are not of like things; ``forced``: what was
    asked of the answer, None where that key was planned."""

    inputs: tuple[Change, ...]
    forced: tuple[Change, ...]
    strategy: tuple[Change, ...]
    stages: tuple[Change, ...]
    predicted: tuple[Change, ...]
    time_terms: tuple[Change, ...]
    memory_terms: tuple[Change, ...]

    @property
    def same(self) -> bool:
        """Whether the plans decide and predict the same."""
        return not any(getattr(self, field.name) for field in dataclasses.fields(self))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``schema`` 1."""
        return {"schema": 1, "same": self.same} | dataclasses.asdict(self)


def difference(before: Plan, after: Plan) -> Difference:
    """Everything in which ``after`` differs from ``before``."""
    inputs = {name: (_at(before, name), _at(after, name)) for name in (*_INPUTS, *_INPUTS_TOO)}
    inputs = {name: pair for name, pair in inputs.items() if all(pair)}  # older files have no fingerprint of clusters
    decided = {"gpus_used": (before.gpus_used, after.gpus_used)}
    one, two = dataclasses.asdict(before.strategy), dataclasses.asdict(after.strategy)
    decided |= {name: (one[name], two[name]) for name in one}
    figures = {name: (getattr(before.predicted, name), getattr(after.predicted, name)) for name in _FIGURES}
    return Difference(
        inputs=_changes(inputs),
        forced=_changes({key: (before.forced.get(key), after.forced.get(key)) for key in before.forced | after.forced}),
        strategy=_changes(decided),
        stages=_stages(before, after),
        predicted=_changes(figures),
        time_terms=_changes(_pairs(before.predicted.time_terms, after.predicted.time_terms)),
        memory_terms=_changes(_pairs(_fullest(before).memory_terms, _fullest(after).memory_terms)),
    )


def _at(plan: Plan, path: str) -> Any:
    return operator.attrgetter(path)(plan)


def _pairs(before: dict[str, float], after: dict[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in {**before, **after}}


def _fullest(plan: Plan) -> Stage:
    return max(plan.stages, key=lambda stage: stage.peak_memory_bytes)


def _stages(before: Plan, after: Plan) -> tuple[Change, ...]:
    if len(before.stages) != len(after.stages):
        return _changes({"number": (len(before.stages), len(after.stages))})
    pairs: dict[str, tuple[Any, Any]] = {}
    for index, (one, two) in enumerate(zip(before.stages, after.stages, strict=True)):
        pairs[f"{index} device"] = (one.device, two.device)
        pairs[f"{index} layers"] = (_layers(one), _layers(two))
        pairs[f"{index} recompute"] = (_recompute(one), _recompute(two))
        pairs[f"{index} peak_memory_bytes"] = (one.peak_memory_bytes, two.peak_memory_bytes)
    return _changes(pairs)


def _layers(stage: Stage) -> str:
    return f"{stage.first_layer}-{stage.last_layer}"


def _recompute(stage: Stage) -> str:
    kept = {policy: number for policy, number in sorted(stage.recompute.items()) if number and policy != "none"}
    return ", ".join(f"{policy} {number}" for policy, number in kept.items()) or "none"


def _changes(pairs: dict[str, tuple[Any, Any]]) -> tuple[Change, ...]:
    made = []
    for name, (before, after) in pairs.items():
        numbers = _number(before) and _number(after)
        if before == after or (numbers and abs(before - after) <= SAME * max(before, after)):
            continue
        relative = (after - before) / before if numbers and before else None
        made.append(Change(name=name, before=before, after=after, relative=relative))
    return tuple(made)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_text(before: Plan, after: Plan, names: tuple[str, str]) -> str:
    """The difference in 80 columns, ending in what it costs."""
    found = difference(before, after)
    if found.same:
        return "The plans decide and predict the same.\n"
    lines = [heading(f"{names[0]} -> {names[1]}"), *paragraph(_verdict(before, after, found))]
    sections = {
        "Asked": found.inputs,
        "Forced": found.forced,
        "Strategy": found.strategy,
        "Stages": found.stages,
        "Predicted": found.predicted,
        "The step, on the stage with the longest period": found.time_terms,
    }
    for title, changes in sections.items():
        if changes:
            lines += ["", title, *(line for change in changes for line in _row(change, _shown))]
    if found.memory_terms:
        lines += ["", "Memory of the fullest GPU"]
        lines += [line for change in found.memory_terms for line in _row(change, lambda _, value: size(value))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _verdict(before: Plan, after: Plan, found: Difference) -> str:
    one, two = before.predicted, after.predicted
    memory, longer = two.peak_memory_bytes - one.peak_memory_bytes, told(one.step_time_s, two.step_time_s)
    said = [
        f"{before.strategy.describe()} became {after.strategy.describe()}."
        if before.strategy.describe() != after.strategy.describe()
        else f"Both are {after.strategy.describe()}.",
        f"A step takes {seconds(two.step_time_s)} instead of {seconds(one.step_time_s)} ({longer}), the "
        f"fullest GPU {size(two.peak_memory_bytes)} instead of {size(one.peak_memory_bytes)} "
        f"({'-' if memory < 0 else '+'}{size(abs(memory))}).",
    ]
    if before.gpus_used != after.gpus_used:
        spent = [plan.gpus_used * plan.predicted.step_time_s / plan.global_batch for plan in (before, after)]
        said.append(f"GPU time a sample: {seconds(spent[1])} instead of {seconds(spent[0])} ({told(*spent)}).")
    asked = {change.name for change in found.inputs}
    if asked & {"model.name", "model.fingerprint"}:
        names = dict.fromkeys((before.model.name, after.model.name))
        alike = f"both called {before.model.name}" if len(names) == 1 else " and ".join(names)
        said.insert(0, f"These are plans of different models, {alike}.")
    if found.inputs:
        said.append("The questions differ, so that the times are not of like things.")
    return " ".join(said)


def _row(change: Change, shown: Callable[[str, Any], str]) -> list[str]:
    before, after = (shown(change.name, value) for value in (change.before, change.after))
    measured = isinstance(change.before, float) or isinstance(change.after, float)
    relative = told(change.before, change.after) if measured and change.relative is not None else ""
    name = change.name.replace("_bytes", "").replace("_per_s", "/s").removesuffix("_s").replace("_", " ")
    line = f"  {name:<26} {before:>16} -> {after:<16} {relative:>9}"
    if len(line) <= WIDTH:
        return [line]
    return [f"  {name}", *paragraph(f"{before} -> {after} {relative}", indent="      ")]


def _shown(name: str, value: Any) -> str:
    """A value as people read it, by the unit in its field's name."""
    if value is None:
        return "planned"
    if not _number(value):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{text[:12]}.." if name.endswith("fingerprint") else text
    if isinstance(value, int):
        return f"{value:,}"
    if name.endswith("tokens_per_s"):
        return count(value)
    if name == "mfu" or name.endswith("fraction"):
        return f"{value:.1%}"
    if name == "model_tflops_per_gpu":
        return f"{value:.1f}"
    return size(value) if name.endswith("_bytes") else seconds(value)
