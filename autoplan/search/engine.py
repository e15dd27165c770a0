"""Best-first search over the candidates, with proof.

What is minimised is the closed form of a 1F1B or GPipe candidate's best split, and the simulated step of the one split
of an interleaved or zero-bubble candidate (:mod:`autoplan.search.listed`), which has no closed form that compares.
Candidates are opened in the order of their lower bounds; opening one solves its stage split exactly (by the dynamic
program; the MILP confirms the fastest and the chosen). Once the next bound passes the best value found, no candidate
that is left can be better: the list of bounds is the certificate.

The schedule simulator then ranks the candidates whose closed form is near the best, and the least parallelism within
:data:`TOLERANCE` of the shortest simulated step is looked for (:mod:`autoplan.search.choice`).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoplan.plan import Strategy
from autoplan.search.blocks import BlockBounds
from autoplan.search.bounds import LowerBounds, fits_greedily, lower_bounds
from autoplan.search.choice import CONFIRMED, choose
from autoplan.search.decisions import Decision, decide, decide_even_split, solve_strategy
from autoplan.search.listed import is_listed
from autoplan.search.listed_least import EvenSplitBounds
from autoplan.search.milp import default_solver
from autoplan.search.preferences import preferences
from autoplan.search.simulated import simulated_with_longest_s
from autoplan.search.solver import SolverName
from autoplan.search.space import Space

TOLERANCE = 0.02
# Of the candidates whose closed form is near the best at most so many are simulated.
MOST_CONFIRMED = 64
ROUNDING = 1e-12
# The recompute of all stages is summed in another order than that of a split.
_HAIR = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of the candidates."""

    considered: int
    pruned_by_memory: int
    pruned_by_bound: int
    solved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """``best`` has the least value (:class:`Decision`), ``fastest`` the shortest simulated step, ``chosen`` is the
    least parallel within tolerance of that. ``lower_bound_s``: no candidate's value is less; ``proven`` if that is
    ``best`` itself. ``simulated_bound_s``: no candidate's simulated step is shorter, whatever its split.
    ``confirmed``: candidates that were simulated."""

    chosen: Decision
    best: Decision
    fastest: Decision
    lower_bound_s: float
    simulated_bound_s: float
    proven: bool
    confirmed: int
    counts: Counts


