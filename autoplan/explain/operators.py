"""A plan's operators: what each computes and moves on one GPU in one micro-batch, how long, and what limits it.

Deeper than a plan file reaches: the layers come from tracing the model again, under the plan's tensor degree. An
operator is limited by *compute* where its products take longer than moving its bytes, at the device's peaks, else by
*memory*.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoplan.cluster import Device
from autoplan.cost_models.compute import operator_time
from autoplan.cost_models.software import mode
from autoplan.errors import PlanFileError
from autoplan.explain.text import count, heading, paragraph, percent, seconds, shorten, size
from autoplan.layers.types import LayerGraph, LayerKind, Operator
from autoplan.plan import Plan

_MOST_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operator, or ``times`` of them that are alike; seconds and bytes are of all of them, in one micro-batch."""

    name: str
    kind: str
    times: int
    flops: float
    moved_bytes: float
    saved_bytes: float
    forward_s: float
    backward_s: float
    limit: str
    source: str

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """One layer and its operators in order."""

    layer: int
    name: str
    stage: int
    recompute: str
    parameters: int
    input_bytes: float
    collectives: tuple[str, ...]
    rows: tuple[Row, ...]


def operators(plan: Plan, layers: LayerGraph, kinds: Sequence[LayerKind], devices: Sequence[Device]) -> tuple[Row, ...]:
    """Every operator of the model, alike ones as one row, the longest first. ``kinds`` are those under the plan's
    tensor degree, ``devices`` one a stage."""
    found: dict[tuple[str, str, float, float], Row] = {}
    for index, layer in enumerate(layers.layers):
        device = devices[_stage(plan, index)]
        for operator in kinds[layer.kind].operators:
            row = _row(plan, operator, device)
            key = (row.name, row.kind, row.flops, row.total_s)
            found[key] = _sum(found[key], row) if key in found else row
    return tuple(sorted(found.values(), key=lambda row: (-row.total_s, row.name)))


def one_layer(
    plan: Plan, layers: LayerGraph, kinds: Sequence[LayerKind], devices: Sequence[Device], name: str
) -> LayerRows:
    """The layer called ``name``, or whose name ends so; raises :class:`PlanFileError` naming those that are near."""
    index = _find(layers, name)
    layer, stage = layers.layers[index], _stage(plan, index)
    kind, held = kinds[layer.kind], plan.stages[stage]
    samples = plan.strategy.micro_batch_size
    return LayerRows(
        layer=index,
        name=layer.name,
        stage=stage,
        recompute=held.layer_recompute[index - held.first_layer] if held.layer_recompute else "none",
        parameters=kind.parameter_elements,
        input_bytes=kind.input_bytes * samples,
        collectives=tuple(
            f"{c.name.replace('_', '-')} of {size(c.bytes_per_sample * (samples if c.batched else 1))} in the {c.phase}"
            for c in kind.collectives
        ),
        rows=tuple(_row(plan, operator, devices[stage]) for operator in kind.operators if operator.kind != "view"),
    )


def _stage(plan: Plan, layer: int) -> int:
    return next(i for i, stage in enumerate(plan.stages) if stage.first_layer <= layer <= stage.last_layer)


