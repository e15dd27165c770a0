"""search() and predict(): from a problem to a plan with its reasons."""

from __future__ import annotations

import dataclasses
import math
import time

from autoplan.cluster import under_its_own_spec
from autoplan.cost_models.precision import dtype_bytes, product_dtype
from autoplan.cost_models.timeline import host_load_bytes
from autoplan.errors import InfeasibleError, StrategyError
from autoplan.plan import Certificate, ClusterSummary, Crossing, Plan, Strategy
from autoplan.search.axes import axes
from autoplan.search.cases import case
from autoplan.search.constraints import asked, freed
from autoplan.search.context import context_degree, restored, sliced
from autoplan.search.crossings import Priced, crossings, fitting
from autoplan.search.engine import TOLERANCE, Engine, Found
from autoplan.search.evaluate import Evaluation, evaluate_decision, plan_stages, predicted
from autoplan.search.expert import expert_degree, experts_apart, respread, spread
from autoplan.search.families import FamilyBest, alternatives, best_of_families, family_of
from autoplan.search.heterogeneous_plan import plan_of_groups
from autoplan.search.infeasible import infeasible
from autoplan.search.milp import default_solver
from autoplan.search.problem import Problem
from autoplan.search.solver import SolverName
from autoplan.search.space import open_space
from autoplan.search.summaries import assumptions, model_summary
from autoplan.uncollected import uncollected

# Relative difference between the cost that was searched for and that of the final plan.
MOST_APART = 1e-6
# Searches with less room for experts' state, how much more to leave each time, and the most of a GPU to leave.
_TRIES, _MORE, _MOST_HEADROOM = 5, 0.01, 0.95


def search(problem: Problem, *, time_limit_s: float | None = None, solver: SolverName | str | None = "auto") -> Plan:
    """The plan with the least parallelism that is within 2% of the fastest, with its proof.

    Raises :class:`StrategyError` for forced keys that are not legal, :class:`InfeasibleError` where nothing fits. With
    ``time_limit_s`` the best plan found by then is returned and its certificate says what is not proven. ``solver``:
    "HiGHS", "CBC", None for the exact dynamic program alone, "auto" for the first that is installed.
    """
    if expert_degree(problem) > 1 and "zero_stage" not in problem.forced:  # the runtime gathers no experts
        problem = dataclasses.replace(problem, zero_stages=tuple(stage for stage in problem.zero_stages if stage < 3))
    if max(context_degree(problem), expert_degree(problem)) > 1:  # forced, as they are not searched
        return _predicted(problem, solver)
    return _answer(problem, time_limit_s, solver, tolerance=TOLERANCE)


def predict(problem: Problem, *, solver: SolverName | str | None = "auto") -> Plan:
    """Time and memory of the forced keys; what they leave open takes the value that costs least, and is named in the
    plan's assumptions. Raises as :func:`search`."""
    plan = _predicted(problem, solver)
    open_keys: tuple[str, ...] = ("data", "tensor", "pipeline", "zero_stage", "micro_batch_size", "schedule")
    if plan.strategy.schedule == "interleaved":
        open_keys = (*open_keys, "virtual_stages")
    if plan.strategy.sequence_parallel:
        open_keys = (*open_keys, "sequence_parallel")
    filled = [f"{key} {getattr(plan.strategy, key)}" for key in open_keys if key not in problem.forced]
    if not filled:
        return plan
    note = f"not given, so the value that costs least: {', '.join(filled)}"
    return dataclasses.replace(plan, assumptions=(note, *plan.assumptions))


def _predicted(problem: Problem, solver: SolverName | str | None) -> Plan:
    """The plan of the forced keys, with the axes that are priced and not searched."""
    context, expert = context_degree(problem), expert_degree(problem)
    if problem.cluster.groups and max(context, expert) > 1:
        raise StrategyError(
            f"{'context' if context > 1 else 'expert'} {max(context, expert)} is priced on one kind of GPUs",
            where=problem.cluster.spec,
            legal="1 on a cluster of several kinds",
            attempt=f"plan for one of its groups: {', '.join(group.name for group in problem.cluster.groups)}",
        )
    if context > 1:
        slices = sliced(problem, context)
        return restored(problem, _with_experts(slices, expert, solver, context=context), context)
    return _with_experts(problem, expert, solver)


def _with_experts(problem: Problem, expert: int, solver: SolverName | str | None, *, context: int = 1) -> Plan:
    if expert > 1:
        return respread(problem, _fitting(spread(problem, expert, context=context), solver))
    return _answer(problem, None, solver, tolerance=0.0)


def _fitting(problem: Problem, solver: SolverName | str | None) -> Plan:
    """The search takes experts' state as shared by more ranks than share it: what it finds too large for a GPU is
    searched again with as much less room."""
    headroom = problem.memory_headroom
    for _ in range(_TRIES):
        plan = _answer(dataclasses.replace(problem, memory_headroom=headroom), None, solver, tolerance=0.0)
        over = plan.predicted.peak_memory_bytes / problem.usable_bytes - 1
        if over <= 0:
            return plan
        headroom = min(_MOST_HEADROOM, headroom + (1 - problem.memory_headroom) * (over + _MORE))
    short = plan.predicted.peak_memory_bytes - problem.usable_bytes
    raise InfeasibleError(
        f"{problem.layers.name} does not fit {problem.cluster.spec}: {plan.strategy.describe()} is {short / 2**30:.2f} "
        "GiB short a GPU",
        short_by_bytes=short,
        attempt="a higher zero_stage, a smaller micro_batch_size, or more pipeline stages",
    )


