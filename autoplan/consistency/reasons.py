"""What the plan was compared with: the plans that lost and why, and where another would win."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoplan.consistency.forced import headroom
from autoplan.consistency.machines import as_made_for
from autoplan.consistency.problems import EXACT, Problem, close

if TYPE_CHECKING:
    from autoplan.plan import Alternative, Crossing, Plan, Strategy

# A reason says by how much in a digit after the point of a percentage, or of a multiple.
_PERCENT, _TIMES = 0.0006, 0.06
_PACE = re.compile(r"(\d+\.\d)% (slower|faster)|(\d+\.\d) times as long|(equally fast)")
_TOO_MUCH = re.compile(r"does not fit: (\d+\.\d\d) (GiB|TiB) too much")
_UNITS = {"GiB": 2.0**30, "TiB": 2.0**40}
# Of links, the furthest that is looked at, either way.
_FURTHEST = 8.0
_LINKS = ("intra_bytes_per_s", "inter_bytes_per_s")
_QUANTITIES = ("memory_bytes", *_LINKS)


def reasons(plan: Plan) -> Iterator[Problem]:
    """Alternatives, crossings, and other answers."""
    names = [other.family for other in plan.alternatives]
    for index, other in enumerate(plan.alternatives):
        if names.index(other.family) < index:
            yield f"alternatives.{index}.family", f"{other.family!r}, but it is there before"
        for field, problem in _alternative(plan, other):
            yield f"alternatives.{index}.{field}", problem
    if len(set(plan.crossings)) < len(plan.crossings):
        yield "crossings", "one is there twice"
    for index, crossing in enumerate(plan.crossings):
        for field, problem in _crossing(plan, crossing):
            yield f"crossings.{index}.{field}", problem
    for index, answer in enumerate(plan.other_answers):
        if answer.quantity not in _QUANTITIES:
            yield f"other_answers.{index}.quantity", f"{answer.quantity!r} is not one of {', '.join(_QUANTITIES)}"
        if (answer.strategy is None) != (answer.step_time_s is None):
            yield f"other_answers.{index}.step_time_s", f"{answer.step_time_s}, of the strategy {answer.strategy}"
    if not plan.case:
        yield "case", "'' is no reason"


def _alternative(plan: Plan, other: Alternative) -> Iterator[Problem]:
    yield from _family(plan, other)
    strategy = other.strategy
    if strategy.global_batch != plan.global_batch:
        yield "strategy", f"takes a batch of {strategy.global_batch}, but the plan's is {plan.global_batch}"
    if strategy.gpus > plan.gpus:
        yield "strategy", f"takes {strategy.gpus} GPUs of {plan.gpus}"
    if max(strategy.context, strategy.expert) > 1:
        yield "strategy", "has a context or an expert axis, which are priced where they are forced, and not searched"
    yield from _fits(plan, other) if other.step_time_s is None else _slower(plan, other, other.step_time_s)


def _family(plan: Plan, other: Alternative) -> Iterator[Problem]:
    """By its axes; or, of several kinds of GPUs, a way to use them."""
    if plan.cluster.groups:
        ways = {f"{group.name} alone" for group in plan.cluster.groups}
        if other.family in ways | {"all GPUs alike", "pipeline across kinds"}:
            return
    used = [axis for axis in ("data", "pipeline", "tensor") if getattr(other.strategy, axis) > 1]
    expected = " x ".join(used) or "one GPU"
    if used == ["data"] and other.strategy.zero_stage:
        expected = "data with sharded state"
    if other.family != expected:
        yield "family", f"{other.family!r}, but its strategy is of the family {expected!r}"


def _slower(plan: Plan, other: Alternative, step_s: float) -> Iterator[Problem]:
    """A plan that fits: its pace is that of its reason, and none is faster unless the reason says so, which it may for
    less parallelism or where keys were forced."""
    usable = max((g.memory_bytes for g in plan.cluster.groups), default=plan.cluster.memory_bytes) * (1 - _free(plan))
    if other.short_by_bytes or other.peak_memory_bytes > usable * (1 + EXACT) or not other.peak_memory_bytes:
        field = "short_by_bytes" if other.short_by_bytes else "peak_memory_bytes"
        yield field, f"{getattr(other, field)}, but the plan takes {step_s} s and so fits into {usable}"
    if not plan.forced and step_s < plan.certificate.lower_bound_s * (1 - EXACT):
        yield "step_time_s", f"{step_s}, but no plan is shorter than {plan.certificate.lower_bound_s}"
    ratio, said = step_s / plan.predicted.step_time_s, _PACE.match(other.why_not)
    if said is None:
        yield "why_not", f"{other.why_not!r}, but it must say that the plan takes {ratio:.3f} times as long"
        return
    told = 1.0
    if said[1]:
        told += float(said[1]) / (100 if said[2] == "slower" else -100)
    elif said[3]:
        told = float(said[3])
    if abs(ratio - told) > (_TIMES if said[3] else _PERCENT):
        yield (
            "step_time_s",
            f"{step_s}, {ratio:.4f} times the plan's own {plan.predicted.step_time_s}, but its reason says "
            f"{other.why_not.split(':')[0]!r}",
        )


def _fits(plan: Plan, other: Alternative) -> Iterator[Problem]:
    """A plan that does not fit: by what its peak is more than a GPU holds."""
    sizes = {group.memory_bytes for group in plan.cluster.groups} or {plan.cluster.memory_bytes}
    short = {max(0.0, other.peak_memory_bytes - size * (1 - _free(plan))) for size in sizes}
    if not any(abs(other.short_by_bytes - each) <= EXACT * max(sizes) for each in short):
        yield (
            "short_by_bytes",
            f"{other.short_by_bytes}, but with its peak of {other.peak_memory_bytes} it is {min(short)}",
        )
    said = _TOO_MUCH.match(other.why_not)
    if said is None or abs(other.short_by_bytes / _UNITS[said[2]] - float(said[1])) > 0.0051:
        yield "why_not", f"{other.why_not!r}, but it is {other.short_by_bytes} bytes short"


def _free(plan: Plan) -> float:
    """The share of a GPU's memory that was to be kept free."""
    return headroom(plan.forced["memory_headroom"]) or 0.0 if "memory_headroom" in plan.forced else 0.0


