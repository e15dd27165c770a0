"""Context parallelism, priced: each rank of the axis holds a share of every sample's tokens.

A rank's share is a *slice*, one of ``degree`` of a sample, and a data axis of slices is what the ranks of the data and
context axes together are: they hold the same weights, share their state and sum their gradients. So a question about
samples with a context axis is the question about slices without one, where

- activations, products and losses of a slice are 1 / degree of a sample's; attention has as many queries and all keys
  (the triangle of a causal mask is dealt out evenly: a rank takes a piece from the start and one from the end);
- keys and values are gathered over the axis before each attention, again in its backward, and their gradients are
  reduce-scattered.

Tensor ranks stand nearest, then those of the context axis, then data. The axis is not searched: plans that force it
have it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from autoplan.cost_models.precision import dtype_bytes
from autoplan.errors import StrategyError
from autoplan.layers.types import Collective, Edge, LayerGraph, LayerKind, Operator
from autoplan.plan import Axis, Plan, Strategy
from autoplan.search.axes import busiest_layers, inner_transfers, run_in_a_micro_batch
from autoplan.search.constraints import asked
from autoplan.search.degrees import divisors
from autoplan.search.problem import Problem
from autoplan.search.ranges import Range
from autoplan.search.summaries import model_summary


def context_degree(problem: Problem) -> int:
    """The forced degree of the context axis; 1 where none is, or what is given is no whole number (the check of the
    forced keys says so)."""
    value = problem.forced.get("context", 1)
    text = str(value).strip()
    return int(text) if text.isdigit() and not isinstance(value, bool) else 1


def sliced(problem: Problem, degree: int) -> Problem:
    """The question about slices. Raises :class:`StrategyError` where tokens or GPUs don't divide."""
    tokens = problem.layers.tokens_per_sample
    if tokens % (2 * degree):
        raise StrategyError(
            f"context {degree} cannot deal out {tokens} tokens evenly: each rank takes two pieces of a sample",
            where="strategy key `context`",
            legal=", ".join(str(d) for d in divisors(tokens // 2)[:12]) if tokens % 2 == 0 else "1",
        )
    if problem.cluster.gpus % degree:
        raise StrategyError(
            f"context {degree} does not divide the {problem.cluster.gpus} GPUs of {problem.cluster.spec}",
            where="strategy key `context`",
            legal=", ".join(map(str, divisors(problem.cluster.gpus)[:12])),
        )
    forced, ranges = dict(problem.forced), dict(problem.ranges)
    forced.pop("context")
    data = forced.get("data")
    if isinstance(data, int | str) and str(data).isdigit():
        forced["data"] = degree * int(data)
    else:
        among = [d for d in divisors(problem.cluster.gpus // degree) if _allowed(ranges.get("data"), d)]
        ranges["data"] = Range(among=tuple(degree * d for d in among))
    return dataclasses.replace(
        problem,
        layers=_sliced_layers(problem.layers, degree),
        tensor_kinds=lambda tensor: tuple(slice_of(k, degree, tensor=tensor) for k in problem.kinds(tensor)),
        global_batch=problem.global_batch * degree,
        forced=forced,
        ranges=ranges,
        sequence_kinds=None,
        sequence_edges=None,
        base=None,
    )


def _allowed(range_: Range | None, degree: int) -> bool:
    return range_ is None or bool(range_.allows(np.array([degree]))[0])


def _sliced_layers(layers: LayerGraph, degree: int) -> LayerGraph:
    return dataclasses.replace(
        layers,
        kinds=tuple(slice_of(kind, degree, tensor=1) for kind in layers.kinds),
        edges=tuple(_sliced_edge(edge, degree) for edge in layers.edges),
        tokens_per_sample=layers.tokens_per_sample // degree,
    )


def _sliced_edge(edge: Edge, degree: int) -> Edge:
    return dataclasses.replace(edge, bytes_per_sample=edge.bytes_per_sample / degree) if edge.batched else edge


def slice_of(kind: LayerKind, degree: int, *, tensor: int) -> LayerKind:
    """One rank's slice of a layer, FLOPs and bytes per slice, with the collectives of the context axis."""
    shared = tuple(
        dataclasses.replace(c, bytes_per_sample=c.bytes_per_sample / degree) if c.batched else c
        for c in kind.collectives
    )
    return dataclasses.replace(
        kind,
        operators=tuple(_sliced_operator(op, degree) for op in kind.operators),
        collectives=(*shared, *_key_collectives(kind, degree, stride=tensor)),
        input_bytes=kind.input_bytes / degree,
    )


def _sliced_operator(op: Operator, degree: int) -> Operator:
    if not op.batched:
        return op
    gemm, attention = op.gemm, op.attention
    if gemm is not None:
        gemm = dataclasses.replace(gemm, m=max(1, gemm.m // degree))
    if attention is not None:
        attention = dataclasses.replace(attention, query_length=max(1, attention.query_length // degree))
    parts: Mapping[str, Any] = {
        name: getattr(op, name) / degree
        for name in ("flops", "backward_flops", "read_bytes", "written_bytes", "saved_bytes")
    }
    return dataclasses.replace(op, gemm=gemm, attention=attention, **parts)


def _key_collectives(kind: LayerKind, degree: int, *, stride: int) -> tuple[Collective, ...]:
    """Over the axis, for every attention: all keys and values of a sample. Of a core by hand its two products read
    them, as their second operands. ``bytes_per_sample`` are of the whole, which ``degree`` slices are one of."""
    found = []
    for op in kind.operators:
        whole = 0.0
        if op.attention is not None:
            a = op.attention
            whole = float(a.key_length * a.key_value_heads * (a.head_dim + a.value_dim))
        elif op.core and op.gemm is not None and op.gemm.batch_in_groups:
            whole = float(op.gemm.groups * op.gemm.n * op.gemm.k)
        if not whole:
            continue
        for name, phase in (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")):
            found.append(
                Collective(
                    name=name,  # type: ignore[arg-type]
                    phase=phase,  # type: ignore[arg-type]
                    bytes_per_sample=whole * dtype_bytes(op.dtype),
                    operator=op.name,
                    ranks=degree,
                    stride=stride,
                    axis="context",
                )
            )
    return tuple(found)


def restored(problem: Problem, plan: Plan, degree: int) -> Plan:
    """The plan about slices in the terms of ``problem``."""
    strategy = dataclasses.replace(plan.strategy, data=plan.strategy.data // degree, context=degree)
    rows = [row for row in plan.axes if row.name != "data"]
    at = next((i for i, row in enumerate(rows) if row.name in ("expert", "tensor")), len(rows))
    data = [dataclasses.replace(row, degree=strategy.data) for row in plan.axes if row.name == "data"]
    rows[at:at] = [*(data if strategy.data > 1 else ()), _axis(problem, plan, degree)]
    return dataclasses.replace(
        plan,
        strategy=strategy,
        global_batch=problem.global_batch,
        model=model_summary(problem),
        forced=dict(asked(problem)),
        # A stage's were those of one slice of every sample.
        stages=tuple(dataclasses.replace(stage, flops=stage.flops * degree) for stage in plan.stages),
        case=_case(problem, plan, strategy),
        axes=tuple(rows),
        alternatives=(),
        crossings=(),
        assumptions=(
            "context parallelism: its transfers of keys and values show under tensor communication, its gradients are "
            "summed with the data axis's",
            *plan.assumptions,
        ),
    )


def _case(problem: Problem, plan: Plan, strategy: Strategy) -> str:
    keys = ", ".join(f"{key} {value}" for key, value in asked(problem).items())
    unused = plan.gpus - strategy.gpus
    rest = (
        f"; {unused} of the {plan.gpus} GPUs {'stays' if unused == 1 else 'stay'} unused, as forced" if unused else ""
    )
    return f"Forced: {keys}; the rest is planned: {strategy.describe()}{rest}."


def _axis(problem: Problem, plan: Plan, degree: int) -> Axis:
    """What the axis costs the rank that works longest."""
    found = [
        collective
        for kind, policy in busiest_layers(problem, plan)
        for collective in run_in_a_micro_batch(_key_collectives(kind, degree, stride=plan.strategy.tensor), policy)
    ]
    return Axis(
        name="context",
        degree=degree,
        splits="tokens of each sample",
        collective="all-gather of keys and values, reduce-scatter of their gradients",
        **inner_transfers(problem, plan, found, degree)._asdict(),
    )
