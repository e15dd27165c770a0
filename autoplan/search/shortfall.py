"""By how much the nearest candidate does not fit: the split whose fullest GPU needs least, and what fills it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import numpy as np

from autoplan.plan import Strategy
from autoplan.search.engine import Engine
from autoplan.search.evaluate import stage_costs
from autoplan.search.listed import even_cuts, is_listed, least_rank_terms, total
from autoplan.search.space import Space
from autoplan.search.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """``short_bytes`` (above 0: does not fit) on ``stage`` of ``strategy``, whose memory is ``terms``; ``cuts`` of the
    layers in ``order``, () for the given one."""

    strategy: Strategy
    cuts: tuple[int, ...]
    stage: int
    short_bytes: float
    terms: dict[str, float]
    order: tuple[int, ...] = ()

    @property
    def largest_term(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def peak_bytes(self) -> float:
        return sum(self.terms.values())


def nearest(engine: Engine, chosen: np.ndarray | None = None) -> Shortfall | None:
    """The candidate (of those ``chosen``) whose fullest GPU needs least; None where there is no candidate."""
    space, bounds = engine.space, engine.bounds
    rows = np.arange(len(space.candidates)) if chosen is None else np.nonzero(chosen)[0]
    order = sorted((int(i) for i in rows), key=lambda i: (bounds.short_bytes[i], i))
    capacity = space.problem.usable_bytes
    best: tuple[float, Strategy, _Cut] | None = None
    for index in order:
        if best is not None and bounds.short_bytes[index] >= best[0] - capacity:
            break
        strategy = space.candidates.strategy(index)
        found = _fullest(space, strategy)
        if best is None or found[0] < best[0]:
            best = (found[0], strategy, found[1])
    if best is None:
        return None
    _, strategy, cut = best
    return dataclasses.replace(_describe(space.ordered(cut.order), strategy, cut.cuts), order=cut.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """``cuts`` of the layers in ``order``, () for the given one."""

    cuts: tuple[int, ...]
    order: tuple[int, ...] = ()


def _fullest(space: Space, strategy: Strategy) -> tuple[float, _Cut]:
    """Least possible bytes of the fullest stage, and where that is: a min-max path over all stages, or what was
    fixed."""
    if is_listed(strategy):
        even = even_cuts(space, strategy) or ()
        ranks = range(strategy.pipeline) if even else ()
        needed = max((total(least_rank_terms(space, strategy, even, rank)) for rank in ranks), default=math.inf)
        return needed, _Cut(cuts=even)
    tables = space.tables(strategy)
    fixed = space.problem.stages
    if len(fixed) == strategy.pipeline + 1:
        spans = enumerate(itertools.pairwise(fixed))
        return max(float(tables.least_bytes(stage)[first, end]) for stage, (first, end) in spans), _Cut(cuts=fixed)
    needed, cuts = _least_path(tables)
    sets = space.down_sets
    if sets is not None and strategy.pipeline > 1:
        fewer, path = _least_path(space.convex_tables(strategy))
        if fewer < needed:
            order, cuts = sets.order(path)
            return fewer, _Cut(cuts=cuts, order=order)
    return needed, _Cut(cuts=cuts)


def _least_path(tables: Tables) -> tuple[float, tuple[int, ...]]:
    """The least bytes of the fullest stage over all paths of stages, and the cuts on that path."""
    least = np.full(tables.chain.layers + 1, math.inf)
    least[0] = 0.0
    back = []
    for stage in range(tables.strategy.pipeline):
        through = np.maximum(least[:, None], tables.least_bytes(stage))
        back.append(np.argmin(through, axis=0))
        least = np.min(through, axis=0)
    cuts = [tables.chain.layers]
    for choice in reversed(back):
        cuts.append(int(choice[cuts[-1]]))
    return float(least[-1]), tuple(reversed(cuts))


def _describe(space: Space, strategy: Strategy, cuts: tuple[int, ...]) -> Shortfall:
    if is_listed(strategy):
        terms = [least_rank_terms(space, strategy, cuts, rank) for rank in range(strategy.pipeline)]
        worst = max(range(len(terms)), key=lambda rank: total(terms[rank]))
        short = total(terms[worst]) - space.problem.usable_bytes
        return Shortfall(strategy=strategy, cuts=cuts, stage=worst, short_bytes=short, terms=terms[worst])
    tables = space.tables(strategy)
    chain = tables.chain
    stages = [
        stage_costs(
            space,
            tables,
            stage,
            first,
            end,
            tuple(chain.thriftiest(chain.costs[k]) for k in chain.kinds[first:end]),
        )
        for stage, (first, end) in enumerate(itertools.pairwise(cuts))
    ]
    fullest = max(range(len(stages)), key=lambda s: stages[s].peak_bytes)
    return Shortfall(
        strategy=strategy,
        cuts=cuts,
        stage=fullest,
        short_bytes=stages[fullest].peak_bytes - space.problem.usable_bytes,
        terms=stages[fullest].memory_terms,
    )
