"""From one placement to another: which functions, and what they communicate forward and backward.

================  =====================  ==============  ==============
from -> to        function               forward         backward
================  =====================  ==============  ==============
R -> C            copy_to_axis           none            all-reduce
R -> S            scatter_to_axis        none            all-gather
C -> S            slice_for_axis         none            none
S -> R            gather_from_axis       all-gather      none
S -> C            gather_for_axis        all-gather      reduce-scatter
P -> R            reduce_from_axis       all-reduce      none
P -> S            scatter_sum_to_axis    reduce-scatter  all-gather
S -> S, P -> C: through R, as two steps
================  =====================  ==============  ==============

A value without a gradient is as good Copied as Replicated. Nothing leads from C to R, nor to P: no such step is of use.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autoplan.layers.types import CollectiveName
from autoplan.sharding.placements import COPIED, REPLICATE, Copied, Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class Step:
    """One conversion function. Collectives are over the whole tensor's bytes."""

    function: str
    source: Placement
    target: Placement
    forward: CollectiveName | None = None
    backward: CollectiveName | None = None


def without_gradient(state: Placement) -> Placement:
    """Copied and Replicated differ only in the gradient."""
    return REPLICATE if isinstance(state, Copied) else state


@functools.lru_cache(maxsize=4096)
def steps(source: Placement, target: Placement, *, differentiable: bool) -> tuple[Step, ...] | None:
    """The conversions from ``source`` to ``target``, empty where they agree, None where nothing leads there."""
    if not differentiable:
        source, target = without_gradient(source), without_gradient(target)
    if source == target:
        return ()
    first = _direct(source, target, differentiable)
    if first is not None:
        return (first,)
    if isinstance(source, Shard | Partial) and isinstance(target, Copied | Shard):
        halves = _direct(source, REPLICATE, differentiable), _direct(REPLICATE, target, differentiable)
        return tuple(half for half in halves if half is not None)
    return None


def _direct(source: Placement, target: Placement, differentiable: bool) -> Step | None:
    match source, target:
        case Replicate(), Copied():
            return Step("copy_to_axis", source, COPIED, None, "all_reduce")
        case Replicate(), Shard():
            return Step("scatter_to_axis", source, target, None, "all_gather" if differentiable else None)
        case Copied(), Shard():
            return Step("slice_for_axis", source, target)
        case Shard(), Replicate():
            return Step("gather_from_axis", source, REPLICATE, "all_gather")
        case Shard(), Copied():
            return Step("gather_for_axis", source, COPIED, "all_gather", "reduce_scatter")
        case Partial(), Shard():
            backward: CollectiveName | None = "all_gather" if differentiable else None
            return Step("scatter_sum_to_axis", source, target, "reduce_scatter", backward)
        case Partial(), Replicate():
            return Step("reduce_from_axis", source, REPLICATE, "all_reduce")
    return None
