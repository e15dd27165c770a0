"""The tables: axes, stages, memory by term, the step by term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.explain.axis_words import members, when
from autoplan.explain.text import bar, count, heading, paragraph, percent, seconds, shorten, size
from autoplan.plan import Axis, Plan, Stage

# Letters of the memory bars: what is left over goes under "x".
_GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("W", "weights", ("weights",)),
    ("G", "gradients", ("gradients",)),
    ("O", "optimizer state and master weights", ("optimizer_state", "master_weights")),
    ("A", "saved activations", ("saved_activations", "received_activations")),
)
_LAYERS, _BAR = 22, 15
# More rows than this and runs of stages that are alike share one.
_MOST_ROWS = 16


def axes(plan: Plan) -> list[str]:
    """What each axis splits, how often it talks, how much and over which link."""
    lines = [heading("What is split")]
    if not plan.axes:
        return [*lines, "Nothing: one GPU holds the whole model and computes the whole batch."]
    for axis in plan.axes:
        named = f"{axis.name} x {axis.degree}"
        for label, text in _axis(plan, axis):
            lines += paragraph(f"{named:<13} {label:<8} {text}", hanging=" " * 23)
            named = ""
    return lines


def _axis(plan: Plan, axis: Axis) -> Iterator[tuple[str, str]]:
    among, step = members(plan, axis), plan.predicted.step_time_s
    others = " and so on" if axis.degree < plan.gpus_used else ""
    yield "splits", axis.splits
    yield "by", axis.collective
    if moments := when(plan, axis):
        yield "when", moments
    yield "over", axis.link + (f", among {among}{others}" if among else "")
    shows = f"{seconds(axis.exposed_s)} ({percent(axis.exposed_s / step)}) of the step shows"
    yield "a step", f"{axis.times_per_step:,} times, {size(axis.bytes_per_step)} from each GPU; {shows}"


@dataclass(frozen=True, slots=True)
class _Row:
    """Stages ``first`` to ``last``, alike."""

    first: int
    last: int
    stage: Stage


def stages(plan: Plan) -> list[str]:
    """One row a stage: layers by name, parameters, time of a micro-batch, memory as a bar."""
    sizes = dict.fromkeys(size(plan.cluster.memory_of(stage)) for stage in plan.stages)
    legend = ", ".join(f"{letter} {name}" for letter, name, _ in _GROUPS)
    lines = [heading("Stages")]
    lines += paragraph(
        f"Memory of {' or '.join(sizes)}: {legend}, x everything else. One mb is a micro-batch's forward and backward, "
        "work a stage's share of the model's FLOPs."
    )
    lines.append(f"{'stage':>7} {'layers':<{_LAYERS}} {'params':>7} {'work':>6} {'one mb':>8}  memory")
    work = sum(stage.flops for stage in plan.stages)
    for row in _rows(plan):
        stage, capacity = row.stage, plan.cluster.memory_of(row.stage)
        label = str(row.first) if row.first == row.last else f"{row.first}-{row.last}"
        lines.append(
            f"{label:>7} {shorten(_layers(plan, row), _LAYERS):<{_LAYERS}} {count(stage.parameters):>7} "
            f"{percent(stage.flops / work) if work else '':>6} "
            f"{seconds(stage.forward_s + stage.backward_s):>8}  {_memory_bar(stage, capacity)} "
            f"{percent(stage.peak_memory_bytes / capacity):>6}"
        )
        if stage.device:
            lines.append(f"{'':>7} on {stage.device}")
        if set(stage.recompute) - {"none"}:
            lines.append(f"{'':>7} recompute: {_recompute(stage)}")
    if plan.strategy.pipeline > 1:
        strategy, bubble = plan.strategy, percent(plan.predicted.bubble_fraction)
        least = percent(plan.predicted.time_terms.get("bubble", 0.0) / plan.predicted.step_time_s)
        number = strategy.micro_batches
        run = "1 micro-batch" if number == 1 else f"{number} micro-batches"
        lines += paragraph(
            f"{run} of {strategy.micro_batch_size} {'runs' if number == 1 else 'run'} through the stages "
            f"({strategy.schedule}); on average a GPU idles {bubble} of the step (the bubble), "
            f"the one with the most to do {least}."
        )
    return lines


def _rows(plan: Plan) -> list[_Row]:
    rows: list[_Row] = []
    merge = len(plan.stages) > _MOST_ROWS
    for index, stage in enumerate(plan.stages):
        if merge and rows and _alike(rows[-1].stage, stage):
            # The fullest of the run stands for it.
            shown = max(rows[-1].stage, stage, key=lambda s: s.peak_memory_bytes)
            rows[-1] = _Row(rows[-1].first, index, shown)
        else:
            rows.append(_Row(index, index, stage))
    return rows


def _alike(one: Stage, other: Stage) -> bool:
    same = (one.parameters, one.recompute, one.device) == (other.parameters, other.recompute, other.device)
    return same and abs(one.forward_s - other.forward_s) <= 1e-6 * one.forward_s


def _layers(plan: Plan, row: _Row) -> str:
    names = plan.model.layers
    first, last = plan.stages[row.first].first_layer, plan.stages[row.last].last_layer
    number = last - first + 1
    if number == 1:
        return _short(names[first])
    if row.first != row.last:
        return f"{row.last - row.first + 1} stages x {number // (row.last - row.first + 1)} layers"
    return _ends(_short(names[first]), _short(names[last]), f" ({number})")


def _ends(first: str, last: str, counted: str) -> str:
    """``layers.0..15 (16)``: the first and the last of some layers, and how many they are."""
    stem, _, number = last.rpartition(".")
    if stem and number.isdigit() and first.rpartition(".")[0] == stem:
        last = number
    room = _LAYERS - len(counted) - 2
    first = shorten(first, max(room // 2, room - len(last)))
    return f"{first}..{shorten(last, room - len(first))}{counted}"


def _short(name: str) -> str:
    """The end of a module path that says which layer it is: ``layers.5`` of ``model.layers.5``."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _recompute(stage: Stage) -> str:
    return ", ".join(f"{number} {policy}" for policy, number in stage.recompute.items())


