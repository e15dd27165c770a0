"""Where the decision on a cluster of several kinds stands to its links: at which speed of them all another way to use
the kinds, or another family on the kind that was chosen, would win.

Links change by one factor everywhere, inside nodes or between them and between kinds, so that a cluster stays what it
is but for its speed. As in :mod:`autoplan.search.crossings` all keep their stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from autoplan.cluster import Cluster
from autoplan.plan import Crossing
from autoplan.search.choice import Decision
from autoplan.search.crossings import Priced, Rival, Scaled, kinds_of_links, of_rivals, step_s
from autoplan.search.engine import Engine
from autoplan.search.evaluate import evaluate_decision
from autoplan.search.heterogeneous_engine import MixedDecision, evaluate_layout
from autoplan.search.heterogeneous_space import MixedSpace, open_mixed_space
from autoplan.search.timing import brief_step_s

# A decision, by what makes links so many times as fast.
RivalAt = Callable[[Scaled], Rival]


def crossings(
    cluster: Cluster, chosen: RivalAt, others: Sequence[RivalAt], families: Sequence[Crossing]
) -> tuple[Crossing, ...]:
    """At which speed of links between nodes (and kinds), and inside nodes, one of ``others`` would win over ``chosen``.

    ``families``: the crossings of a plan on one kind with the other families there, of which the nearer stay. () where
    there is nothing to compare with, or links are not what limits it (processes of one machine's CPU).
    """
    if cluster.device.is_cpu or not (others or families):
        return ()
    found: list[Crossing] = []
    for quantity, now, scaled in kinds_of_links(cluster):
        of_ways = of_rivals(chosen(scaled), [other(scaled) for other in others], quantity, now)
        of_families = [
            dataclasses.replace(crossing, value=now * crossing.factor)
            for crossing in families
            if crossing.quantity == quantity
        ]
        found += _nearest([*of_ways, *of_families])
    return tuple(found)


def _nearest(crossings: list[Crossing]) -> Iterator[Crossing]:
    """The nearest on each side of what there is; the one that says that nothing wins, where nothing does."""
    faster = [each for each in crossings if each.strategy is not None and each.factor > 1]
    slower = [each for each in crossings if each.strategy is not None and each.factor < 1]
    if faster:
        yield min(faster, key=lambda each: each.factor)
    if slower:
        yield max(slower, key=lambda each: each.factor)
    if not faster and not slower:
        yield crossings[0]


def alone_at(engine: Engine, decision: Decision) -> RivalAt:
    """A decision of the search on one kind, over its links at another speed."""
    space = engine.space.ordered(decision.order)
    evaluation = evaluate_decision(space, decision.strategy, decision.cuts, step_s=brief_step_s)
    priced = Priced(space=space, evaluation=evaluation)

    def rival(scaled: Scaled) -> Rival:
        return Rival(
            strategy=decision.strategy, step_s=lambda factor: step_s(priced, scaled(space.problem.cluster, factor))
        )

    return rival


def across_at(here: MixedSpace, decision: MixedDecision) -> RivalAt:
    """A pipeline across kinds, over links at another speed."""

    def rival(scaled: Scaled) -> Rival:
        def there_s(factor: float) -> float:
            problem = dataclasses.replace(here.problem, cluster=scaled(here.problem.cluster, factor))
            space = open_mixed_space(problem, here.forced, here.groups)
            return evaluate_layout(space, decision.strategy, decision.seats, decision.cuts, step_s=brief_step_s).step_s

        return Rival(strategy=decision.strategy, step_s=there_s)

    return rival