def _crossing(plan: Plan, crossing: Crossing) -> Iterator[Problem]:
    if crossing.quantity == "memory_bytes":
        yield from _more_memory(plan, crossing)
        return
    if crossing.quantity not in _LINKS:
        yield "quantity", f"{crossing.quantity!r} is not one of {', '.join(_QUANTITIES)}"
        return
    if not 1 / _FURTHEST * (1 - EXACT) <= crossing.factor <= _FURTHEST * (1 + EXACT):
        yield "factor", f"{crossing.factor}, but links are looked at from 1/{_FURTHEST:g} to {_FURTHEST:g} times"
        return
    speeds = [
        other.value / other.factor for other in plan.crossings if other.quantity == crossing.quantity and other.factor
    ]
    if (cluster := as_made_for(plan)) is not None:
        link = cluster.intra if crossing.quantity == "intra_bytes_per_s" else cluster.inter
        speeds.append(link.bytes_per_s)
    if not all(close(crossing.value, speed * crossing.factor) for speed in speeds):
        yield "value", f"{crossing.value}, but {crossing.factor} times what the link passes is not that"
    alone = plan.cluster.nodes if crossing.quantity == "inter_bytes_per_s" else plan.cluster.gpus_per_node
    if alone == 1:
        yield "quantity", f"{crossing.quantity!r}, but the cluster has no such links"
    yield from _winner(plan, crossing)


def _more_memory(plan: Plan, crossing: Crossing) -> Iterator[Problem]:
    """A plan that does not fit here fits with just what it is short of, on the GPUs of a kind."""
    sizes = {group.memory_bytes for group in plan.cluster.groups} or {plan.cluster.memory_bytes}
    short = {o.short_by_bytes for o in plan.alternatives if o.step_time_s is None and o.strategy == crossing.strategy}
    fits = {size: size + each for size in sizes for each in short if close(crossing.value, size + each)}
    if not short:
        yield "strategy", "is none of the alternatives that do not fit"
    elif not fits:
        wanted = " or ".join(str(size + each) for size in sorted(sizes) for each in sorted(short))
        yield "value", f"{crossing.value}, but it fits into {wanted}"
    elif not any(close(crossing.factor * size, crossing.value) for size in fits):
        yield "factor", f"{crossing.factor}, but {crossing.value} is not so many times {min(fits)}"
    if not crossing.step_time_s:
        yield "step_time_s", f"{crossing.step_time_s}, but the plan fits"


def _winner(plan: Plan, crossing: Crossing) -> Iterator[Problem]:
    """Who wins is one of the plans that lost here, and its step there is on the right side of its step here."""
    if crossing.strategy is None:
        if crossing.step_time_s is not None or crossing.factor != _FURTHEST:
            yield "strategy", "null, so that links change nothing: the step is null too, and the factor the furthest"
        return
    here_s = _here_s(plan, crossing.strategy)
    if here_s is None:
        yield "strategy", f"{crossing.strategy.describe()}, but it is none of the alternatives that fit"
    elif crossing.step_time_s is None:
        yield "step_time_s", "null, but a plan wins"
    elif crossing.factor > 1:
        most = min(here_s, plan.predicted.step_time_s) * (1 + EXACT)
        if not crossing.step_time_s or crossing.step_time_s > most:
            yield "step_time_s", f"{crossing.step_time_s}, but over faster links the plan takes at most {most}"
    elif crossing.step_time_s < here_s * (1 - EXACT):
        yield "step_time_s", f"{crossing.step_time_s}, but here, over faster links, the plan takes {here_s}"


def _here_s(plan: Plan, strategy: Strategy) -> float | None:
    found = [other.step_time_s for other in plan.alternatives if other.strategy == strategy]
    return next((step_s for step_s in found if step_s is not None), None)