def _find(layers: LayerGraph, name: str) -> int:
    names = [layer.name for layer in layers.layers]
    found = [i for i, full in enumerate(names) if full == name] or [
        i for i, full in enumerate(names) if full.endswith(f".{name}")
    ]
    if len(found) == 1:
        return found[0]
    near = [names[i] for i in found] or _near(name, names) or names[:3]
    raise PlanFileError(
        f"{'several layers are' if found else 'no layer is'} called {name!r}",
        legal=", ".join(near[:3]) + (", ..." if len(names) > 3 else ""),
        attempt=f"--layer {near[0]}",
    )


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Names that hold ``name``, or are spelt like it, or whose ends are."""
    ends = {full.rsplit(".", 1)[-1]: full for full in reversed(names)}
    return (
        [full for full in names if name and name.lower() in full.lower()]
        or difflib.get_close_matches(name, names, n=3)
        or [ends[end] for end in difflib.get_close_matches(name, ends, n=3)]
    )


def _row(plan: Plan, operator: Operator, device: Device) -> Row:
    samples = plan.strategy.micro_batch_size
    scale = samples if operator.batched else 1
    time = operator_time(operator, device, micro_batch=samples, software=mode(compiled=plan.compiled))
    moved = (operator.read_bytes + operator.written_bytes) * scale + operator.parameter_bytes
    flops = operator.flops * scale
    computes_s = flops / device.flops(operator.dtype)
    return Row(
        name=_name(operator),
        kind=operator.kind,
        times=1,
        flops=flops,
        moved_bytes=moved,
        saved_bytes=operator.saved_bytes * scale,
        forward_s=time.forward_s,
        backward_s=time.backward_s,
        limit="compute" if computes_s > moved / device.memory_bytes_per_s else "memory",
        source=operator.source,
    )


def _name(operator: Operator) -> str:
    """The module it is in, without the layer's own path, and what it does there."""
    place = operator.module_path.rsplit(".", 1)[-1]
    what = operator.target.split(".")[-2 if operator.target.count(".") > 1 else -1]
    return f"{place}: {what}" if place and not place.isdigit() else what


def _place(source: str) -> str:
    """The file without where packages are installed, or this folder is."""
    packaged = source.rpartition("/site-packages/")[2]
    return packaged.removeprefix(f"{os.getcwd()}/")


def _sum(one: Row, other: Row) -> Row:
    return Row(
        name=one.name,
        kind=one.kind,
        times=one.times + other.times,
        flops=one.flops + other.flops,
        moved_bytes=one.moved_bytes + other.moved_bytes,
        saved_bytes=one.saved_bytes + other.saved_bytes,
        forward_s=one.forward_s + other.forward_s,
        backward_s=one.backward_s + other.backward_s,
        limit=one.limit,
        source=one.source,
    )


def operators_text(plan: Plan, rows: tuple[Row, ...]) -> str:
    """The operators as a table of 80 columns."""
    whole = sum(row.total_s for row in rows)
    lines = [heading("Operators, in one micro-batch")]
    lines += paragraph(
        f"All layers, each on its GPU under {plan.strategy.describe()}; forward and backward without collectives, "
        f"sends and recompute: {seconds(whole)}."
    )
    lines += list(_table(rows[:_MOST_ROWS], whole))
    if len(rows) > _MOST_ROWS:
        rest = sum(row.total_s for row in rows[_MOST_ROWS:])
        name = f"and {len(rows) - _MOST_ROWS} more kinds"
        lines.append(f"{name:<44} {'':>9} {'':>9} {percent(rest / whole if whole else 0):>6}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def layer_text(plan: Plan, found: LayerRows) -> str:
    """The layer as text of 80 columns."""
    held = plan.stages[found.stage]
    lines = [heading(f"{found.name}, layer {found.layer}")]
    lines += paragraph(
        f"Stage {found.stage} (layers {held.first_layer} to {held.last_layer}), recompute {found.recompute}. On one "
        f"GPU: {count(found.parameters)} parameters, {size(found.input_bytes)} enter in a micro-batch of "
        f"{plan.strategy.micro_batch_size}, {size(sum(row.saved_bytes for row in found.rows))} are saved for the "
        "backward."
    )
    whole = sum(row.total_s for row in found.rows)
    lines += list(_table(found.rows, whole))
    lines += paragraph(f"Operators take {seconds(whole)}; views, which cost nothing, are left out.")
    if found.collectives:
        lines += paragraph(f"Between its ranks: {'; '.join(found.collectives)}.")
    source = next((row.source for row in reversed(found.rows) if row.source), "")
    if source:
        lines.append(f"From {shorten(_place(source), 74)}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _table(rows: Sequence[Row], whole: float) -> Iterator[str]:
    yield f"{'operator':<32} {'times':>5} {'FLOP':>7} {'forward':>8} {'backward':>8} {'share':>6}  limit"
    for row in rows:
        yield (
            f"{shorten(row.name, 32):<32} {row.times:>5} {count(row.flops) if row.flops else '-':>7} "
            f"{seconds(row.forward_s):>8} {seconds(row.backward_s) if row.backward_s else '-':>8} "
            f"{percent(row.total_s / whole if whole else 0):>6}  {row.limit}"
        )
