"""Which operator is the first to differ: a step in which every rank holds its values against the single process's.

Forward values of the whole batch, and their gradients, are recorded in one process. Each rank then runs its stage
operator by operator and compares what it has: the rows of its data rank and micro-batch, of those its shard, as the
linter places it, and of that its positions under a context axis. What lies in another order of rows where the batch is
split (rows sorted by expert) is left out. In the forward the first operator that differs is the culprit; where all
values agree, the gradient that is wrong *last* in the graph, for the backward runs from the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from autoplan.capture import Capture, gather_inputs, shape_at
from autoplan.plan import Strategy
from autoplan.runtime import Program
from autoplan.runtime.batch import batch_rows, micro_batch_sizes, rows_of_rank
from autoplan.sharding.placements import REPLICATE, Copied, Partial, Placement, Shard, take_shard

RELATIVE, ABSOLUTE = 1e-7, 1e-12  # far above rounding in float64, far below any fault


class Recorded(NamedTuple):
    """A value of the whole batch in the single process; ``per_sample`` rows of dimension 0 belong to a sample."""

    position: int
    per_sample: int
    value: Tensor
    gradient: Tensor | None


class Wrong(NamedTuple):
    """``kind``: "value" or "gradient"; ``position`` of the operator in the graph."""

    kind: str
    name: str
    position: int
    error: float
    allowed: float


def record(capture: Capture, batch: Any) -> dict[str, Recorded]:
    """Every batched value of the captured graph, and the loss's gradient with respect to it."""
    keeper = _Keeper(capture.graph_module)
    inputs = gather_inputs(capture, batch)
    loss = keeper.run(*inputs)
    while isinstance(loss, (tuple, list)):
        loss = loss[0]
    loss.backward()
    mixed = _mixed(capture, inputs, keeper.values)
    found: dict[str, Recorded] = {}
    for position, node in enumerate(capture.graph_module.graph.nodes):
        per_sample = _rows_a_sample(node)
        if per_sample and node.name in keeper.values and node.name not in mixed:
            found[node.name] = Recorded(position, per_sample, keeper.values[node.name], keeper.gradients.get(node.name))
    return found


