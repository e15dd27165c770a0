"""The tables: axes, stages, memory by term, the step by term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoplan.explain.axis_words import members, when
from autoplan.explain.text import WIDTH, bar, count, heading, paragraph, percent, seconds, shorten, size, width
from autoplan.plan import Axis, Plan, Stage

# Letters of the memory bars: what is left over goes under "x".
_GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("W", "weights", ("weights",)),
    ("G", "gradients", ("gradients",)),
    ("O", "optimizer state and master weights", ("optimizer_state", "master_weights")),
    ("A", "saved activations", ("saved_activations", "received_activations")),
)
_LAYERS, _BAR = 22, 15  # columns of the two that grow with the terminal, of 80
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
    """Stages ``first`` to ``last``, alike but for their memory: ``stage`` is the fullest, ``least_bytes`` the least."""

    first: int
    last: int
    stage: Stage
    least_bytes: float


def stages(plan: Plan) -> list[str]:
    """One row a stage: layers by name, parameters, time of a micro-batch, memory as a bar."""
    sizes = dict.fromkeys(size(plan.cluster.memory_of(stage)) for stage in plan.stages)
    legend = ", ".join(f"{letter} {name}" for letter, name, _ in _GROUPS)
    lines = [heading("Stages")]
    lines += paragraph(
        f"Memory of {' or '.join(sizes)}: {legend}, x everything else. One mb is a micro-batch's forward and backward, "
        "work a stage's share of the model's FLOPs."
    )
    room = _names_room()
    lines.append(f"{'stage':>7} {'layers':<{room}} {'params':>7} {'work':>6} {'one mb':>8}  memory")
    shares = work_shares(plan)
    for row in _rows(plan):
        stage, capacity = row.stage, plan.cluster.memory_of(row.stage)
        label = str(row.first) if row.first == row.last else f"{row.first}-{row.last}"
        lines.append(
            f"{label:>7} {shorten(_layers(plan, row, room), room):<{room}} {count(stage.parameters):>7} "
            f"{percent(shares[row.first]) if shares[row.first] else '':>6} "
            f"{seconds(stage.forward_s + stage.backward_s):>8}  {_memory_bar(stage, capacity)} "
            f"{percent(stage.peak_memory_bytes / capacity):>6}"
        )
        if size(row.least_bytes) != size(stage.peak_memory_bytes):
            lines.append(
                f"{'':>7} memory from {size(row.least_bytes)} to {size(stage.peak_memory_bytes)} a stage; the bar is "
                "the fullest's"
            )
        if stage.device:
            lines.append(f"{'':>7} on {stage.device}")
        if set(stage.recompute) - {"none"}:
            lines.append(f"{'':>7} recompute: {_recompute(stage)}")
    if plan.strategy.pipeline > 1:
        strategy, number = plan.strategy, plan.strategy.micro_batches
        run = "1 micro-batch" if number == 1 else f"{number} micro-batches"
        lines += paragraph(
            f"{run} of {strategy.micro_batch_size} {'runs' if number == 1 else 'run'} through the stages "
            f"({strategy.schedule}); a GPU waits for others, or for what it sends, for "
            f"{percent(plan.predicted.bubble_fraction)} of the step on average, and for {percent(least_wait(plan))} "
            "where there is the most to do."
        )
    return lines


def least_wait(plan: Plan) -> float:
    """The share of the step that the GPU with the most to do waits; ``bubble_fraction`` is the same of all on
    average."""
    micro, ranks = plan.strategy.micro_batches, plan.strategy.pipeline
    works = [micro * (s.forward_s + s.backward_s) + s.synchronise_s + s.optimizer_s for s in plan.stages]
    return max(0.0, 1 - max(sum(works[rank::ranks]) for rank in range(ranks)) / plan.predicted.step_time_s)


def _spare() -> int:
    """Columns beyond 80."""
    return max(0, width() - WIDTH)


def _names_room() -> int:
    """Columns of layers' names: half of what there is beyond 80 goes to them, the rest to the bars."""
    return _LAYERS + _spare() // 2


def _rows(plan: Plan) -> list[_Row]:
    rows: list[_Row] = []
    merge, shares = len(plan.stages) > _MOST_ROWS, work_shares(plan)
    for index, stage in enumerate(plan.stages):
        if merge and rows and _shown(plan.stages[index - 1], shares[index - 1]) == _shown(stage, shares[index]):
            last = rows[-1]
            # The fullest of the run stands for it, and the row says how full the others are.
            fullest = max(last.stage, stage, key=lambda s: s.peak_memory_bytes)
            rows[-1] = _Row(last.first, index, fullest, min(last.least_bytes, stage.peak_memory_bytes))
        else:
            rows.append(_Row(index, index, stage, stage.peak_memory_bytes))
    return rows


def _shown(stage: Stage, share: float) -> tuple[object, ...]:
    """What a row shows of a stage but for its memory."""
    return (
        stage.last_layer - stage.first_layer,
        count(stage.parameters),
        percent(share),
        seconds(stage.forward_s + stage.backward_s),
        stage.recompute,
        stage.device,
    )