def _memory_bar(stage: Stage, capacity: float) -> str:
    terms = stage.memory_terms
    known = sum(terms.get(name, 0.0) for _, _, names in _GROUPS for name in names)
    shares = [(letter, sum(terms.get(name, 0.0) for name in names)) for letter, _, names in _GROUPS]
    shares.append(("x", stage.peak_memory_bytes - known))
    text, reached = "", 0.0
    for letter, value in shares:
        reached += value
        text += letter * max(0, round(reached / capacity * _BAR) - len(text))
    return f"[{text[:_BAR]:.<{_BAR}}]"


def memory(plan: Plan) -> list[str]:
    """Memory by term of the fullest stage."""
    index = max(range(len(plan.stages)), key=lambda s: plan.stages[s].peak_memory_bytes)
    stage, capacity = plan.stages[index], plan.cluster.memory_of(plan.stages[index])
    where = f"stage {index}" if len(plan.stages) > 1 else "each GPU"
    lines = [heading(f"Memory of {where}: {size(stage.peak_memory_bytes)} of {size(capacity)}")]
    for name, value in sorted(stage.memory_terms.items(), key=lambda term: -term[1]):
        lines.append(f"  {name.replace('_', ' '):<24} {size(value):>10}  {bar(value / capacity, 40)}")
    return lines


def step(plan: Plan) -> list[str]:
    """The step by term, on the stage with the longest period."""
    predicted = plan.predicted
    lines = [heading(f"One step: {seconds(predicted.step_time_s)}")]
    for name, value in predicted.time_terms.items():
        if value > 0:
            share = value / predicted.step_time_s
            lines.append(f"  {name.replace('_', ' '):<24} {seconds(value):>10}  {bar(share, 32)} {percent(share):>6}")
    compute = sum(predicted.time_terms.get(name, 0.0) for name in ("forward", "backward", "recompute"))
    if predicted.exposed_communication_s > 0:
        lines += paragraph(
            f"Computation takes {compute / predicted.exposed_communication_s:.1f} times as long as the communication "
            f"that nothing hides. {_one_micro_batch(plan, compute)}".strip()
        )
    return lines


def _one_micro_batch(plan: Plan, compute_s: float) -> str:
    """What a micro-batch computes against what it sends, and why it has its size; synchronisation, which comes once a
    step, left out."""
    terms, strategy = plan.predicted.time_terms, plan.strategy
    number = strategy.micro_batches
    waited_s = sum(terms.get(name, 0.0) for name in ("tensor_communication", "sharded_state")) / number
    sent_s = waited_s + _sends_s(plan)
    if sent_s <= 0:
        return ""
    ratio = compute_s / number / sent_s
    verdict = "its computation covers that" if ratio >= 1 else "its communication is the longer"
    return (
        f"A micro-batch of {strategy.micro_batch_size} computes for {seconds(compute_s / number)} and communicates for "
        f"{seconds(sent_s)}, a ratio of {ratio:.1f}: {verdict}. {_why_this_size(plan)}"
    )


def _sends_s(plan: Plan) -> float:
    """Seconds that the GPU with the longest period sends in a micro-batch: activations on, their gradients back."""
    longest = max(range(len(plan.stages)), key=lambda s: plan.stages[s].forward_s + plan.stages[s].backward_s)
    width = plan.strategy.pipeline
    held = [s for s in range(len(plan.stages)) if s % width == longest % width]
    return sum(plan.stages[s].send_s + (plan.stages[s - 1].send_s if s else 0.0) for s in held)


def _why_this_size(plan: Plan) -> str:
    strategy = plan.strategy
    if str(plan.forced.get("micro_batch_size", "")).isdigit():  # a range leaves it open
        return "Its size was asked for."
    if strategy.micro_batches == 1:
        return "It is all that its rank has of the batch."
    fewer = "A larger one sends less often and leaves fewer to fill the stages: of" if strategy.pipeline > 1 else "Of"
    return f"{fewer} all sizes that fit at these degrees it takes the least time."