def _mixed(capture: Capture, inputs: Sequence[Tensor], whole: Mapping[str, Tensor]) -> frozenset[str]:
    """The values of which half the samples alone do not give their own rows: those lie in another order."""
    if not capture.dynamic_batch or capture.couplings:
        return frozenset()
    batched = {spec.placeholder for spec in capture.inputs if spec.batched}
    names = [spec.placeholder for spec in capture.inputs]
    half = max(1, next((len(t) for name, t in zip(names, inputs, strict=True) if name in batched), 2) // 2)
    keeper = _Keeper(capture.graph_module)
    with torch.no_grad():
        keeper.run(*(t[-half:] if name in batched else t for name, t in zip(names, inputs, strict=True)))
    found = set()
    for name, value in keeper.values.items():
        rows = whole[name][-len(value) :] if value.dim() and len(value) else whole[name]
        if value.dim() and not (rows.shape == value.shape and torch.allclose(rows.double(), value.double())):
            found.add(name)
    return frozenset(found)


def _rows_a_sample(node: Node) -> int:
    """How many rows of dimension 0 a sample has; 0 where the batch is not dimension 0 alone."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or not value.dim():
        return 0
    try:
        one, two = shape_at(value, 1), shape_at(value, 2)
    except Exception:  # a size that depends on data has no rows to speak of
        return 0
    per_sample = two[0] - one[0]
    return per_sample if per_sample == one[0] and one[1:] == two[1:] else 0


class _Keeper(Interpreter):
    """Runs a graph and keeps results and their gradients, as they are when they are made."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor):
            self.values[n.name] = result.detach().clone()
            if result.requires_grad:
                result.register_hook(self._keep(n.name))
        return result

    def _keep(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            self.gradients[name] = gradient.detach().clone()

        return hook


def compare_rank(
    program: Program,
    batch: Any,
    recorded: Mapping[str, Recorded],
    placements: Mapping[str, Placement],
    positions: Mapping[str, Placement],
) -> list[Wrong]:
    """One step on the calling rank; what differs. ``placements`` over the tensor axis, ``positions`` over context."""
    part, strategy = program._rank_part(), program.plan.strategy
    probes: list[_Probe] = []
    if part.interpreter is not None and part.mesh.at is not None:
        rows = _rows(program._capture, batch, strategy, part.mesh.data_index)
        context = _Axis(positions, part.mesh.at.data % strategy.context, strategy.context)
        for index, chunk in part.interpreter.chunks.items():
            module = chunk.stage.graph_module
            tensor = _Axis(placements, part.mesh.at.tensor, strategy.tensor)
            probe: Any = _Probe(module, rows, recorded, tensor, context)
            probes.append(probe)
            stage = dataclasses.replace(chunk.stage, graph_module=probe)
            part.interpreter.chunks[index] = dataclasses.replace(chunk, stage=stage)
    program.step(batch)
    return [wrong for probe in probes for wrong in probe.wrong]


def _rows(capture: Capture, batch: Any, strategy: Strategy, data_rank: int) -> list[range]:
    """The samples of each micro-batch of a data rank."""
    placeholders = {s.placeholder: t for s, t in zip(capture.inputs, gather_inputs(capture, batch), strict=True)}
    mine = rows_of_rank(batch_rows(capture, placeholders), strategy, data_rank)
    fixed = None if capture.dynamic_batch else capture.batch_size
    found, start = [], mine.start
    for size in micro_batch_sizes(len(mine), strategy, fixed=fixed):
        found.append(range(start, start + size))
        start += size
    return found


class _Axis(NamedTuple):
    """How values lie over an axis, and this rank's place on it."""

    placements: Mapping[str, Placement]
    rank: int
    degree: int


def _positions(whole: Tensor, state: Shard, *, rank: int, degree: int) -> Tensor:
    """Of every sequence along a dimension, this rank's piece from the front and its piece from the back."""
    mine = []
    for run in whole.split(state.sizes(whole.shape[state.dim]), dim=state.dim):
        pieces = run.chunk(2 * degree, dim=state.dim)
        mine += [pieces[rank], pieces[2 * degree - 1 - rank]]
    return torch.cat(mine, dim=state.dim)


class _Probe(nn.Module):
    """Stands for a stage's graph: runs it operator by operator and compares. Forwards come in micro-batches' order."""

    def __init__(
        self,
        module: GraphModule,
        rows: Sequence[range],
        recorded: Mapping[str, Recorded],
        tensor: _Axis,
        context: _Axis,
    ) -> None:
        super().__init__()
        self.module, self.rows, self.recorded = module, rows, recorded
        self.tensor, self.context = tensor, context
        self.wrong: list[Wrong] = []
        self.forwards = 0

    def forward(self, *inputs: Any) -> Any:
        rows = self.rows[self.forwards]
        self.forwards += 1
        return _Comparing(self, rows).run(*inputs)

    def check(self, kind: str, name: str, rows: range, found: Tensor) -> None:
        known = self.recorded[name]
        whole = known.value if kind == "value" else known.gradient
        summand = Partial if kind == "value" else Copied
        states = [axis.placements.get(name, REPLICATE) for axis in (self.tensor, self.context)]
        if whole is None or any(isinstance(state, summand) for state in states):
            return
        wanted = whole[rows.start * known.per_sample : rows.stop * known.per_sample]
        if isinstance(states[0], Shard):
            wanted = take_shard(wanted, states[0], index=self.tensor.rank, degree=self.tensor.degree)
        if isinstance(states[1], Shard):
            wanted = _positions(wanted, states[1], rank=self.context.rank, degree=self.context.degree)
        elif kind == "gradient" and self.context.degree > 1:
            return  # every rank's gradient of a whole value may be a summand
        if wanted.shape != found.shape:
            self.wrong.append(Wrong(kind, name, known.position, float(found.numel()), 0.0))
            return
        if not wanted.is_floating_point():
            wanted, found = wanted.double(), found.double()
        allowed = RELATIVE * wanted.norm().item() + ABSOLUTE * max(1.0, wanted.numel() ** 0.5)
        error = torch.nan_to_num(found.detach() - wanted, nan=1e300).norm().item()
        if not error <= allowed:
            self.wrong.append(Wrong(kind, name, known.position, min(error, 1e300), allowed))


class _Comparing(Interpreter):
    def __init__(self, probe: _Probe, rows: range) -> None:
        super().__init__(probe.module)
        self.probe, self.rows = probe, rows

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, Tensor) and n.name in self.probe.recorded:
            self.probe.check("value", n.name, self.rows, result)
            if result.requires_grad:
                name, rows = n.name, self.rows
                result.register_hook(lambda gradient: self.probe.check("gradient", name, rows, gradient))
        return result
