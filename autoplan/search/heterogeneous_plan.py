"""A plan on several kinds of GPUs: which group runs which stage, which GPUs idle and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.cluster import under_its_own_spec
from autoplan.cost_models.precision import product_dtype
from autoplan.plan import (
    Alternative,
    Axis,
    Certificate,
    ClusterSummary,
    Crossing,
    GroupSummary,
    Plan,
    Predicted,
    Stage,
    Strategy,
)
from autoplan.search.axes import axes
from autoplan.search.constraints import asked
from autoplan.search.crossings import fitting
from autoplan.search.engine import TOLERANCE, Engine, Found
from autoplan.search.evaluate import Evaluation, evaluate_decision, plan_stages, predicted
from autoplan.search.families import gib
from autoplan.search.heterogeneous import Alone, Searched, search_groups, usable_groups
from autoplan.search.heterogeneous_crossings import RivalAt, across_at, alone_at, crossings
from autoplan.search.heterogeneous_engine import MixedDecision, MixedEngine, MixedFound, evaluate_layout
from autoplan.search.problem import Problem
from autoplan.search.shortfall import Shortfall, nearest
from autoplan.search.solver import SolverName
from autoplan.search.summaries import assumptions, model_summary
from autoplan.search.timing import brief_step_s

Planned = Callable[[Engine, Found], Plan]
ACROSS = "pipeline across kinds"


def plan_of_groups(
    problem: Problem, *, solver: SolverName | None, deadline: float, tolerance: float, planned: Planned
) -> Plan:
    """The plan for a cluster with groups; ``planned`` makes the plan of a search on one kind. Raises as
    :func:`autoplan.search.search`."""
    searched = search_groups(problem, solver=solver, deadline=deadline, tolerance=tolerance)
    chosen = searched.chosen(tolerance)
    if isinstance(chosen, MixedFound):
        plan, ranks = _across(searched, chosen)
    else:
        plan, ranks = _alone(searched, chosen, planned)
    rows = ways(searched, chosen)
    plan = dataclasses.replace(
        plan,
        gpus=searched.problem.cluster.gpus,
        cluster=_summary(searched.problem, ranks),
        alternatives=(*(_alternative(way, plan) for way in rows if not way.chosen), *plan.alternatives),
        certificate=_certificate(searched, plan),
        crossings=_crossings(searched, rows, plan),
    )
    return dataclasses.replace(
        plan, case=_case(searched, chosen, plan, rows), assumptions=(*_notes(searched, plan), *plan.assumptions)
    )


# ---------------------------------------------------------------------------------------------- who runs which stage


def _alone(searched: Searched, chosen: Alone, planned: Planned) -> tuple[Plan, list[int]]:
    """The plan of the search on one kind, and the group of every rank."""
    if chosen.found is None:
        raise ValueError(f"{chosen.name}: nothing was found")
    plan = planned(chosen.engine, chosen.found)
    clusters = searched.problem.cluster.groups
    ranks = [g for g in chosen.groups for _ in range(clusters[g].gpus)][: plan.gpus_used]
    width, pipeline = plan.gpus_used // plan.strategy.pipeline, plan.strategy.pipeline
    devices = []
    for index in range(len(plan.stages)):
        first = index % pipeline * width
        devices.append(" + ".join(clusters[g].name for g in dict.fromkeys(ranks[first : first + width])))
    stages = tuple(dataclasses.replace(s, device=d) for s, d in zip(plan.stages, devices, strict=True))
    return dataclasses.replace(plan, stages=stages), ranks


def _across(searched: Searched, found: MixedFound) -> tuple[Plan, list[int]]:
    """The plan of a pipeline across groups, and the group of every rank."""
    space, problem, chosen = searched.space, searched.problem, found.chosen
    evaluation = evaluate_layout(space, chosen.strategy, chosen.seats, chosen.cuts)
    on = [space.groups[seat.group] for seat in chosen.seats]
    width = chosen.strategy.data * chosen.strategy.tensor
    plan = Plan(
        gpus=problem.cluster.gpus,
        gpus_used=chosen.strategy.gpus,
        global_batch=problem.global_batch,
        precision=problem.precision,
        optimizer=problem.optimizer,
        compiled=problem.compiled,
        model=model_summary(problem),
        cluster=_summary(problem, []),
        strategy=chosen.strategy,
        forced=dict(asked(problem)),
        stages=_stages(problem, evaluation, on),
        predicted=_predicted(searched, evaluation, chosen),
        certificate=_own_certificate(found, evaluation),
        case="",
        axes=_axes(searched, evaluation, chosen),
        alternatives=(),
        assumptions=assumptions(problem, chosen.strategy),
    )
    return plan, [group for group in on for _ in range(width)]


def _stages(problem: Problem, evaluation: Evaluation, on: list[int]) -> tuple[Stage, ...]:
    names = (problem.cluster.groups[group].name for group in on)
    stages = plan_stages(problem.layers, evaluation)
    return tuple(dataclasses.replace(stage, device=name) for stage, name in zip(stages, names, strict=True))


def _bottleneck(evaluation: Evaluation, chosen: MixedDecision) -> int:
    """The group of the stage with the longest period."""
    return chosen.seats[evaluation.stages.index(evaluation.bottleneck)].group


def _predicted(searched: Searched, evaluation: Evaluation, chosen: MixedDecision) -> Predicted:
    """The step in figures, with the peak of every GPU that is used counted in its model FLOPs utilisation."""
    spaces = searched.space.spaces
    each = [predicted(spaces[seat.group], evaluation) for seat in chosen.seats]
    return dataclasses.replace(
        predicted(spaces[_bottleneck(evaluation, chosen)], evaluation), mfu=len(each) / sum(1 / p.mfu for p in each)
    )


def _axes(searched: Searched, evaluation: Evaluation, chosen: MixedDecision) -> tuple[Axis, ...]:
    """Rows of the stage with the longest period; the pipeline's link is the slowest between groups, that of the others
    each group's own."""
    space = searched.space
    rows = axes(space.spaces[_bottleneck(evaluation, chosen)], evaluation)
    links = [space.link(seat.before, seat.group) for seat in chosen.seats[1:] if seat.before != seat.group]
    slowest = min(links, key=lambda link: link.bytes_per_s, default=None)
    if slowest is None:
        return rows
    of_groups = {seat.group: axes(space.spaces[seat.group], evaluation) for seat in chosen.seats}
    return tuple(
        dataclasses.replace(
            row,
            link=slowest.name
            if row.name == "pipeline"
            else _links({space.clusters[group].name: own[index].link for group, own in of_groups.items()}),
        )
        for index, row in enumerate(rows)
    )


