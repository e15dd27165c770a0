"""The priced search space: candidates, and what each needs to be bounded or solved. Everything is asked for once."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from functools import cached_property

from autoplan.cost_models.memory import count_elements
from autoplan.cost_models.recipes import Recipe, recipe
from autoplan.errors import StrategyError
from autoplan.layers.order import reordered
from autoplan.layers.types import LayerKind
from autoplan.plan import Strategy
from autoplan.search.chain import Chain, Flow, build_chain
from autoplan.search.constraints import allowed, with_limits
from autoplan.search.dag import DownSetChain, DownSets, down_set_chain, down_sets
from autoplan.search.degrees import Candidates, enumerate_candidates, tensor_degrees
from autoplan.search.forced import Forced, read_forced
from autoplan.search.pricing import Kinds, StateCosts, state_costs
from autoplan.search.problem import Problem, check
from autoplan.search.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Space:
    """A problem with its forced keys and its caches."""

    problem: Problem
    forced: Forced
    _kinds: dict[tuple[int, bool], tuple[LayerKind, ...]] = field(default_factory=dict)
    _states: dict[tuple[int, int, bool, bool], StateCosts] = field(default_factory=dict)
    _totals: dict[tuple[int, bool], tuple[int, int]] = field(default_factory=dict)
    _priced: dict[tuple[int, bool], Kinds] = field(default_factory=dict)
    _weight_gradients: dict[tuple[int, int, bool], tuple[float, ...]] = field(default_factory=dict)
    # What follows is of one order of the layers, and not shared with those of another.
    _flows: dict[tuple[int, bool], Flow] = field(default_factory=dict, init=False)
    _chains: dict[tuple[int, int, bool], Chain] = field(default_factory=dict, init=False)
    _convex: dict[tuple[int, int, bool], DownSetChain] = field(default_factory=dict, init=False)
    _ordered: dict[tuple[int, ...], Space] = field(default_factory=dict, init=False)

    @cached_property
    def recipe(self) -> Recipe:
        return recipe(self.problem.precision, self.problem.optimizer)

    @cached_property
    def candidates(self) -> Candidates:
        """Every legal tuple of degrees."""
        found = enumerate_candidates(self.problem, self.forced, tensors=self.tensors, shared=self.shared)
        return allowed(self.problem, found)

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Tensor degrees that the model allows."""
        return tuple(d for d in tensor_degrees(self.problem, self.forced) if d not in self.refused)

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """Those of them under which layers may hand each other shares of the sequence, where that is not ruled out."""
        if self.problem.sequence_forced:
            return self.tensors
        return tuple(d for d in self.tensors if d > 1 and self.problem.sequence_open and self._shares_sequence(d))

    def _shares_sequence(self, degree: int) -> bool:
        try:
            self.kinds(degree, sequence=True)
        except StrategyError:
            return False
        return True

    @cached_property
    def refused(self) -> dict[int, str]:
        """Tensor degrees that the model does not allow, and why."""
        reasons: dict[int, str] = {}
        for degree in tensor_degrees(self.problem, self.forced):
            try:
                self.kinds(degree, sequence=self.problem.sequence_forced)
            except StrategyError as error:
                reasons[degree] = error.what
        return reasons

    @cached_property
    def policies(self) -> tuple[str, ...]:
        """Recompute policies that may be chosen; the first is what a layer does where memory allows."""
        if self.forced.recompute is not None:
            return (self.forced.recompute,)
        return ("none", *(p for p in self.problem.recompute_policies if p != "none"))

    def kinds(self, tensor: int, *, sequence: bool = False) -> tuple[LayerKind, ...]:
        """Layer kinds under a tensor degree, and sequence parallelism; raises :class:`StrategyError`."""
        key = (tensor, sequence)
        if key not in self._kinds:
            self._kinds[key] = self.problem.kinds(tensor, sequence=sequence)
        return self._kinds[key]

    def kinds_of(self, strategy: Strategy) -> tuple[LayerKind, ...]:
        """Layer kinds under ``strategy``."""
        return self.kinds(strategy.tensor, sequence=strategy.sequence_parallel)

    def chain_of(self, strategy: Strategy) -> Chain:
        """The priced layers under ``strategy``."""
        return self.chain(strategy.tensor, strategy.micro_batch_size, sequence=strategy.sequence_parallel)

    @cached_property
    def down_sets(self) -> DownSets | None:
        """What may come before a cut, where that is more than the first layers; else None."""
        return down_sets(self.problem.layers)

    @cached_property
    def first_layers(self) -> tuple[int, ...]:
        """Layers that may be the first."""
        return (0,) if self.down_sets is None else self.down_sets.first

    def ordered(self, order: tuple[int, ...]) -> Space:
        """The same space with its layers in another order; () is its own."""
        if not order:
            return self
        if order not in self._ordered:
            problem = dataclasses.replace(self.problem, layers=reordered(self.problem.layers, order))
            self._ordered[order] = dataclasses.replace(self, problem=problem)
        return self._ordered[order]

    def convex_chain(self, strategy: Strategy) -> Chain:
        """The priced layers with every convex cut: of the given order alone where there are no others."""
        chain, micro_batch = self.chain_of(strategy), strategy.micro_batch_size
        key = (strategy.tensor, micro_batch, strategy.sequence_parallel)
        if self.down_sets is None:
            return chain
        if key not in self._convex:
            self._convex[key] = down_set_chain(chain, self.down_sets, samples=micro_batch)
        return self._convex[key]

    def convex_tables(self, strategy: Strategy, *, period_limit_s: float = math.inf) -> Tables:
        """The arcs of ``strategy`` between any two convex cuts."""
        chain = self.convex_chain(strategy)
        return dataclasses.replace(self.tables(strategy, period_limit_s=period_limit_s), chain=chain)

    def chain(self, tensor: int, micro_batch: int, *, sequence: bool = False) -> Chain:
        """The priced layers."""
        key = (tensor, micro_batch, sequence)
        if key not in self._chains:
            flow, kinds = self._flow(tensor, sequence), self._kinds_to_price(tensor, sequence)
            self._chains[key] = build_chain(flow, kinds, policies=self.policies, samples=micro_batch)
        return self._chains[key]

    def _flow(self, tensor: int, sequence: bool) -> Flow:
        key = (tensor, sequence)
        if key not in self._flows:
            self._flows[key] = Flow(self.problem.layers_under(tensor, sequence=sequence))
        return self._flows[key]

    def _kinds_to_price(self, tensor: int, sequence: bool) -> Kinds:
        key = (tensor, sequence)
        if key not in self._priced:
            kinds = self.kinds(tensor, sequence=sequence)
            self._priced[key] = Kinds(
                kinds=kinds, cluster=self.problem.cluster, tensor=tensor, software=self.problem.software
            )
        return self._priced[key]

    def totals(self, strategy: Strategy) -> tuple[int, int]:
        """Distinct parameter elements of the model on one tensor rank, and those that train."""
        key = (strategy.tensor, strategy.sequence_parallel)
        if key not in self._totals:
            kinds = self.kinds_of(strategy)
            counted = count_elements([kinds[layer.kind] for layer in self.problem.layers.layers])
            self._totals[key] = counted.total, counted.trainable
        return self._totals[key]

    def weight_gradients_s(self, strategy: Strategy) -> tuple[float, ...]:
        """Seconds of one micro-batch's backward of each kind that weights' gradients take."""
        key = (strategy.tensor, strategy.micro_batch_size, strategy.sequence_parallel)
        if key not in self._weight_gradients:
            priced = self._kinds_to_price(strategy.tensor, strategy.sequence_parallel)
            self._weight_gradients[key] = tuple(priced.weight_gradients_s(strategy.micro_batch_size).tolist())
        return self._weight_gradients[key]

    def states(self, strategy: Strategy) -> StateCosts:
        """Bytes a parameter under ``strategy``."""
        key = (strategy.data, strategy.zero_stage, strategy.tensor > 1, strategy.pipeline > 1)
        if key not in self._states:
            self._states[key] = state_costs(strategy, self.recipe, self.problem.cluster.device)
        return self._states[key]

    def tables(self, strategy: Strategy, *, period_limit_s: float = math.inf) -> Tables:
        """The arcs of ``strategy``."""
        return Tables(
            chain=self.chain_of(strategy),
            strategy=strategy,
            cluster=self.problem.cluster,
            recipe=self.recipe,
            states=self.states(strategy),
            usable_bytes=self.problem.usable_bytes,
            period_limit_s=period_limit_s,
        )


def open_space(problem: Problem) -> Space:
    """Check the problem and price nothing yet; raises :class:`StrategyError`."""
    problem = with_limits(problem)
    check(problem)
    # Sharding a model is dear: asked for once a degree, by the checks and by problems made from this one too.
    problem = dataclasses.replace(problem, tensor_kinds=functools.cache(problem.tensor_kinds))
    space = Space(problem=problem, forced=read_forced(problem))
    recipe(problem.precision, problem.optimizer)  # an unknown one is the user's mistake: say so before any work
    return space
