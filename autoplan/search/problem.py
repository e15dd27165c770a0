"""What the search is asked: the model as layers, the machines, the batch, and what the user forces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.cluster import Cluster
from autoplan.cost_models.software import Software, mode
from autoplan.errors import StrategyError
from autoplan.layers.types import Edge, LayerGraph, LayerKind
from autoplan.schedules import SCHEDULES
from autoplan.search.dag_transfers import is_chain
from autoplan.search.ranges import Range

RECOMPUTE_POLICIES = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One planning question.

    ``tensor_kinds(degree)`` gives the layer kinds under a tensor degree, aligned with ``layers.kinds``; it raises
    :class:`StrategyError` where the degree is illegal for the model, and says why. ``forced`` holds strategy keys of
    the user (checked by :func:`autoplan.search.forced.read_forced`). ``batch_coupling``: why the batch may not be
    split, "" if it may. ``fixed_micro_batch``: the only micro-batch size that the graph runs at, None if any.
    ``zero_stages`` and ``recompute_policies``: what may be chosen (a runtime executes fewer than can be priced).
    ``max_tensor``: the highest tensor degree tried unless forced; None means the GPUs of one node. ``max_gpus``: the
    most GPUs to use. ``memory_headroom``: the share of every GPU's memory to keep free. ``ranges``: what a key may be;
    ``stages``: the first layer of each stage and, last, the number of layers, () if free; ``inside_node``: axes that
    cross no node; ``base``: the problem as asked, before :func:`autoplan.search.constraints.with_limits` read those.

    ``sequence_kinds(degree)``: like ``tensor_kinds`` under sequence parallelism, where layers hand each other shares of
    the sequence; it raises :class:`StrategyError` where no share can be made, and says why. ``sequence_edges(degree)``:
    ``layers.edges`` then, with the bytes that one rank sends. None where sequence parallelism is not offered.
    ``without_rule(degree)``: sentences about operators that a tensor axis does not split. ``expert``: ranks that the
    kinds' experts are spread over (:mod:`autoplan.search.expert`). ``compiled``: the stages
    run under torch.compile, so their operators cost what :data:`autoplan.cost_models.software.COMPILED` says; how the
    tensor axis splits them is chosen at eager prices, as the runtime chooses it again, for compiling changes neither
    the products nor the collectives that this choice weighs.
    """

    layers: LayerGraph
    tensor_kinds: Callable[[int], tuple[LayerKind, ...]]
    cluster: Cluster
    global_batch: int
    precision: str
    optimizer: str = "adamw"
    forced: Mapping[str, Any] = field(default_factory=dict)
    batch_coupling: str = ""
    fixed_micro_batch: int | None = None
    zero_stages: tuple[int, ...] = ZERO_STAGES
    recompute_policies: tuple[str, ...] = RECOMPUTE_POLICIES
    schedules: tuple[str, ...] = SCHEDULES
    max_tensor: int | None = None
    assumptions: tuple[str, ...] = ()
    max_gpus: int | None = None
    memory_headroom: float = 0.0
    ranges: Mapping[str, Range] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    inside_node: tuple[str, ...] = ()
    base: Problem | None = None
    sequence_kinds: Callable[[int], tuple[LayerKind, ...]] | None = None
    sequence_edges: Callable[[int], tuple[Edge, ...]] | None = None
    without_rule: Callable[[int], tuple[str, ...]] | None = None
    expert: int = 1
    compiled: bool = False

    @property
    def software(self) -> Software:
        """What the stages' operators are priced with."""
        return mode(compiled=self.compiled)

    @property
    def usable_bytes(self) -> float:
        """What a plan may fill of a GPU's memory."""
        return self.cluster.device.memory_bytes * (1 - self.memory_headroom)

    def kinds(self, degree: int, *, sequence: bool = False) -> tuple[LayerKind, ...]:
        """Layer kinds under ``degree``, with ``sequence`` under sequence parallelism too; the model's own for 1."""
        if degree == 1:
            return self.layers.kinds
        if sequence and self.sequence_kinds is not None:
            return self.sequence_kinds(degree)
        return self.tensor_kinds(degree)

    @property
    def sequence_open(self) -> bool:
        """Whether candidates with a tensor axis come with and without sequence parallelism."""
        return self.sequence_kinds is not None and "sequence_parallel" not in self.forced

    @property
    def sequence_forced(self) -> bool:
        """Whether the user wants sequence parallelism, and so a tensor axis."""
        return str(self.forced.get("sequence_parallel")).lower() == "true"

    def layers_under(self, degree: int, *, sequence: bool) -> LayerGraph:
        """The layers with the bytes that one rank sends. Of a model that is no chain the whole values, which is more
        than is sent under sequence parallelism."""
        if degree == 1 or not sequence or self.sequence_edges is None or not is_chain(self.layers):
            return self.layers
        return dataclasses.replace(self.layers, edges=self.sequence_edges(degree))


def check(problem: Problem) -> None:
    """Raise :class:`StrategyError` for a batch that no strategy can run."""
    if problem.global_batch < 1:
        raise StrategyError(f"global batch {problem.global_batch} is not one", legal="a whole number of samples from 1")
    if not problem.layers.layers:
        raise StrategyError("the model has no layers, so there is nothing to plan", where=problem.layers.name)
    fixed = problem.fixed_micro_batch
    if fixed and problem.global_batch % fixed:
        raise StrategyError(
            f"the graph runs at batch {fixed} only, and global batch {problem.global_batch} is no multiple of it",
            legal=f"global batch {fixed}, {2 * fixed}, {3 * fixed}, ...",
            attempt=f"global_batch={max(1, problem.global_batch // fixed) * fixed}",
        )
    if fixed and problem.batch_coupling and fixed != problem.global_batch:
        raise StrategyError(
            f"the graph runs at batch {fixed} only, and the global batch {problem.global_batch} cannot be split",
            where=problem.batch_coupling,
            legal=f"global batch {fixed}",
            attempt=f"give example inputs with {problem.global_batch} samples",
        )
