"""One model of the zoo under one way of splitting: the same numbers as a single process, a refusal, or not applicable.

The model trains two steps alone (eager, float64, whole batches, AdamW) and as the plan's program on forked gloo ranks;
loss, every gradient, the gradients' norm and every updated weight and buffer are compared as `autoplan verify` does,
at 1e-10.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autoplan.capture import Capture, capture
from autoplan.capture.batch import replace_leaves, tensors
from autoplan.cluster import Cluster
from autoplan.errors import AutoplanError, RuntimeFault
from autoplan.layers import LayerGraph, build_layers
from autoplan.plan import Plan
from autoplan.runtime import Program, launch
from autoplan.sharding import Shard, Sharding, shard_model
from autoplan.verification import numbers
from autoplan.verification.precision import float64_throughout
from tests.support.plans import hand_plan
from tests.zoo.entry import SAMPLES, Entry

STEPS = 2
Status = Literal["equal", "differs", "refused", "n.a."]
AXES: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "tensor 2, sequence": {"tensor": 2, "sequence_parallel": True},
    "tensor 4, sequence": {"tensor": 4, "sequence_parallel": True},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
    "expert 2": {"data": 2, "expert": 2},
    "expert 4": {"data": 4, "expert": 4},
    "context 2": {"context": 2},
    "context 4": {"context": 4},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """``split``: of a tensor axis, the share of the trained weights that is divided over it. ``worst``: the largest
    error as a share of what is allowed."""

    status: Status
    reason: str = ""
    split: float | None = None
    worst: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A captured model with what it computes alone."""

    entry: Entry
    capture: Capture
    layers: LayerGraph
    batches: tuple[Any, ...]
    expected: numbers.Numbers


def not_applicable(entry: Entry, axis: str) -> str:
    """Why ``axis`` has nothing to split in the model; "" where it has."""
    if axis.endswith("sequence") and not entry.sequence:
        return "layers hand each other no sequence"
    if axis.startswith("expert") and not entry.experts:
        return "no experts"
    if axis.startswith("context") and not entry.causal:
        return "no causal attention over a sequence"
    return entry.missing.get(axis, "")


def run_entry(entry: Entry, axes: tuple[str, ...] = tuple(AXES)) -> dict[str, Cell]:
    """All cells of one row."""
    wanted = [axis for axis in axes if not not_applicable(entry, axis)]
    cells = {axis: Cell("n.a.", reason) for axis in axes if (reason := not_applicable(entry, axis))}
    with float64_throughout():
        try:
            specimen = prepare(entry)
        except AutoplanError as error:
            return {axis: cells.get(axis, Cell("refused", error.what)) for axis in axes}
        programs: dict[int, dict[str, Program]] = {}
        split: dict[str, float | None] = {}
        for axis in wanted:
            try:
                program, split[axis] = program_of(specimen, axis)
                programs.setdefault(program.plan.gpus, {})[axis] = program
            except AutoplanError as error:
                cells[axis] = Cell("refused", error.what)
        for ranks, group in programs.items():
            cells |= _run(specimen, ranks, group)
    return {axis: dataclasses.replace(cells[axis], split=split.get(axis)) for axis in axes}


def prepare(entry: Entry) -> Specimen:
    """Trace in float64 and train alone. Raises AutoplanError where the model is refused."""
    model, batch, loss_fn = entry.build()
    model = model.double()
    batches = tuple(_sampled(batch, step) for step in range(STEPS))
    captured = capture(model, batches[0], loss_fn=loss_fn)
    layers = build_layers(captured)
    return Specimen(
        entry=entry,
        capture=captured,
        layers=layers,
        batches=batches,
        expected=numbers.train_alone(model, loss_fn, captured, batches),
    )


def program_of(specimen: Specimen, axis: str) -> tuple[Program, float | None]:
    """The program, and for a tensor axis the share of weights that it divides."""
    plan = plan_of(specimen, axis)
    strategy, sharding = plan.strategy, None
    if strategy.tensor > 1:
        sharding = shard_model(
            specimen.capture,
            specimen.layers,
            degree=strategy.tensor,
            cluster=_cluster(),
            sequence=strategy.sequence_parallel,
        )
    program = Program(specimen.capture, plan, specimen.layers, cluster=_cluster(), sharding=sharding, device="cpu")
    for tensor_rank in range(strategy.tensor):  # once here instead of in every rank
        program._builder.graphs(tensor_rank)
    return program, _split_share(specimen.capture, sharding)


def plan_of(specimen: Specimen, axis: str) -> Plan:
    """The axis' plan: two micro-batches a data rank where the batch may be split."""
    degrees = AXES[axis]
    micro_batches = 1 if specimen.capture.couplings or degrees.get("data", 1) > 2 else 2
    size = SAMPLES // degrees.get("data", 1) // micro_batches
    return hand_plan(specimen.layers, **degrees, micro_batches=micro_batches, micro_batch_size=size)


def _run(specimen: Specimen, ranks: int, programs: dict[str, Program]) -> dict[str, Cell]:
    """All programs of one number of ranks on one set of processes; each alone where that fails."""

    def body() -> dict[str, list[numbers.Finding]]:
        torch.set_num_threads(1)
        found = {}
        for axis, program in programs.items():
            with numbers.values_kept(specimen.capture):
                found[axis] = numbers.train_rank(program, specimen.batches, specimen.expected, numbers.TOLERANCE)
        return found

    try:
        by_rank = launch(body, gpus=ranks, device="cpu", timeout_s=50.0, deadline_s=110.0)
    except RuntimeFault as error:
        if len(programs) == 1:
            return {axis: Cell("differs", str(error)) for axis in programs}
        return {axis: _run(specimen, ranks, {axis: program})[axis] for axis, program in programs.items()}
    return {axis: _judge([finding for found in by_rank for finding in found[axis]]) for axis in programs}


def _judge(findings: list[numbers.Finding]) -> Cell:
    worst = max(findings, key=lambda finding: finding.ratio)
    if worst.ratio <= 1.0:
        return Cell("equal", worst=worst.ratio)
    first = next(finding for finding in findings if finding.ratio > 1.0)
    return Cell("differs", f"{first.quantity} {first.name}: {first.error:.1e}, allowed {first.allowed:.1e}")


def _split_share(captured: Capture, sharding: Sharding | None) -> float | None:
    if sharding is None:
        return None
    read = {str(node.target) for node in captured.graph_module.graph.nodes if node.op == "get_attr"}
    named = captured.graph_module.named_parameters()
    weights = {name: p.numel() for name, p in named if p.requires_grad and name in read}
    divided = sum(count for name, count in weights.items() if isinstance(sharding.parameters.get(name), Shard))
    return divided / max(1, sum(weights.values()))


def _sampled(batch: Any, step: int) -> Any:
    """The entry's batch in float64, its samples turned on by ``step``."""
    changed = {
        path: (tensor.double() if tensor.is_floating_point() else tensor).roll(step, 0)
        for path, tensor in tensors(batch).items()
    }
    return replace_leaves(batch, changed)


@functools.lru_cache
def _cluster() -> Cluster:
    return Cluster.parse("8xA100-80GB")
