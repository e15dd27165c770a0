"""The numeric check: shrink, run the plan's program on forked ranks, compare, and name the first that differs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from autoplan.capture import Capture, capture
from autoplan.capture.autocast import kept_regions
from autoplan.capture.errors import node_line
from autoplan.cluster import Cluster
from autoplan.errors import AutoplanError, ModelError, StrategyError
from autoplan.layers import LayerGraph, build_layers
from autoplan.layers.operators import RANDOM, operator_name
from autoplan.plan import Plan, Strategy
from autoplan.runtime import Program
from autoplan.runtime.build import check_executable
from autoplan.sharding import Sharding, shard_model
from autoplan.verification import numbers, static
from autoplan.verification.batches import batches_of
from autoplan.verification.dropout import WithoutDropout
from autoplan.verification.first import Names, crash, first_difference, placed
from autoplan.verification.precision import float64_throughout
from autoplan.verification.reduce import reduce_plan, reduce_strategy, reductions, several_micro_batches
from autoplan.verification.shrink import Small, resample, shrink
from autoplan.verification.types import Check, Numeric

RANKS = 16  # forked processes: what two cores and a few GiB bear
_LOW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is run: the small model, captured, with its layers, plan and sharding."""

    small: Small
    capture: Capture
    layers: LayerGraph
    plan: Plan
    sharding: Sharding | None
    cluster: Cluster


def check_numbers(
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    captured: Capture,
    sharding: Sharding | None,
    plan: Plan,
    cluster: Cluster,
    ranks: int = RANKS,
) -> tuple[Numeric, tuple[Check, ...]]:
    """The comparison, and the static checks of the program that was run. ``captured`` and ``sharding`` are of the
    whole model: what it splits is split in the small one."""
    try:
        check_executable(captured, plan)
    except StrategyError as error:
        return Numeric(status="not executable here", reason=error.what), ()
    strategy = reduce_strategy(plan.strategy, ranks=ranks)
    if captured.dynamic_batch and not captured.couplings:
        strategy = several_micro_batches(strategy)
    with float64_throughout(), WithoutDropout():
        try:
            small = shrink(model, example_inputs, loss_fn, before=plan.strategy, after=strategy)
            subject = subject_of(small, plan, strategy, sharding, cluster)
            check_executable(subject.capture, subject.plan)
        except (ModelError, StrategyError) as error:
            return Numeric(status="not executable here", reason=error.what), ()
        return compare(subject, (*reductions(plan.strategy, strategy), *_uncast(captured)))


def _uncast(captured: Capture) -> tuple[str, ...]:
    """Autocast never casts float64, so of a region both sides are compared without its casts, and that is said."""
    return tuple(
        f"{region} casts nothing in float64: both sides compute it uncast" for region in kept_regions(captured.notes)
    )


def subject_of(small: Small, plan: Plan, strategy: Strategy, sharding: Sharding | None, cluster: Cluster) -> Subject:
    """``small``, traced, under ``plan`` at the degrees of ``strategy``; ``sharding`` is the whole model's."""
    samples = strategy.global_batch
    example = resample(small.example_inputs, samples, seed=1)
    captured = capture(small.model, example, loss_fn=small.loss_fn)
    layers = build_layers(captured)
    small_sharding = None
    if strategy.tensor > 1:
        like = sharding if sharding is not None and _corresponds(sharding, layers) else None
        small_sharding = shard_model(
            captured,
            layers,
            degree=strategy.tensor,
            cluster=cluster,
            like=like,
            sequence=strategy.sequence_parallel,
        )
    return Subject(
        small=dataclasses.replace(small, example_inputs=example),
        capture=captured,
        layers=layers,
        plan=reduce_plan(plan, layers, strategy),
        sharding=small_sharding,
        cluster=cluster,
    )


def _corresponds(sharding: Sharding, layers: LayerGraph) -> bool:
    """Whether the layers are of the same kinds as the whole model's: equally many operators, in the same order."""
    return [len(kind.options) for kind in sharding.kinds] == [len(kind.operators) for kind in layers.kinds]


def compare(subject: Subject, reduced: tuple[str, ...] = ()) -> tuple[Numeric, tuple[Check, ...]]:
    """Run it and compare: the numbers, and the static checks of the program that ran."""
    strategy, small = subject.plan.strategy, subject.small
    checks, programs = static.check_static(subject.capture, subject.layers, subject.plan, subject.cluster)
    batches, ignored = batches_of(subject)
    expected = numbers.train_alone(small.model, small.loss_fn, subject.capture, batches)
    tolerance, note = _tolerance(subject.capture)
    shared: dict[str, Any] = {
        "strategy": strategy,
        "reductions": (*reduced, *small.reductions, *note, *ignored),
        "ranks": strategy.gpus,
        "steps": len(batches),
        "tolerance": tolerance,
    }
    reason = _incomparable(subject, expected, batches)
    if reason:
        return Numeric(status="not executable here", reason=reason, **shared), ()
    try:
        program = Program(
            subject.capture,
            subject.plan,
            subject.layers,
            cluster=subject.cluster,
            sharding=subject.sharding,
            device="cpu",
        )
        for tensor_rank in range(strategy.tensor):  # once here instead of in every rank
            program._builder.graphs(tensor_rank)
        found = numbers.on_ranks(strategy.gpus, lambda: numbers.train_rank(program, batches, expected, tolerance))
    except AutoplanError as error:
        return Numeric(status="differs", reason=error.what, first=crash(error, subject), **shared), checks
    findings = [(rank, finding) for rank, own in enumerate(found) for finding in own]
    names = Names(subject)
    table = names.table([finding for _, finding in findings])
    wrong = [(rank, finding) for rank, finding in findings if finding.ratio > 1.0]
    if not wrong:
        return Numeric(status="equal", layers=table, **shared), checks
    placements = placed(programs, strategy.tensor)
    positions = programs.positions if programs is not None else {}
    first = first_difference(subject, program, batches, placements, positions, wrong, names)
    return Numeric(status="differs", layers=table, first=first, **shared), checks


def _incomparable(subject: Subject, expected: numbers.Numbers, batches: Sequence[Any]) -> str:
    """Why the single process itself gives nothing to compare with; "" where it does."""
    if not all(torch.isfinite(torch.tensor(expected.losses))):
        return "the single process's own loss is not finite"
    again = numbers.train_alone(subject.small.model, subject.small.loss_fn, subject.capture, batches[:1])
    if math.isclose(again.losses[0], expected.losses[0], rel_tol=numbers.TOLERANCE):
        return ""
    drawing = next((n for n in subject.capture.graph_module.graph.nodes if _draws(n)), None)
    where = f", first at {node_line(drawing)}" if drawing is not None else ""
    return f"two runs of the single process differ: its forward draws random numbers{where}"


def _draws(node: Node) -> bool:
    """Dropout apart, which is off here."""
    name = operator_name(node.target)
    return node.op == "call_function" and name in RANDOM and "dropout" not in name


def _tolerance(captured: Capture) -> tuple[float, tuple[str, ...]]:
    """Float64's, or float32's where the model itself computes in it."""
    for node in captured.graph_module.graph.nodes:
        value = node.meta.get("val")
        low = isinstance(value, Tensor) and value.dim() and value.dtype in _LOW
        if low and node.op == "call_function":
            said = f"tolerance of float32: the model computes in it at {node_line(node)}"
            return numbers.FLOAT32_TOLERANCE, (said,)
    return numbers.TOLERANCE, ()