def _layers(plan: Plan, row: _Row, room: int) -> str:
    names = plan.model.layers
    first, last = plan.stages[row.first].first_layer, plan.stages[row.last].last_layer
    number = last - first + 1
    if number == 1:
        return _short(names[first])
    if row.first < row.last:
        each = number // (row.last - row.first + 1)
        return f"{row.last - row.first + 1} stages x {each} {'layer' if each == 1 else 'layers'}"
    return _ends(_short(names[first]), _short(names[last]), f" ({number})", room)


def _ends(first: str, last: str, counted: str, columns: int = _LAYERS) -> str:
    """``layers.0..15 (16)``: the first and the last of some layers, and how many they are, in so many ``columns``."""
    stem, _, number = last.rpartition(".")
    if stem and number.isdigit() and first.rpartition(".")[0] == stem:
        last = number
    room = columns - len(counted) - 2
    first = shorten(first, max(room // 2, room - len(last)))
    return f"{first}..{shorten(last, room - len(first))}{counted}"


def _short(name: str) -> str:
    """The end of a module path that says which layer it is: ``layers.5`` of ``model.layers.5``."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def work_shares(plan: Plan) -> list[float]:
    """Each stage's share of the model's FLOPs; 0 where the plan does not say."""
    work = sum(stage.flops for stage in plan.stages)
    return [stage.flops / work if work else 0.0 for stage in plan.stages]


def layers_of(plan: Plan, stage: Stage) -> str:
    """The first and the last layer of a stage by name."""
    names = plan.model.layers
    return " to ".join(names[i] for i in dict.fromkeys((stage.first_layer, stage.last_layer)))


def _recompute(stage: Stage) -> str:
    return ", ".join(f"{number} {policy}" for policy, number in stage.recompute.items())


def _memory_bar(stage: Stage, capacity: float) -> str:
    terms = stage.memory_terms
    known = sum(terms.get(name, 0.0) for _, _, names in _GROUPS for name in names)
    shares = [(letter, sum(terms.get(name, 0.0) for name in names)) for letter, _, names in _GROUPS]
    shares.append(("x", stage.peak_memory_bytes - known))
    text, reached = "", 0.0
    marks = _BAR + (_spare() + 1) // 2
    for letter, value in shares:
        reached += value
        text += letter * max(0, round(reached / capacity * marks) - len(text))
    return f"[{text[:marks]:.<{marks}}]"


def memory(plan: Plan) -> list[str]:
    """Memory by term of the fullest stage."""
    index = max(range(len(plan.stages)), key=lambda s: plan.stages[s].peak_memory_bytes)
    stage, capacity = plan.stages[index], plan.cluster.memory_of(plan.stages[index])
    where = f"stage {index}" if len(plan.stages) > 1 else "each GPU"
    lines = [heading(f"Memory of {where}: {size(stage.peak_memory_bytes)} of {size(capacity)}")]
    for name, value in sorted(stage.memory_terms.items(), key=lambda term: -term[1]):
        lines.append(f"  {name.replace('_', ' '):<24} {size(value):>10}  {bar(value / capacity, 40 + _spare())}")
    return lines


def step(plan: Plan) -> list[str]:
    """The step by term, on the stage with the longest period."""
    predicted = plan.predicted
    lines = [heading(f"One step: {seconds(predicted.step_time_s)}")]
    for name, value in predicted.time_terms.items():
        if value > 0:
            share = value / predicted.step_time_s
            lines.append(
                f"  {name.replace('_', ' '):<24} {seconds(value):>10}  {bar(share, 32 + _spare())} {percent(share):>6}"
            )
    if predicted.exposed_communication_s > 0:
        times = _computed_s(plan) / predicted.exposed_communication_s
        lines += paragraph(
            f"Computation takes {times:.1f} times as long as the communication that nothing hides. "
            f"{_one_micro_batch(plan)}".strip()
        )
    return lines


def _computed_s(plan: Plan) -> float:
    return sum(plan.predicted.time_terms.get(name, 0.0) for name in ("forward", "backward", "recompute"))


def ratio_of(plan: Plan) -> tuple[float, float, str]:
    """What a micro-batch computes and what it sends, in seconds, and why it has its size; synchronisation, which comes
    once a step, left out."""
    terms, number = plan.predicted.time_terms, plan.strategy.micro_batches
    waited_s = sum(terms.get(name, 0.0) for name in ("tensor_communication", "sharded_state")) / number
    return _computed_s(plan) / number, waited_s + _sends_s(plan), _why_this_size(plan)


def _one_micro_batch(plan: Plan) -> str:
    computes_s, sent_s, why = ratio_of(plan)
    if sent_s <= 0:
        return ""
    ratio = computes_s / sent_s
    verdict = "its computation covers that" if ratio >= 1 else "its communication is the longer"
    return (
        f"A micro-batch of {plan.strategy.micro_batch_size} computes for {seconds(computes_s)} and communicates for "
        f"{seconds(sent_s)}, a ratio of {ratio:.1f}: {verdict}. {why}"
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