def _links(of_groups: dict[str, str]) -> str:
    """The links of an axis by group as :class:`autoplan.plan.Axis` has them."""
    if len(set(of_groups.values())) == 1:
        return next(iter(of_groups.values()))
    return "; ".join(f"{link} on {group}" for group, link in of_groups.items())


def _summary(problem: Problem, ranks: list[int]) -> ClusterSummary:
    cluster, dtype = problem.cluster, product_dtype(problem.precision)
    return ClusterSummary(
        spec=under_its_own_spec(cluster).spec,
        device=cluster.device.name,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        memory_bytes=max(group.device.memory_bytes for group in cluster.groups),
        groups=tuple(
            GroupSummary(
                name=group.name,
                device=group.device.name,
                nodes=group.nodes,
                gpus_per_node=group.gpus_per_node,
                memory_bytes=group.device.memory_bytes,
                gpus_used=ranks.count(index),
                first_rank=ranks.index(index) if index in ranks else 0,
                peak_flops=group.device.flops(dtype),
            )
            for index, group in enumerate(cluster.groups)
        ),
        fingerprint=cluster.fingerprint,
    )


# --------------------------------------------------------------------------------------------------------- the proof


def _own_certificate(found: MixedFound, evaluation: Evaluation) -> Certificate:
    return Certificate(
        status="optimal" if found.proven else "feasible",
        lower_bound_s=0.0,
        gap=0.0,
        considered=0,
        pruned_by_memory=0,
        pruned_by_bound=0,
        solved=0,
        solver=found.chosen.proven_by,
        objective_s=evaluation.objective_s,
    )


