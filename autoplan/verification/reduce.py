"""The same plan, smaller: fewer ranks on each axis, fewer layers, fewer micro-batches, and what was reduced in words.

Every kind of parallelism that the plan uses stays in use: an axis of degree above 1 keeps a degree of at least 2, a
step of several micro-batches keeps several, and every recompute policy keeps a layer.
"""

from __future__ import annotations

import dataclasses
import itertools

from autoplan.layers import LayerGraph
from autoplan.plan import Plan, Stage, Strategy

STAGES = 4  # as many as ranks allow: a first, a last, and stages in between that only pass on
LAYERS_A_STAGE = 2


def reduce_strategy(strategy: Strategy, *, ranks: int) -> Strategy:
    """``strategy`` on at most ``ranks`` ranks: the data and context axes go first, then stages, then the tensor
    axis."""
    data, pipeline, tensor = min(strategy.data, 2), min(strategy.pipeline, 2), strategy.tensor
    context = min(strategy.context, 2)
    beside = data * context
    while beside * pipeline * tensor > ranks and (smaller := _next_divisor(tensor)) > 1:
        tensor = smaller
    while pipeline < min(strategy.pipeline, STAGES) and beside * (pipeline + 1) * tensor <= ranks:
        pipeline += 1
    micro_batches = min(strategy.micro_batches, pipeline + 2)
    return dataclasses.replace(
        strategy,
        data=data,
        context=context,
        expert=min(strategy.expert, 2),
        pipeline=pipeline,
        virtual_stages=min(strategy.virtual_stages, 2),
        tensor=tensor,
        micro_batches=micro_batches,
        micro_batch_size=min(strategy.micro_batch_size, 2),
    )


def several_micro_batches(strategy: Strategy) -> Strategy:
    """A step of one micro-batch as one of several: what is added over micro-batches is then added, and each is weighed.
    For models whose batch may be split."""
    if strategy.micro_batches > 1:
        return strategy
    return dataclasses.replace(strategy, micro_batches=max(2, strategy.pipeline))


def _next_divisor(degree: int) -> int:
    return next((d for d in range(degree - 1, 0, -1) if degree % d == 0), 1)


def reductions(strategy: Strategy, reduced: Strategy) -> tuple[str, ...]:
    """What differs, a sentence each."""
    names = {
        "data": "data",
        "context": "context",
        "expert": "expert",
        "pipeline": "pipeline",
        "virtual_stages": "stages a rank",
        "tensor": "tensor",
        "micro_batches": "micro-batches",
        "micro_batch_size": "samples in a micro-batch",
    }
    changed = [
        f"{label} {getattr(strategy, key):,} -> {getattr(reduced, key)}"
        for key, label in names.items()
        if getattr(strategy, key) != getattr(reduced, key)
    ]
    if reduced.micro_batches > strategy.micro_batches:
        changed.append("more micro-batches than planned, so that what is summed over them is checked")
    return tuple(changed)


def wanted_layers(strategy: Strategy) -> int:
    """Blocks that show every stage of ``strategy`` working on more than one."""
    return LAYERS_A_STAGE * strategy.pipeline * strategy.virtual_stages


def reduce_plan(plan: Plan, layers: LayerGraph, strategy: Strategy) -> Plan:
    """``plan`` for the smaller model ``layers`` under the smaller ``strategy``.

    The stages are the plan's own where both counts are, else even; recompute policies are taken from the layer that
    stands at the same share of the model.
    """
    count, wanted = len(layers.layers), strategy.pipeline * strategy.virtual_stages
    policies = _policies(plan, count)
    if count == plan.stages[-1].last_layer + 1 and wanted == len(plan.stages):
        stages = plan.stages
    else:
        bounds = [count * index // wanted for index in range(wanted + 1)]
        stages = tuple(
            _stage(plan.stages[index * len(plan.stages) // wanted], first, last - 1, policies)
            for index, (first, last) in enumerate(itertools.pairwise(bounds))
        )
    return dataclasses.replace(
        plan,
        gpus=strategy.gpus,
        gpus_used=strategy.gpus,
        global_batch=strategy.global_batch,
        strategy=strategy,
        stages=tuple(dataclasses.replace(stage, parameters=0) for stage in stages),  # the counts were the whole model's
        model=dataclasses.replace(
            plan.model,
            fingerprint=layers.fingerprint,
            layers=tuple(x.name for x in layers.layers),
            layer_kinds={},
        ),
    )


def _stage(like: Stage, first: int, last: int, policies: tuple[str, ...]) -> Stage:
    own = policies[first : last + 1]
    return dataclasses.replace(
        like,
        first_layer=first,
        last_layer=last,
        recompute={policy: own.count(policy) for policy in dict.fromkeys((*like.recompute, *own))},
        layer_recompute=own,
    )


def _policies(plan: Plan, count: int) -> tuple[str, ...]:
    """A policy for each of ``count`` layers; none of the plan's is lost while there are layers for it."""
    planned: list[str] = []
    for stage in plan.stages:
        layers = stage.last_layer - stage.first_layer + 1
        listed = [policy for policy, number in stage.recompute.items() for _ in range(number)]
        planned += stage.layer_recompute or (listed + ["none"] * layers)[:layers]
    if count == len(planned):
        return tuple(planned)
    chosen = [planned[index * (len(planned) - 1) // max(1, count - 1)] for index in range(count)]
    for policy in dict.fromkeys(planned):
        spare = [i for i, other in enumerate(chosen) if chosen.count(other) > 1]
        if policy not in chosen and spare:
            chosen[spare[len(spare) // 2]] = policy
    return tuple(chosen)
