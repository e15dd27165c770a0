"""The arcs of one strategy: which spans of layers each stage may hold, and what they cost there, as a split problem.

No stage of a split has a longer period than the limit that its tables are of, so the layers before stage s take at most
s limits together, and those after it what the stages after it may take: near an even split that leaves each stage a
few of the spans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoplan.search.split import Flags, Floats, Integers, Places, SplitProblem, StageTable
from autoplan.search.tables import Tables

# Against the rounding of sums of periods.
_HAIR = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class StageArcs:
    """The arcs of the strategy of ``tables``."""

    tables: Tables

    def problem(self) -> SplitProblem:
        """The split problem, its recompute optimistic until asked for."""
        extra = np.full(self._known, math.inf)
        wanted = self._wanted(np.ones(len(self.places), dtype=bool))
        extra[wanted] = self.tables.optimistic(*wanted)
        return self._problem(extra, (extra == 0) | np.isinf(extra))

    def table(self, stage: int) -> StageTable:
        """All arcs of ``stage``, exactly."""
        problem = self.problem()
        assert problem.refine is not None
        problem = problem.refine(self.places.stage == stage)
        kept = np.nonzero((self.places.stage == stage) & np.isfinite(problem.period_s))[0]
        size = self.places.layers + 1
        found = [np.full((size, size), math.inf) for _ in range(3)]
        for dense, values in zip(found, (problem.period_s, problem.cost_s, problem.tail_s), strict=True):
            dense[self.places.first[kept], self.places.end[kept]] = values[kept]
        return StageTable(*found)

    @cached_property
    def most_sends_s(self) -> list[float]:
        """For every stage the most seconds a micro-batch that one of its arcs receives and sends."""
        return [float(self._sends_s[mine].max(initial=0.0)) for mine in self.places.of_stage]

    @cached_property
    def places(self) -> Places:
        """The arcs; every path of them is a split."""
        first, end = self.tables.spans
        stage, span = self._stage_and_span
        return Places(
            layers=self.tables.chain.layers,
            stages=self.tables.strategy.pipeline,
            stage=stage,
            first=first[span],
            end=end[span],
        )

    def _problem(self, extra: Floats, exact: Flags) -> SplitProblem:
        """The split problem where [S, R] rows recompute for ``extra`` seconds, at least or ``exact``-ly."""
        at = self.places.stage, self._row
        period = self.tables.base_period[self._row] + extra[at]
        cost = period + self._sends_s

        def refine(arcs: Flags) -> SplitProblem:
            wanted = self._wanted(arcs & ~exact[at])
            better, known = extra.copy(), exact.copy()
            better[wanted] = self.tables.exact(*wanted)
            known[wanted] = True
            return self._problem(better, known)

        return SplitProblem(
            places=self.places,
            micro_batches=self.tables.strategy.micro_batches,
            period_s=period if self.tables.strategy.schedule == "gpipe" else cost,
            cost_s=cost,
            tail_s=self.tables.tail[self._row],
            exact=exact[at],
            refine=refine,
        )

    @property
    def _known(self) -> tuple[int, int]:
        """[S, R]: what spans that are alike cost on a stage is found once."""
        return self.tables.strategy.pipeline, len(self.tables.rows[0])

    def _wanted(self, arcs: Flags) -> tuple[Integers, Integers]:
        """(stage, row) of arcs, each once."""
        flags = np.zeros(self._known, dtype=bool)
        flags[self.places.stage[arcs], self._row[arcs]] = True
        stage, row = np.nonzero(flags)
        return stage, row

    @cached_property
    def _stage_and_span(self) -> tuple[Integers, Integers]:
        """Of every arc: the first stage starts with the first layer, the last ends with the last, no other touches
        them, and those before and after it can hold the rest."""
        first, end = self.tables.spans
        chain, stages, limit = self.tables.chain, self.tables.strategy.pipeline, self.tables.period_limit_s * _HAIR
        before, cut = np.arange(stages)[:, None], np.arange(chain.layers + 1)
        after = stages - 1 - before
        starts = ((cut == 0) == (before == 0)) & (chain.sizes >= before)
        ends = ((cut == chain.layers) == (after == 0)) & (chain.sizes[-1] - chain.sizes >= after)
        if math.isfinite(limit):
            starts &= chain.period <= before * limit
            ends &= chain.period[-1] * (2 - _HAIR) - chain.period <= after * limit
        stage, span = np.nonzero(np.take(starts, first, axis=1) & np.take(ends, end, axis=1))
        return stage, span

    @cached_property
    def _row(self) -> Integers:
        """Which row each arc is priced as."""
        return self.tables.row_of_span[self._stage_and_span[1]]

    @cached_property
    def _sends_s(self) -> Floats:
        """Seconds a micro-batch that every arc receives and sends."""
        places = self.places
        return np.concatenate(
            [
                self.tables.sends_around(stage, places.first[mine], places.end[mine])
                for stage, mine in enumerate(places.of_stage)
            ]
        )
