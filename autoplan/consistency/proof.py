"""The certificate: gaps from bounds, the candidates' counts, and the objective of the chosen plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoplan.consistency.problems import EXACT, Problem, close
from autoplan.schedules import EVENLY_SPLIT

if TYPE_CHECKING:
    from autoplan.plan import Plan

_STATUSES = ("optimal", "feasible")
_SOLVERS = ("enumeration", "dynamic program", "HiGHS", "CBC", "even stages", "bound")
_GAP = 1e-9
# A step of so many micro-batches on all chunks of a GPU is simulated whole; of longer ones the objective is near.
_MOST_WHOLE, _NEAR = 96, 0.02


def proof(plan: Plan) -> Iterator[Problem]:
    """What is said to be proven."""
    found, step_s = plan.certificate, plan.predicted.step_time_s
    if found.status not in _STATUSES:
        yield "certificate.status", f"{found.status!r} is not one of {', '.join(_STATUSES)}"
    gap = 1 - found.lower_bound_s / step_s
    if abs(found.simulated_gap - gap) > _GAP:
        yield "certificate.simulated_gap", f"{found.simulated_gap}, but the bound and the step make {gap}"
    if not found.best_s or found.objective_bound_s > found.best_s * (1 + EXACT):
        yield "certificate.objective_bound_s", f"{found.objective_bound_s}, but the best is {found.best_s}"
        return
    open_ = 1 - found.objective_bound_s / found.best_s
    if abs(found.gap - max(0.0, open_)) > _GAP:
        yield "certificate.gap", f"{found.gap}, but the best and its bound make {open_}"
    if found.status == "optimal" and open_ > _GAP:
        yield "certificate.status", f"'optimal', but {open_} of the best is not proven: it must be feasible"
    if found.status == "feasible" and open_ <= _GAP and not plan.cluster.groups:
        yield "certificate.status", "'feasible', but the best is its own bound: it must be optimal"
    counted = found.pruned_by_memory + found.pruned_by_bound + found.solved
    if found.considered != counted or not found.solved:
        yield "certificate.considered", f"{found.considered}, but what became of the candidates adds up to {counted}"
    if found.solver not in _SOLVERS:
        yield "certificate.solver", f"{found.solver!r} is not one of {', '.join(_SOLVERS)}"
    if not 1 <= found.confirmed <= found.considered:
        yield "certificate.confirmed", f"{found.confirmed}, of {found.considered} candidates: it must be one at least"
    yield from _objective(plan)


def _objective(plan: Plan) -> Iterator[Problem]:
    """(M - 1) longest + sum + longest tail under 1F1B and GPipe, of stages and, under 1F1B, their sends; else the step,
    which is shortened where it is long. Where layers branch, a plan does not hold what stages send, only what they
    receive."""
    found, strategy, stages = plan.certificate, plan.strategy, plan.stages
    if found.best_s > found.objective_s * (1 + EXACT) and strategy.expert == 1:
        yield "certificate.best_s", f"{found.best_s}, but the chosen plan has {found.objective_s}"
    if strategy.schedule in EVENLY_SPLIT:
        long = strategy.micro_batches * strategy.virtual_stages > _MOST_WHOLE
        expected, tolerance = plan.predicted.step_time_s, _NEAR if long else EXACT
    elif plan.model.edges and strategy.pipeline > 1:
        return
    else:
        sends = (0.0, *(stage.send_s for stage in stages))
        periods = [stage.forward_s + stage.backward_s for stage in stages]
        costs = [period + sends[i] + sends[i + 1] for i, period in enumerate(periods)]
        longest = max(periods if strategy.schedule == "gpipe" else costs)
        tail = max(stage.synchronise_s + stage.optimizer_s for stage in stages)
        expected, tolerance = (strategy.micro_batches - 1) * longest + sum(costs) + tail, EXACT
    if not close(found.objective_s, expected, tolerance):
        yield "certificate.objective_s", f"{found.objective_s}, but the stages make {expected}"
