"""Why not less, and why not more: the best plan of every family of parallelism, or by how much none of it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoplan.plan import Alternative, Strategy
from autoplan.search.choice import SHARDING_TOLERANCE
from autoplan.search.decisions import Decision
from autoplan.search.engine import TOLERANCE, Engine
from autoplan.search.evaluate import Evaluation, evaluate_decision, time_terms
from autoplan.search.shortfall import Shortfall, nearest
from autoplan.search.timing import brief_step_s

GIB = 2**30
# Candidates of a family that are solved before the best of them stands for it.
MOST_SOLVED = 32

FAMILIES: tuple[tuple[str, tuple[str, ...], bool | None], ...] = (
    ("one GPU", (), False),
    ("data", ("data",), False),
    ("data with sharded state", ("data",), True),
    ("pipeline", ("pipeline",), False),
    ("tensor", ("tensor",), False),
    ("data x pipeline", ("data", "pipeline"), None),
    ("data x tensor", ("data", "tensor"), None),
    ("pipeline x tensor", ("pipeline", "tensor"), None),
    ("data x pipeline x tensor", ("data", "pipeline", "tensor"), None),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyBest:
    """The best of a family (``evaluation``, with its layers in ``order``), or how the nearest of it does not fit
    (``shortfall``)."""

    family: str
    evaluation: Evaluation | None
    shortfall: Shortfall | None
    order: tuple[int, ...] = ()


def family_of(strategy: Strategy) -> str:
    """The family that a strategy belongs to."""
    for name, axes, sharded in FAMILIES:
        used = tuple(axis for axis in ("data", "pipeline", "tensor") if getattr(strategy, axis) > 1)
        if used == axes and sharded in (None, bool(strategy.zero_stage)):
            return name
    raise ValueError(f"no family for {strategy}")


def best_of_families(engine: Engine, *, but: str = "") -> tuple[FamilyBest, ...]:
    """One entry for every family that has candidates, leaving out the one called ``but``."""
    listed = (_best(engine, name, axes, sharded) for name, axes, sharded in FAMILIES if name != but)
    return tuple(best for best in listed if best is not None)


def _best(engine: Engine, name: str, axes: tuple[str, ...], sharded: bool | None) -> FamilyBest | None:
    candidates = engine.space.candidates
    chosen = np.ones(len(candidates), dtype=bool)
    for axis in ("data", "pipeline", "tensor"):
        chosen &= (getattr(candidates, axis) > 1) == (axis in axes)
    if sharded is not None:
        chosen &= (candidates.zero_stage > 0) == sharded
    if not candidates.listed.all():  # a family stands for its degrees: under the plain schedule, which all of them run
        chosen &= ~candidates.listed
    return best_where(engine, name, chosen)


def best_where(engine: Engine, name: str, chosen: np.ndarray) -> FamilyBest | None:
    """The best of the candidates that are ``chosen``, as a family called ``name``; None where there is none."""
    if not chosen.any():
        return None
    decision = _fastest(engine, chosen)
    if decision is None:
        return FamilyBest(family=name, evaluation=None, shortfall=nearest(engine, chosen))
    space = engine.space.ordered(decision.order)
    evaluation = evaluate_decision(space, decision.strategy, decision.cuts, step_s=brief_step_s)
    return FamilyBest(family=name, evaluation=evaluation, shortfall=None, order=decision.order)


def _fastest(engine: Engine, chosen: np.ndarray) -> Decision | None:
    """Best-first within the family, by the dynamic program alone; at most :data:`MOST_SOLVED` are solved."""
    best: Decision | None = None
    solved = 0
    for index, bound in engine.best_first(engine.order(chosen)):
        if best is not None and (bound >= best.value_s or solved >= MOST_SOLVED):
            break
        if not engine.fits(index):
            continue
        solved += 1
        found = engine.open(index, cutoff_s=best.value_s if best else math.inf)
        if found is not None and (best is None or found.value_s < best.value_s):
            best = found
    return best


def alternatives(families: tuple[FamilyBest, ...], chosen: Evaluation, *, forced: bool) -> tuple[Alternative, ...]:
    """Every family but the chosen one, with the reason in a sentence."""
    own = family_of(chosen.strategy)
    # What was forced is compared with the best of its own family too.
    listed = [f for f in families if f.family != own or (forced and f.evaluation and _faster(f.evaluation, chosen))]
    return tuple(_alternative(family, chosen, forced) for family in listed)


def _faster(one: Evaluation, other: Evaluation) -> bool:
    return one.step_s < other.step_s * (1 - 1e-9)


def _alternative(family: FamilyBest, chosen: Evaluation, forced: bool) -> Alternative:
    if family.evaluation is not None:
        evaluation = family.evaluation
        return Alternative(
            family=family.family,
            strategy=evaluation.strategy,
            step_time_s=evaluation.step_s,
            peak_memory_bytes=evaluation.peak_bytes,
            short_by_bytes=0.0,
            why_not=_slower(evaluation, chosen, forced),
        )
    short = family.shortfall
    if short is None:
        raise ValueError(f"family {family.family} has neither a plan nor a shortfall")
    return Alternative(
        family=family.family,
        strategy=short.strategy,
        step_time_s=None,
        peak_memory_bytes=short.peak_bytes,
        short_by_bytes=max(0.0, short.short_bytes),
        why_not=_too_big(short),
    )


def _too_big(short: Shortfall) -> str:
    where = f" on stage {short.stage}" if short.strategy.pipeline > 1 else ""
    term = short.largest_term
    return (
        f"does not fit: {gib(short.short_bytes)} too much{where}; the largest term is {term.replace('_', ' ')}, "
        f"{gib(short.terms[term])}"
    )


def _slower(evaluation: Evaluation, chosen: Evaluation, forced: bool) -> str:
    ratio = evaluation.step_s / chosen.step_s
    if ratio < 1:
        gain = f"{(1 - ratio) * 100:.1f}% faster"
        return f"{gain}, but other values were forced" if forced else f"{gain}, {_given_up(evaluation, chosen)}"
    if ratio < 1.0005:
        return "equally fast, with no less parallelism"
    pace = f"{(ratio - 1) * 100:.1f}% slower" if ratio < 2 else f"{ratio:.1f} times as long"
    return f"{pace}: {_largest_excess(evaluation, chosen)}"


def _given_up(evaluation: Evaluation, chosen: Evaluation) -> str:
    """Why a faster plan lost: which of the two rules of :mod:`.choice` prefers the chosen one."""
    whole = chosen.strategy.data > 1 and not chosen.strategy.zero_stage
    if whole and chosen.step_s > evaluation.step_s * (1 + TOLERANCE):
        return f"but state that fits whole is sharded only for a gain of more than {SHARDING_TOLERANCE:.0%}"
    return f"but within {TOLERANCE:.0%} of the fastest less parallelism is preferred"


def _largest_excess(evaluation: Evaluation, chosen: Evaluation) -> str:
    """What grows most against the chosen plan."""
    mine, theirs = _spent(evaluation), _spent(chosen)
    name = max(mine, key=lambda term: mine[term] - theirs[term])
    strategy, other = evaluation.strategy, chosen.strategy
    if name == "computation" and strategy.gpus < other.gpus:
        return f"it computes on {strategy.gpus} of {other.gpus} GPUs"
    if name == "computation":
        return "its matrices or micro-batches are smaller or larger than GPUs compute best"
    if name == "uneven":
        longest = sum(stage.period_s for stage in evaluation.busiest)
        mean = sum(stage.period_s for stage in evaluation.stages) / strategy.pipeline
        whose = "longest stage takes" if strategy.virtual_stages == 1 else "busiest GPU's stages take"
        return f"its {whose} {(longest / mean - 1) * 100:.0f}% more than the average"
    return f"{name.replace('_', ' ')} takes {mine[name] / evaluation.step_s * 100:.0f}% of its step"


def _spent(evaluation: Evaluation) -> dict[str, float]:
    """The step by what it is spent on: the average rank's work, by how much the busiest one's is longer, and the rest;
    together the step. A rank of several virtual stages works on all of them."""
    micro, stages = evaluation.strategy.micro_batches, evaluation.stages
    terms = time_terms(evaluation)
    recompute = sum(stage.recompute_s for stage in stages)
    tensor = sum(stage.tensor_s for stage in stages)
    sharded = sum(stage.data.forward_s + stage.data.backward_s for stage in stages)
    period = sum(stage.period_s for stage in stages)
    share = micro / evaluation.strategy.pipeline
    return {
        "computation": share * (period - recompute - tensor - sharded),
        "recompute": share * recompute,
        "tensor_communication": share * tensor,
        "sharded_state": share * sharded,
        "uneven": micro * sum(stage.period_s for stage in evaluation.busiest) - share * period,
    } | {name: terms[name] for name in ("gradient_synchronisation", "optimizer", "sends", "bubble")}


def gib(value: float) -> str:
    """Bytes in GiB, or TiB from a thousand of those, for sentences."""
    return f"{value / GIB:.2f} GiB" if value < 1000 * GIB else f"{value / GIB / 1024:.2f} TiB"