@dataclass(kw_only=True)
class Engine:
    """One search. ``solver`` None leaves the proof to the dynamic program; ``deadline`` is a :func:`time.monotonic`."""

    space: Space
    solver: SolverName | None = field(default_factory=default_solver)
    deadline: float = math.inf
    _fits: dict[int, bool] = field(default_factory=dict, init=False)
    _known: dict[int, tuple[float, Decision | None]] = field(default_factory=dict, init=False)
    _floors: dict[int, float] = field(default_factory=dict, init=False)
    _sharp: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    _simulated: dict[Strategy, float] = field(default_factory=dict, init=False)
    _longest: dict[int, float] = field(default_factory=dict, init=False)
    _bottlenecks: dict[int, float] = field(default_factory=dict, init=False)
    _strategies: dict[int, Strategy] = field(default_factory=dict, init=False)

    @cached_property
    def _blocks(self) -> BlockBounds:
        return BlockBounds(space=self.space)

    @cached_property
    def _even_splits(self) -> EvenSplitBounds:
        return EvenSplitBounds(space=self.space)

    @cached_property
    def bounds(self) -> LowerBounds:
        """Those of all candidates."""
        return lower_bounds(self.space, self.space.candidates)

    @cached_property
    def _order(self) -> np.ndarray:
        fit = np.nonzero(self.bounds.short_bytes <= 0)[0]
        keys = (self.bounds.step_s, *preferences(self.space.candidates))
        return fit[np.lexsort([key[fit] for key in keys[::-1]])]

    def order(self, chosen: np.ndarray | None = None, *, step_at_most_s: float = math.inf) -> list[int]:
        """Candidates (of those ``chosen``) that pass the memory bound, by lower bound, then by preference; those whose
        bound is more than ``step_at_most_s`` left out."""
        reached = np.searchsorted(self.bounds.step_s[self._order], step_at_most_s, side="right")
        among = self._order[:reached]
        found: list[int] = (among if chosen is None else among[chosen[among]]).tolist()
        return found

    def strategy(self, index: int) -> Strategy:
        """Candidate ``index``, remembered."""
        if index not in self._strategies:
            self._strategies[index] = self.space.candidates.strategy(index)
        return self._strategies[index]

    # ---------------------------------------------------------------------------------------------------- the search

    def run(self, tolerance: float = TOLERANCE) -> Found | None:
        """The search; None where nothing fits."""
        best, floor, proven = self._fastest(tolerance)
        if best is None:
            return None
        fastest = self._simulated_fastest(best)
        chosen = choose(self, best, fastest, tolerance) if tolerance else fastest
        return Found(
            chosen=self._confirm(chosen),
            best=self._confirm(best),
            fastest=fastest,
            lower_bound_s=floor,
            simulated_bound_s=self._simulated_bound_s(self.step_s(fastest)),
            proven=proven,
            confirmed=len(self._simulated),
            counts=self._counts(),
        )

    def _fastest(self, tolerance: float) -> tuple[Decision | None, float, bool]:
        best: Decision | None = None
        for index, bound in self.best_first(self.order()):
            if best is not None and bound >= best.value_s:
                break
            if best is not None and time.monotonic() > self.deadline:
                # But for the rounding of sums there may be nothing left to find.
                proven = bound >= best.value_s * (1 - ROUNDING)
                return best, best.value_s if proven else bound, proven
            # Up to the tolerance above the best, so that the answer serves the search for less parallelism too.
            found = self.open(index, cutoff_s=best.value_s * (1 + max(tolerance, CONFIRMED)) if best else math.inf)
            if found is not None and (best is None or found.value_s < best.value_s):
                best = found
        return best, best.value_s if best else math.inf, best is not None

    def _simulated_fastest(self, best: Decision) -> Decision:
        """The shortest simulated step among the candidates whose closed form is nearly the best."""
        limit, fastest, opened = best.value_s * (1 + CONFIRMED), best, 0
        fastest_s = self.step_s(fastest)
        order = np.array(self.order(step_at_most_s=limit), dtype=np.int64)
        order = order[self.bounds.simulated_s[order] < fastest_s]
        bounds = (self.bounds.simulated_s[order], self._listed[order])
        for index, simulated_s, listed in zip(order.tolist(), *(values.tolist() for values in bounds), strict=True):
            if opened >= MOST_CONFIRMED or time.monotonic() > self.deadline:
                break
            if simulated_s >= fastest_s:
                continue
            opened += not listed
            found = self.open(index, cutoff_s=fastest_s if listed else limit)
            if found is not None and self.step_s(found) < fastest_s:
                fastest, fastest_s = found, self.step_s(found)
        return fastest

    def best_first(self, indices: list[int]) -> Iterator[tuple[int, float]]:
        """Candidates (given by lower bound) with their sharpest lower bound, by that; of equals the one that is given
        first. A candidate is bounded more sharply when its turn comes, so that most never are."""
        waiting: list[tuple[float, int, int]] = []
        bounds: list[float] = self.bounds.step_s[indices].tolist()
        ahead = 0
        while waiting or ahead < len(indices):
            while ahead < len(indices) and (not waiting or bounds[ahead] <= waiting[0][0]):
                heapq.heappush(waiting, (bounds[ahead], ahead, 0))
                ahead += 1
            bound, place, depth = heapq.heappop(waiting)
            if depth == self._depth(indices[place]):
                yield indices[place], bound
                continue
            sharper = self._sharper_s(indices[place], depth + 1)
            if math.isfinite(sharper):
                heapq.heappush(waiting, (max(bound, sharper), place, depth + 1))

    # --------------------------------------------------------------------------------------------- one candidate

    def open(self, index: int, *, cutoff_s: float) -> Decision | None:
        """The best split of one candidate by the dynamic program, if it costs at most ``cutoff_s``; remembered."""
        if not self.fits(index):
            return None
        known = self._known.get(index)
        if known is None or (known[1] is None and known[0] < cutoff_s):
            if any(self._sharper_s(index, depth + 1) > cutoff_s for depth in range(self._depth(index))):
                return None
            strategy = self.strategy(index)
            if is_listed(strategy):
                found, floor_s = decide_even_split(self.space, strategy, cutoff_s=cutoff_s)
            else:
                solution = solve_strategy(self.space, strategy, cutoff_s=cutoff_s, least_s=self.sharper_s(index))
                found = decide(self.space, strategy, solution)
                floor_s = math.inf if solution is None else solution.simulated_bound_s
            known = self._known[index] = cutoff_s, found
            self._floors[index] = floor_s
        decision = known[1]
        return decision if decision is not None and decision.value_s <= cutoff_s else None

    def step_s(self, decision: Decision) -> float:
        """The simulated step, remembered."""
        if decision.strategy not in self._simulated:
            self._simulated[decision.strategy] = decision.simulated_s
        return self._simulated[decision.strategy]

    def fits(self, index: int) -> bool:
        """The greedy memory test, remembered."""
        if self._listed[index]:
            return True
        if index not in self._fits:
            strategy = self.strategy(index)
            # Filling stages to the brim reaches furthest in one order of the layers alone.
            ordered = strategy.pipeline == 1 or (self.space.down_sets is None and not is_listed(strategy))
            self._fits[index] = not ordered or fits_greedily(self.space.tables(strategy))
        return self._fits[index]

    @cached_property
    def _listed(self) -> np.ndarray:
        return self.space.candidates.listed

    def _depth(self, index: int) -> int:
        """How many times a candidate's bound can be sharpened."""
        if self._listed[index]:
            return 3
        return 1 if self.space.candidates.pipeline[index] == 1 else 2

    def sharper_s(self, index: int) -> float:
        """The sharpest lower bound of one candidate; inf where it does not fit."""
        return max(float(self.bounds.step_s[index]), self._sharper_s(index, self._depth(index)))

    def _sharper_s(self, index: int, depth: int) -> float:
        """The bound of one candidate by what its layers recompute (1): of several stages, on the one that takes
        longest. Then by what all of its stages recompute (2), or by the boundaries of its one split: the rank that
        works longest (2), and the whole step (3)."""
        if (index, depth) not in self._sharp:
            self._sharp[index, depth] = self._sharpened_s(index, depth)
        return self._sharp[index, depth]

    def _sharpened_s(self, index: int, depth: int) -> float:
        strategy = self.strategy(index)
        if strategy.pipeline == 1:
            return self.space.tables(strategy).least_whole_s
        if depth == 1:
            return self._working_s(index)
        if not self._listed[index]:
            working_s = self._sharper_s(index, 1)
            return max(working_s, (working_s + self._blocks.recompute_s(strategy)) / _HAIR)
        return self._even_splits.working_s(strategy) if depth == 2 else self._even_splits.step_s(strategy)

    def _working_s(self, index: int) -> float:
        """What the rank with the longest period makes of a step, by its blocks alone."""
        longest_s, micro_batches = self._bottleneck_s(index), int(self.space.candidates.micro_batches[index])
        if self._listed[index]:
            return micro_batches * longest_s
        self._longest[index] = longest_s
        longer_s = max(0.0, longest_s - float(self.bounds.longest_s[index]))
        return float(self.bounds.step_s[index]) + (micro_batches - 1) * longer_s

    def _bottleneck_s(self, index: int) -> float:
        """Found once for all rows of the same degrees: ranks under interleaved and zero-bubble schedules hold no fewer
        micro-batches than those of 1F1B, which stand beside them."""
        row = int(self.space.candidates.of[index])
        if row not in self._bottlenecks:
            self._bottlenecks[row] = self._blocks.bottleneck_s(self.strategy(index))
        return self._bottlenecks[row]

    def _confirm(self, decision: Decision) -> Decision:
        """The same decision proven by the MILP, or by what proved it where there is no solver or nothing to solve."""
        if self.solver is None or decision.proven_by != "dynamic program":
            return decision
        # A hair above, so that the value itself is not cut off.
        solution = solve_strategy(
            self.space, decision.strategy, cutoff_s=decision.value_s * (1 + 1e-9), solver=self.solver
        )
        confirmed = decide(self.space, decision.strategy, solution)
        return confirmed if confirmed is not None and confirmed.value_s <= decision.value_s else decision

    # -------------------------------------------------------------------------------------------------- the proof

    def _simulated_bound_s(self, fastest_s: float) -> float:
        """No candidate can be simulated faster than this: those that were opened by what their splits take at least."""
        bound_s, simulated_s = fastest_s, self.bounds.simulated_s
        for index in np.nonzero((self.bounds.short_bytes <= 0) & (simulated_s < fastest_s))[0]:
            if simulated_s[index] < bound_s and self.fits(int(index)):
                bound_s = min(bound_s, max(float(simulated_s[index]), self._simulated_floor_s(int(index))))
        return bound_s

    def _simulated_floor_s(self, index: int) -> float:
        """What every split of a candidate takes at least, as far as it was looked into."""
        if index in self._floors:
            return self._floors[index]
        if self._listed[index]:
            return max(self._sharp.get((index, depth), 0.0) for depth in range(1, self._depth(index) + 1))
        if index not in self._longest:
            return 0.0
        strategy = self.strategy(index)
        chain = self.space.chain_of(strategy)
        return simulated_with_longest_s(strategy, float(chain.period[-1]), self._longest[index])

    def _counts(self) -> Counts:
        considered = len(self.space.candidates)
        memory = int(np.sum(self.bounds.short_bytes > 0)) + sum(not fits for fits in self._fits.values())
        solved = len(self._known)
        return Counts(
            considered=considered,
            pruned_by_memory=memory,
            pruned_by_bound=considered - memory - solved,
            solved=solved,
        )