@uncollected()
def _answer(problem: Problem, time_limit_s: float | None, solver: SolverName | str | None, tolerance: float) -> Plan:
    started = time.perf_counter()
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    chosen_solver: SolverName | None = default_solver() if solver == "auto" else solver  # type: ignore[assignment]
    if problem.cluster.groups:
        plan = plan_of_groups(problem, solver=chosen_solver, deadline=deadline, tolerance=tolerance, planned=_planned)
    else:
        engine = Engine(space=open_space(problem), solver=chosen_solver, deadline=deadline)
        found = engine.run(tolerance)
        if found is None:
            raise infeasible(engine)
        plan = _planned(engine, found)
    return dataclasses.replace(plan, seconds={"search": round(time.perf_counter() - started, 3)})


def _planned(engine: Engine, found: Found) -> Plan:
    """The plan of what a search on one kind of GPUs found, priced again."""
    chosen = found.chosen
    evaluation = evaluate_decision(engine.space.ordered(chosen.order), chosen.strategy, chosen.cuts)
    _check_cost(found, evaluation)
    if engine.space.problem.expert > 1:
        evaluation = experts_apart(engine.space.ordered(chosen.order), evaluation)
    return _plan(engine, found, evaluation)


def _check_cost(found: Found, evaluation: Evaluation) -> None:
    """What the search minimised is what the final plan costs, priced stage by stage without the search's tables."""
    searched, priced = found.chosen.value_s, evaluation.objective_s
    if abs(searched - priced) > MOST_APART * priced:
        raise AssertionError(
            f"the search put {evaluation.strategy.describe()} at {searched!r} s, and its plan costs {priced!r} s"
        )


def _plan(engine: Engine, found: Found, evaluation: Evaluation) -> Plan:
    space = engine.space.ordered(found.chosen.order)
    problem, strategy = space.problem, evaluation.strategy
    if problem.forced:
        free = Engine(space=open_space(freed(space.problem)), solver=None)
        families = best_of_families(free)
    else:
        families = best_of_families(engine, but=family_of(strategy))
    return Plan(
        gpus=problem.cluster.gpus,
        gpus_used=strategy.gpus,
        global_batch=problem.global_batch,
        precision=problem.precision,
        optimizer=problem.optimizer,
        compiled=problem.compiled,
        model=model_summary(problem),
        cluster=_cluster(problem),
        strategy=strategy,
        forced=dict(asked(problem)),
        stages=plan_stages(problem.layers, evaluation),
        predicted=dataclasses.replace(predicted(space, evaluation), host_load_bytes=_host_bytes(problem, strategy)),
        certificate=_certificate(found, evaluation),
        case=case(problem, evaluation, families),
        axes=axes(space, evaluation),
        alternatives=alternatives(families, evaluation, forced=bool(problem.forced)),
        assumptions=assumptions(problem, strategy),
        crossings=_crossings(engine, found, evaluation, families),
    )


def _crossings(
    engine: Engine, found: Found, evaluation: Evaluation, families: tuple[FamilyBest, ...]
) -> tuple[Crossing, ...]:
    """None where keys were forced: what would win then is what was asked not to."""
    if engine.space.problem.forced or engine.space.problem.expert > 1:
        return ()
    chosen = Priced(space=engine.space.ordered(found.chosen.order), evaluation=evaluation)
    others = [Priced(space=engine.space.ordered(f.order), evaluation=f.evaluation) for f in families if f.evaluation]
    short = [family.shortfall for family in families if family.shortfall]
    return (*crossings(chosen, others), *fitting(engine.space.problem, short))


def _host_bytes(problem: Problem, strategy: Strategy) -> float:
    layers = problem.layers
    processes = min(strategy.gpus, problem.cluster.gpus_per_node)
    return host_load_bytes(layers.parameters, element_bytes=dtype_bytes(layers.dtype), processes=processes)


def _cluster(problem: Problem) -> ClusterSummary:
    cluster = under_its_own_spec(problem.cluster)
    return ClusterSummary(
        spec=cluster.spec,
        device=cluster.device.name,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        memory_bytes=cluster.device.memory_bytes,
        fingerprint=cluster.fingerprint,
        peak_flops=cluster.device.flops(product_dtype(problem.precision)),
    )


def _certificate(found: Found, evaluation: Evaluation) -> Certificate:
    counts, best_s = found.counts, found.best.value_s
    bound_s = min(found.simulated_bound_s, evaluation.step_s)
    simulated_gap = 1 - bound_s / evaluation.step_s if evaluation.step_s else 0.0
    gap = 0.0 if found.proven else (best_s - found.lower_bound_s) / best_s
    return Certificate(
        status="optimal" if found.proven else "feasible",
        lower_bound_s=bound_s,
        gap=gap,
        considered=counts.considered,
        pruned_by_memory=counts.pruned_by_memory,
        pruned_by_bound=counts.pruned_by_bound,
        solved=counts.solved,
        solver=found.best.proven_by,
        objective_s=evaluation.objective_s,
        best_s=best_s,
        objective_bound_s=found.lower_bound_s,
        simulated_gap=simulated_gap,
        confirmed=found.confirmed,
    )