def _certificate(searched: Searched, plan: Plan) -> Certificate:
    """What holds for every way to use the cluster together."""
    founds = searched.founds
    counts = [found.counts for found in founds]
    if searched.across is None:
        counts.append(searched.engine.counts())
    stopped_s = searched.engine.stopped_s
    proven = all(found.proven for found in founds) and stopped_s == math.inf
    best = min(founds, key=lambda found: found.best.value_s).best
    floor_s = min(stopped_s, *(found.lower_bound_s for found in founds))
    step_s = plan.predicted.step_time_s
    # What no pipeline that was left out can beat is known by its bound in closed form only.
    simulated_s = min(step_s, *(found.simulated_bound_s for found in founds), searched.engine.left_out_s())
    return dataclasses.replace(
        plan.certificate,
        status="optimal" if proven else "feasible",
        lower_bound_s=simulated_s,
        gap=0.0 if proven else max(0.0, 1 - floor_s / best.value_s),
        considered=sum(count.considered for count in counts),
        pruned_by_memory=sum(count.pruned_by_memory for count in counts),
        pruned_by_bound=sum(count.pruned_by_bound for count in counts),
        solved=sum(count.solved for count in counts),
        best_s=best.value_s,
        objective_bound_s=floor_s,
        simulated_gap=1 - simulated_s / step_s if step_s else 0.0,
        confirmed=sum(found.confirmed for found in founds),
    )


