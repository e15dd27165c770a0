"""A plan on one screen of 80 columns: the decision, the prediction, its axes and its stages."""

from __future__ import annotations

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoplan.cli.console import table
from autoplan.explain.reasons import compromise
from autoplan.explain.text import count, percent, seconds, size
from autoplan.plan import Plan, Stage

NEGLIGIBLE = 1e-3  # of the step: terms below are left out of the line


def summary(plan: Plan) -> tuple[RenderableType, ...]:
    """Renderables in the order of reading."""
    parts: list[RenderableType] = [_facts(plan)]
    if plan.axes:
        parts += [Text(), _indented(_axes(plan))]
    parts += [Text(), _indented(_stages(plan))]
    if plan.assumptions:
        parts += [Text(), _assumptions(plan)]
    return tuple(parts)


def _facts(plan: Plan) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, lines in _fact_lines(plan).items():
        facts.add_row(name, "\n".join(lines))
    return facts


def _fact_lines(plan: Plan) -> dict[str, list[str]]:
    strategy, predicted, proof = plan.strategy, plan.predicted, plan.certificate
    fullest = max(plan.stages, key=lambda stage: stage.peak_memory_bytes)
    used = "" if plan.gpus_used == plan.gpus else f"; the plan uses {plan.gpus_used} of {plan.gpus} GPUs"
    terms = {name: value for name, value in predicted.time_terms.items() if value > NEGLIGIBLE * predicted.step_time_s}
    return {
        "Model": [
            f"{plan.model.name}: {count(plan.model.parameters)} parameters, {plan.precision}, "
            f"{plan.model.tokens_per_sample} tokens a sample"
        ],
        "Cluster": [f"{plan.cluster.describe()}, {_memory(plan)} each{used}"],
        "Plan": [
            strategy.describe(),
            _batch(plan),
            plan.case,
        ],
        "Step": [
            f"{seconds(predicted.step_time_s)}, {count(predicted.tokens_per_s)} tokens/s, "
            f"{predicted.model_tflops_per_gpu:.1f} TFLOP/s a GPU, MFU {percent(predicted.mfu)}",
            ", ".join(f"{name.replace('_', ' ')} {seconds(value)}" for name, value in terms.items()),
        ],
        "Memory": [
            f"{size(predicted.peak_memory_bytes)} at the peak, on the fullest GPU of "
            f"{size(plan.cluster.memory_of(fullest))}",
            *_host(plan),
        ],
        "Proof": [
            f"{_status(plan)}: {proof.considered} plans considered, "
            f"{proof.pruned_by_memory} did not fit, {proof.solved} solved",
            *_preferred(plan),
            *_simulated(plan),
        ],
    }


def _status(plan: Plan) -> str:
    """What the search proved, and of what where the simulated step leaves more open."""
    proof = plan.certificate
    two = bool(_simulated(plan)) and proof.gap != proof.simulated_gap
    return f"{proof.status}{' in closed form' if two else ''}, gap {percent(proof.gap)}"


def _preferred(plan: Plan) -> list[str]:
    """What the plan takes more than the fastest that the proof is of, by the rules of what is preferred."""
    return [said] if (said := compromise(plan)) else []


def _simulated(plan: Plan) -> list[str]:
    """What the proof, which is of the closed form, leaves open of the simulated step."""
    proof = plan.certificate
    if not proof.confirmed or proof.simulated_gap <= NEGLIGIBLE:
        return []
    if proof.gap == proof.simulated_gap:
        return ["under any schedule no plan is shorter by more than that gap"]
    return [
        f"the simulated step, shown above, is another figure: it is proven that no plan's is more than "
        f"{percent(proof.simulated_gap)} shorter"
    ]


def _host(plan: Plan) -> list[str]:
    """What loading takes of a node's own memory."""
    if not plan.predicted.host_load_bytes:
        return []
    largest = max((gpus for _, gpus in plan.cluster.machines_used), default=plan.cluster.gpus_per_node)
    processes = min(plan.gpus_used, largest)
    loading = f"its {processes} processes load" if processes > 1 else "the process loads"
    return [f"{size(plan.predicted.host_load_bytes)} of host memory a node while {loading} the model whole"]


def _memory(plan: Plan) -> str:
    sizes = [group.memory_bytes for group in plan.cluster.groups] or [plan.cluster.memory_bytes]
    return " and ".join(dict.fromkeys(size(value) for value in sizes))


def _batch(plan: Plan) -> str:
    strategy = plan.strategy
    parts = "1 micro-batch" if strategy.micro_batches == 1 else f"{strategy.micro_batches} micro-batches"
    schedule = f", {strategy.schedule}" if strategy.pipeline > 1 else ""
    return f"global batch {plan.global_batch}: {parts} of {strategy.micro_batch_size} on each data rank{schedule}"


def _axes(plan: Plan) -> Table:
    axes = table(("axis", False), ("GPUs", True), ("splits", False), ("a step, each GPU", False), ("exposed", True))
    for axis in plan.axes:
        traffic = f"{axis.times_per_step} x {axis.collective.replace('_', '-')}, {size(axis.bytes_per_step)}"
        axes.add_row(axis.name, str(axis.degree), axis.splits, f"{traffic}, {axis.link}", seconds(axis.exposed_s))
    return axes


def _stages(plan: Plan) -> Table:
    stages = table(
        ("stage", True),
        ("GPUs", False),
        ("layers", False),
        ("parameters", True),
        ("forward", True),
        ("backward", True),
        ("peak", True),
        ("recompute", False),
    )
    width = plan.gpus_used // max(plan.strategy.pipeline, 1)
    for index, stage in enumerate(plan.stages):
        rank = index % plan.strategy.pipeline * width
        stages.add_row(
            str(index),
            "\n".join(text for text in (span(rank, rank + width - 1), stage.device) if text),
            span(stage.first_layer, stage.last_layer),
            count(stage.parameters),
            seconds(stage.forward_s),
            seconds(stage.backward_s),
            size(stage.peak_memory_bytes),
            _recompute(stage),
        )
    return stages


def _recompute(stage: Stage) -> str:
    policies = {name: number for name, number in stage.recompute.items() if number and name != "none"}
    return ", ".join(f"{name} {number}" for name, number in policies.items()) or "none"


def _assumptions(plan: Plan) -> Table:
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    for index, text in enumerate(plan.assumptions):
        lines.add_row("" if index else "Assumed", text)
    return lines


def span(first: int, last: int) -> str:
    """``3`` or ``3-7``."""
    return str(first) if first == last else f"{first}-{last}"


def _indented(content: Table) -> Padding:
    return Padding(content, (0, 0, 0, 2))
