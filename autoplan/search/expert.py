"""Expert parallelism, priced: the ranks of the axis hold a share of every layer's experts each.

The axis lies inside the data axis, together with the context axis where there is one: ranks go on with their own
samples or slices of them, and only a layer's experts are spread. So a layer under it is the same layer with

- 1 / degree of its experts and of their parameters, whose products see as many rows, of all the axis's ranks;
- an all-to-all before the experts and one after, forward, and two more backward. Everyone waits for the busiest rank,
  which gets :data:`SKEW` times the mean: the capacity that experts are given so that few tokens are dropped
  (Fedus et al. 2022, section 2.2).

Of an expert there are data / degree copies: over those alone its gradients are summed and its state is shared. The
search takes all parameters alike when it looks for stages; the plan's stages are priced again with experts apart
(:func:`experts_apart`). The axis is not searched: plans that force it have it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autoplan.cost_models.communication import Group
from autoplan.cost_models.contention import held_by_ring
from autoplan.cost_models.data_parallel import DataParallelTime, data_parallel_time
from autoplan.cost_models.memory import count_elements, stage_memory
from autoplan.cost_models.precision import dtype_bytes
from autoplan.errors import StrategyError
from autoplan.layers.types import Collective, LayerKind, Operator
from autoplan.plan import Axis, Plan, Strategy
from autoplan.search.axes import busiest_layers, inner_transfers, run_in_a_micro_batch
from autoplan.search.constraints import asked
from autoplan.search.degrees import divisors
from autoplan.search.evaluate import Evaluation, StageCosts, stage_times
from autoplan.search.problem import Problem
from autoplan.search.ranges import Range
from autoplan.search.space import Space
from autoplan.search.tables import Tables
from autoplan.search.timing import step_s

SKEW = 1.25
_SCHEDULES = ("1f1b", "gpipe")


def expert_degree(problem: Problem) -> int:
    """The forced degree of the expert axis; 1 where none is, or what is given is no whole number (the check of the
    forced keys says so)."""
    value = problem.forced.get("expert", 1)
    text = str(value).strip()
    return int(text) if text.isdigit() and not isinstance(value, bool) else 1


def spread(problem: Problem, degree: int, *, context: int = 1) -> Problem:
    """The question with a share of the experts on every rank. Raises :class:`StrategyError` where they don't divide.

    ``context``: where the question is about slices (:mod:`autoplan.search.context`), how many make a sample. The data
    axis is then that of the slices, and the expert axis lies inside data and context together, context innermost.
    """
    counts = {op.gemm.groups for kind in problem.layers.kinds for op in _products(kind) if op.gemm is not None}
    marked = any(parameter.expert for kind in problem.layers.kinds for parameter in kind.parameters)
    if not counts or not marked:
        raise StrategyError(
            f"expert {degree}: {problem.layers.name} has no experts that a grouped product computes",
            where="strategy key `expert`",
            legal="1",
        )
    shared = [d for d in divisors(min(counts)) if all(count % d == 0 for count in counts)]
    if degree not in shared:
        raise StrategyError(
            f"expert {degree} does not divide the {' and '.join(map(str, sorted(counts)))} experts of a layer",
            where="strategy key `expert`",
            legal=", ".join(map(str, shared)),
        )
    forced, ranges = dict(problem.forced), dict(problem.ranges)
    forced.pop("expert")
    data = forced.get("data")
    if isinstance(data, int | str) and str(data).isdigit() and int(data) % degree:
        within = f"the data axis, and data {data}"
        if context > 1:
            within = f"the data and context axes, and data {int(data) // context} x context {context}"
        raise StrategyError(
            f"expert {degree} lies inside {within} is no multiple of it",
            where="strategy keys `data`, `expert`",
            legal=", ".join(f"data {times * degree // math.gcd(degree, context)}" for times in (1, 2)) + ", ...",
        )
    if data is None and ("data" not in ranges or context > 1):
        possible = ranges["data"].among if context > 1 else divisors(problem.cluster.gpus)
        among = tuple(d for d in possible if d % degree == 0)
        if not among:
            raise StrategyError(
                f"expert {degree} divides no {'data axis' if context == 1 else f'data x context {context}'} of the "
                f"{problem.cluster.gpus} GPUs of {problem.cluster.spec}",
                where="strategy key `expert`",
                legal=", ".join(map(str, sorted({e for d in possible for e in divisors(d) if e in shared}))),
            )
        ranges["data"] = Range(among=among)
    return dataclasses.replace(
        problem,
        layers=dataclasses.replace(
            problem.layers, kinds=tuple(share_of(kind, degree, tensor=1) for kind in problem.layers.kinds)
        ),
        tensor_kinds=lambda tensor: tuple(share_of(k, degree, tensor=tensor) for k in problem.kinds(tensor)),
        forced=forced,
        ranges=ranges,
        schedules=tuple(name for name in problem.schedules if name in _SCHEDULES),
        sequence_kinds=None,
        sequence_edges=None,
        base=None,
        expert=degree,
    )


def _products(kind: LayerKind) -> list[Operator]:
    return [op for op in kind.operators if op.kind == "grouped_gemm" and op.gemm is not None and op.gemm.groups > 1]


def share_of(kind: LayerKind, degree: int, *, tensor: int) -> LayerKind:
    """One rank's share of a layer, with the collectives of the expert axis; a layer without experts stays as it is."""
    products = _products(kind)
    if not products:
        return kind
    names = {op.name for op in products}
    return dataclasses.replace(
        kind,
        operators=tuple(_local(op, degree) if op.name in names else op for op in kind.operators),
        parameters=tuple(
            dataclasses.replace(p, elements=p.elements // degree) if p.expert else p for p in kind.parameters
        ),
        collectives=(*kind.collectives, *_exchanges(products, degree, stride=tensor)),
    )


def _local(op: Operator, degree: int) -> Operator:
    assert op.gemm is not None
    gemm = dataclasses.replace(op.gemm, groups=op.gemm.groups // degree, m=op.gemm.m * degree)
    return dataclasses.replace(op, gemm=gemm, parameter_bytes=op.parameter_bytes / degree)


def _exchanges(products: Sequence[Operator], degree: int, *, stride: int) -> tuple[Collective, ...]:
    """Rows to the experts before the first product and back after the last, in either direction."""
    first, last = products[0], products[-1]
    assert first.gemm is not None and last.gemm is not None
    there = first.gemm.m * first.gemm.groups * first.gemm.k * dtype_bytes(first.dtype)
    back = last.gemm.m * last.gemm.groups * last.gemm.n * dtype_bytes(last.dtype)
    return tuple(
        Collective(
            name="all_to_all",
            phase=phase,
            bytes_per_sample=SKEW * rows,
            operator=op.name,
            ranks=degree,
            stride=stride,
            axis="expert",
        )
        for phase in ("forward", "backward")
        for op, rows in ((first, there), (last, back))
    )


def experts_apart(space: Space, evaluation: Evaluation) -> Evaluation:
    """``evaluation`` with the state, the gradients and the optimizer of experts shared by their copies alone."""
    strategy = dataclasses.replace(evaluation.strategy, expert=space.problem.expert)
    tables = space.tables(evaluation.strategy)
    stages = tuple(_priced(space, tables, strategy, index, stage) for index, stage in enumerate(evaluation.stages))
    assert evaluation.times is not None
    times = dataclasses.replace(stage_times(strategy, stages, evaluation.sends_s), sent_s=evaluation.times.sent_s)
    taken_s = step_s(times)
    busy = sum(strategy.micro_batches * stage.period_s + stage.tail_s for stage in stages)
    return dataclasses.replace(
        evaluation,
        strategy=strategy,
        stages=stages,
        objective_s=times.objective_s,
        step_s=taken_s,
        bubble_fraction=max(0.0, 1 - busy / (len(stages) * taken_s)) if taken_s else 0.0,
        times=times,
    )


def _priced(space: Space, tables: Tables, strategy: Strategy, index: int, stage: StageCosts) -> StageCosts:
    elements = count_elements(stage.kinds)
    terms = stage_memory(
        stage.kinds,
        strategy=strategy,
        stage=index,
        recipe=tables.recipe,
        device=space.problem.cluster.device,
        recompute=stage.policies,
        received_bytes=tables.held_bytes(stage.first, stage.end),
    )
    dense = elements.trainable - elements.trainable_expert
    shards = strategy.expert if strategy.zero_stage else 1
    return dataclasses.replace(
        stage,
        memory_terms=terms,
        data=_data(tables, strategy, stage),
        optimizer_s=tables.optimizer_s(dense + elements.trainable_expert * shards),
    )


def _data(tables: Tables, strategy: Strategy, stage: StageCosts) -> DataParallelTime:
    """The data axis of all but experts, and of experts over their copies, which find the links taken by it."""
    elements, layers = count_elements(stage.kinds), stage.end - stage.first
    dense = tables.data_axis(
        elements.total - elements.expert,
        elements.trainable - elements.trainable_expert,
        layers,
        backward_s=stage.compute_backward_s,
    )
    copies = dataclasses.replace(
        strategy, data=strategy.data // strategy.expert, tensor=strategy.tensor * strategy.expert
    )
    group = Group(size=strategy.data, stride=strategy.tensor, ranks=strategy.gpus)
    gradients = (elements.trainable - elements.trainable_expert) * tables.recipe.gradients
    sent_bytes = (1 if strategy.zero_stage else 2) * (strategy.data - 1) / strategy.data * gradients
    experts = data_parallel_time(
        tables.cluster,
        strategy=copies,
        weight_bytes=elements.expert * tables.recipe.weights,
        gradient_bytes=elements.trainable_expert * tables.recipe.gradients,
        layers=layers,
        backward_s=stage.compute_backward_s,
        backward_held=tables.sent + held_by_ring(tables.cluster, group, sent_bytes),
        prefetch=False,
    )
    names = (field.name for field in dataclasses.fields(DataParallelTime))
    return DataParallelTime(**{name: getattr(dense, name) + getattr(experts, name) for name in names})


def respread(problem: Problem, plan: Plan) -> Plan:
    """The plan in the terms of ``problem``, with a row for the axis."""
    rows = [*plan.axes]
    at = next((i for i, row in enumerate(rows) if row.name == "tensor"), len(rows))
    rows.insert(at, _axis(problem, plan))
    keys = ", ".join(f"{key} {value}" for key, value in asked(problem).items())
    note = (
        "expert parallelism: its transfers show under tensor communication; the busiest "
        f"rank's experts get {SKEW} times the mean"
    )
    whole = problem.layers.parameters / max(1, plan.model.parameters)
    loads = plan.predicted.host_load_bytes * whole  # a process is given the whole model
    return dataclasses.replace(
        plan,
        predicted=dataclasses.replace(plan.predicted, host_load_bytes=loads),
        model=dataclasses.replace(
            plan.model,
            parameters=problem.layers.parameters,
            trainable_parameters=problem.layers.trainable_parameters,
        ),
        forced=dict(asked(problem)),
        case=f"Forced: {keys}; the rest is planned: {plan.strategy.describe()}.",
        axes=tuple(rows),
        alternatives=(),
        assumptions=(note, *plan.assumptions),
    )


def _axis(problem: Problem, plan: Plan) -> Axis:
    """What the axis costs the rank that works longest."""
    strategy = plan.strategy
    found = [
        exchange
        for kind, policy in busiest_layers(problem, plan)
        if (products := _products(kind))
        for exchange in run_in_a_micro_batch(_exchanges(products, strategy.expert, stride=strategy.tensor), policy)
    ]
    transfers = inner_transfers(problem, plan, found, strategy.expert)
    return Axis(
        name="expert",
        degree=strategy.expert,
        splits="experts of each layer",
        collective="all-to-all of routed rows",
        # The time is the busiest rank's, the bytes are the mean's.
        **transfers._replace(bytes_per_step=transfers.bytes_per_step / SKEW)._asdict(),
    )