# ------------------------------------------------------------------------------------------------------- the reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to use the cluster: its fastest plan in figures (the chosen plan, for the way that was ``chosen``), or by
    how much the nearest does not fit. ``at``: the same decision over links of another speed."""

    name: str
    chosen: bool
    strategy: Strategy
    figures: Predicted | None
    short: Shortfall | None
    groups: frozenset[int]
    at: RivalAt | None = None


def ways(searched: Searched, chosen: Alone | MixedFound) -> tuple[Way, ...]:
    """Each kind alone, all alike, and the pipeline across kinds, those that there are."""
    rows = [_one_kind(each, each is chosen) for each in searched.alone]
    rows.append(_pipeline(searched, chosen))
    return tuple(row for row in rows if row is not None)


def compare_groups(problem: Problem) -> tuple[Way, ...]:
    """The best plan of every way to use the problem's cluster, the chosen one marked; raises as
    :func:`plan_of_groups`."""
    searched = search_groups(problem, solver=None, deadline=math.inf, tolerance=TOLERANCE)
    return ways(searched, searched.chosen(TOLERANCE))


def _one_kind(way: Alone, chosen: bool) -> Way | None:
    groups = frozenset(way.groups)
    if way.found is None:
        short = nearest(way.engine)
        if short is None:
            return None
        return Way(name=way.name, chosen=False, strategy=short.strategy, figures=None, short=short, groups=groups)
    found = way.found
    decision = found.chosen if chosen else found.fastest
    space = way.engine.space.ordered(decision.order)
    figures = predicted(space, evaluate_decision(space, decision.strategy, decision.cuts, step_s=brief_step_s))
    return Way(
        name=way.name,
        chosen=chosen,
        strategy=decision.strategy,
        figures=figures,
        short=None,
        groups=groups,
        at=alone_at(way.engine, decision),
    )


def _pipeline(searched: Searched, chosen: Alone | MixedFound) -> Way | None:
    found = searched.across
    if isinstance(chosen, MixedFound):
        decision = chosen.chosen
    elif found is not None:
        decision = found.fastest
    else:
        glanced = MixedEngine(space=searched.space, solver=None).glance()
        if glanced is None:
            return None
        decision = glanced
    evaluation = evaluate_layout(searched.space, decision.strategy, decision.seats, decision.cuts, step_s=brief_step_s)
    return Way(
        name=ACROSS,
        chosen=isinstance(chosen, MixedFound),
        strategy=decision.strategy,
        figures=_predicted(searched, evaluation, decision),
        short=None,
        groups=frozenset(searched.space.groups[seat.group] for seat in decision.seats),
        at=across_at(searched.space, decision),
    )


def _crossings(searched: Searched, rows: tuple[Way, ...], plan: Plan) -> tuple[Crossing, ...]:
    """None where keys were forced: what would win then is what was asked not to."""
    chosen = next((way.at for way in rows if way.chosen), None)
    if chosen is None or plan.forced:
        return ()
    others = [way.at for way in rows if not way.chosen and way.at is not None]
    links = [crossing for crossing in plan.crossings if crossing.quantity != "memory_bytes"]
    roomier = [crossing for crossing in plan.crossings if crossing.quantity == "memory_bytes"]
    for each in searched.alone:
        short = next((way.short for way in rows if way.name == each.name and way.short is not None), None)
        roomier += fitting(each.engine.space.problem, [short]) if short is not None else ()
    return (*crossings(searched.problem.cluster, chosen, others, links), *dict.fromkeys(roomier))


def _alternative(way: Way, plan: Plan) -> Alternative:
    if way.figures is not None:
        return Alternative(
            family=way.name,
            strategy=way.strategy,
            step_time_s=way.figures.step_time_s,
            peak_memory_bytes=way.figures.peak_memory_bytes,
            short_by_bytes=0.0,
            why_not=f"{_pace(way.figures.step_time_s, plan)}: {_handicap(way)}",
        )
    short = way.short
    if short is None:
        raise ValueError(f"{way.name} has neither a plan nor a shortfall")
    where = f" on stage {short.stage}" if short.strategy.pipeline > 1 else ""
    term = short.largest_term
    return Alternative(
        family=way.name,
        strategy=way.strategy,
        step_time_s=None,
        peak_memory_bytes=short.peak_bytes,
        short_by_bytes=max(0.0, short.short_bytes),
        why_not=f"does not fit: {gib(short.short_bytes)} too much{where}; the largest term is "
        f"{term.replace('_', ' ')}, {gib(short.terms[term])}",
    )


def _handicap(way: Way) -> str:
    if way.name == ACROSS:
        return "stages wait for each other and for the links between kinds"
    return "the other GPUs idle" if len(way.groups) == 1 else "every GPU is taken at the pace of the weakest"


def _pace(step_s: float, plan: Plan) -> str:
    ratio = step_s / plan.predicted.step_time_s
    if ratio < 0.9995:
        return (
            f"{(1 - ratio) * 100:.1f}% faster, but within {TOLERANCE:.0%} of the fastest less parallelism is preferred"
        )
    if ratio < 1.0005:
        return "equally fast"
    return f"{(ratio - 1) * 100:.1f}% slower" if ratio < 2 else f"{ratio:.1f} times as long"


def _case(searched: Searched, chosen: Alone | MixedFound, plan: Plan, rows: tuple[Way, ...]) -> str:
    idle = [group for group in plan.cluster.groups if not group.gpus_used]
    if isinstance(chosen, MixedFound):
        forced = ", ".join(f"{key} {value}" for key, value in plan.forced.items())
        said = (f"Forced: {forced}. " if forced else "") + f"Layers are split over kinds by their pace: {_shares(plan)}"
        others = [way for way in rows if not way.chosen and way.figures is not None]
        best = min(others, key=_step_s, default=None)
        said += f"; {best.name} would be {_pace(_step_s(best), plan)}" if best else "; no kind alone holds the model"
    elif len(chosen.groups) > 1:
        said = f"All kinds work alike, at the pace of the weakest. {plan.case.removesuffix('.')}"
    else:
        said = f"Only {plan.cluster.groups[chosen.groups[0]].name}. {plan.case.removesuffix('.')}"
    if idle:
        named = " and ".join(f"the {group.gpus if group.gpus > 1 else 'one'} {group.name}" for group in idle)
        said += f". Idle: {named}, {_why_idle(searched, plan, rows)}"
    return said + "."


def _step_s(way: Way) -> float:
    return way.figures.step_time_s if way.figures is not None else math.inf


def _shares(plan: Plan) -> str:
    parts = []
    for group in plan.cluster.groups_used:
        stages = [i for i, stage in enumerate(plan.stages) if stage.device == group.name]
        layers = sum(plan.stages[i].last_layer - plan.stages[i].first_layer + 1 for i in stages)
        numbers = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]} to {stages[-1]}"
        parts.append(f"{numbers} on {group.name} with {layers} of {len(plan.model.layers)} layers")
    return ", ".join(parts)


def _why_idle(searched: Searched, plan: Plan, rows: tuple[Way, ...]) -> str:
    groups = plan.cluster.groups
    idle = {index for index, group in enumerate(groups) if not group.gpus_used}
    if not idle & set(usable_groups(searched.problem)):
        have = "have" if sum(groups[index].gpus for index in idle) > 1 else "has"
        return f"which {have} no {searched.problem.precision} units"
    if plan.forced:
        return "as forced"
    best_s = min((_step_s(way) for way in rows if not way.chosen and way.groups & idle), default=math.inf)
    if math.isinf(best_s):
        return "because no plan that uses them fits"
    with_it = "them" if sum(groups[index].gpus for index in idle) > 1 else "it"
    return f"because with {with_it} the best plan is {_pace(best_s, plan)}"


def _notes(searched: Searched, plan: Plan) -> list[str]:
    notes = [f"ranks follow the stages: {plan.cluster.ranks_of_groups}; start the nodes in this order"]
    if len(searched.alone) > 1:
        notes.append("one mesh for all stages; data parallelism over kinds is priced as if all GPUs were the weakest")
    return notes
