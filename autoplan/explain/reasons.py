"""The sentences: the decision, what lost and why, the proof, what was assumed."""

from __future__ import annotations

from autoplan.explain.text import count, heading, paragraph, percent, seconds, size
from autoplan.plan import Alternative, Crossing, OtherAnswer, Plan

# How the best candidate's split was proven, by the certificate's ``solver``.
_AS_FAST = 0.02  # of the step: nearer than that, less parallelism wins
_PROOFS = {
    "enumeration": "(it has one stage: nothing to split)",
    "bound": "(its stages meet their own lower bound)",
    "dynamic program": "(proven by the exact dynamic program)",
    "even stages": "(that of one split, the most even)",
}


def decision(plan: Plan) -> list[str]:
    """The decision in a paragraph that anyone can follow."""
    strategy, predicted, cluster = plan.strategy, plan.predicted, plan.cluster
    machines = cluster.describe(" nodes x ")
    used = f"{plan.gpus_used} of {plan.gpus} GPUs" if plan.gpus > 1 else "the only GPU"
    lines = [heading(f"{plan.model.name} on {cluster.spec}")]
    lines += paragraph(f"The plan is {strategy.describe()}, on {used} ({machines}). {plan.case}")
    lines += paragraph(
        f"The model has {count(plan.model.parameters)} parameters and trains in {plan.precision} with "
        f"{plan.optimizer}. A step of {plan.global_batch} samples takes {seconds(predicted.step_time_s)}: "
        f"{count(predicted.tokens_per_s)} tokens/s, {predicted.model_tflops_per_gpu:.1f} TFLOP/s a GPU "
        f"({percent(predicted.mfu)} of its peak). {_batch(plan)}"
    )
    return lines


def _batch(plan: Plan) -> str:
    strategy = plan.strategy
    pieces = f"{strategy.micro_batches} micro-batches of {strategy.micro_batch_size}"
    if strategy.micro_batches == 1:
        pieces = f"one micro-batch of {strategy.micro_batch_size}"
    holder = f"Each of {strategy.data} data ranks" if strategy.data > 1 else "The program"
    return f"{holder} runs its part of the batch as {pieces}."


def alternatives(plan: Plan) -> list[str]:
    """Why not less or more: the best of every family that lost."""
    if not plan.alternatives:
        return []
    lines = [heading("Why not less, and why not more")]
    for other in plan.alternatives:
        name = other.strategy.describe()
        beside = name if name != other.family and len(name) <= 35 else ""
        lines.append(f"  {other.family:<25} {_outcome(other):>16}  {beside}".rstrip())
        named = other.why_not if beside or name == other.family else f"{name}: {other.why_not}"
        lines += paragraph(named, indent=" " * 6)
    return lines


def _outcome(other: Alternative) -> str:
    return f"{size(other.short_by_bytes)} short" if other.step_time_s is None else seconds(other.step_time_s)


def other_answers(plan: Plan) -> list[str]:
    """What the decision would be on other machines, where that was asked; else what the search found on its way."""
    lines = [heading("What would change the decision")]
    for text in changes(plan):
        lines += paragraph(f"- {text}", hanging="  ")
    if not plan.other_answers:
        lines += paragraph("`autoplan explain PLAN.json --what-if` searches again, with other memory and other links.")
    return lines


def changes(plan: Plan) -> list[str]:
    """The same as sentences."""
    said = [f"with {other.condition}: {_other_answer(plan, other)}" for other in plan.other_answers]
    return said or [*_would_fit(plan), _spare(plan), *(_crossing(crossing) for crossing in plan.crossings)]


def _would_fit(plan: Plan) -> list[str]:
    """What more memory would let fit with fewer kinds of parallelism than the plan has."""
    fits: dict[str, str] = {}
    for other in plan.alternatives:
        if other.step_time_s is None and len(other.strategy.axes) < len(plan.strategy.axes):
            fits[size(other.short_by_bytes)] = other.strategy.describe()
    return [f"with {more} more on each GPU {what} would fit" for more, what in fits.items()]


def _spare(plan: Plan) -> str:
    """How much less memory the plan itself would do with."""
    least = min(plan.cluster.memory_of(stage) - stage.peak_memory_bytes for stage in plan.stages)
    return f"with more than {size(max(0.0, least))} less on each GPU the plan would not fit as it is"


def _crossing(crossing: Crossing) -> str:
    where = "between nodes" if crossing.quantity == "inter_bytes_per_s" else "inside a node"
    if crossing.strategy is None or crossing.step_time_s is None:
        times = f"{crossing.factor:g}"
        return f"with links {where} {times} times as fast, or 1/{times} as fast: none of the above beats it"
    return (
        f"with about {crossing.value / 1e9:.3g} GB/s a GPU {where} ({crossing.factor:.2g} times what it is): "
        f"{crossing.strategy.describe()}, {seconds(crossing.step_time_s)} a step"
    )


def _other_answer(plan: Plan, other: OtherAnswer) -> str:
    if other.strategy is None or other.step_time_s is None:
        return "nothing fits"
    change = other.step_time_s / plan.predicted.step_time_s - 1
    pace = f"{percent(abs(change))} {'slower' if change > 0 else 'faster'}"
    if abs(change) <= _AS_FAST:
        pace = f"which counts as equal (within {_AS_FAST:.0%})" if change > 0 else "as fast"
    decided = other.strategy.describe()
    decided = "the same decision" if decided == plan.strategy.describe() else decided
    return f"{decided}, {seconds(other.step_time_s)} a step, {pace}"


def proof(plan: Plan) -> list[str]:
    """What was proven, by whom, over how many candidates."""
    proven = plan.certificate
    lines = [heading("Proof")]
    listed = (
        f"{proven.considered:,} combinations of degrees, ZeRO stage, micro-batch size and schedule were considered: "
        f"{proven.pruned_by_memory:,} can't fit, {proven.pruned_by_bound:,} can't be fast enough by their lower bound, "
        f"{proven.solved:,} were solved."
    )
    if proven.status == "optimal":
        how = _PROOFS.get(proven.solver, f"(proven by {proven.solver})")
        objective_s = proven.objective_bound_s or proven.lower_bound_s
        form = "the longest stage for every micro-batch but one, all stages once, the end of the step"
        verdict = f"In closed form ({form}) no candidate takes less than {seconds(objective_s)} {how}."
        if proven.solver == "even stages":
            verdict = (
                f"No candidate takes less than {seconds(objective_s)}: under 1F1B in closed form ({form}), under "
                f"interleaved and zero-bubble schedules in the simulator, each with its most even stages."
            )
    else:
        verdict = (
            f"Not proven: some candidate might take {seconds(proven.objective_bound_s or proven.lower_bound_s)}, "
            f"{percent(proven.gap)} less than the best that was found."
        )
    sentences = (listed, verdict, _compromise(plan), _simulated(plan))
    lines += paragraph(" ".join(sentence for sentence in sentences if sentence))
    return lines


def _compromise(plan: Plan) -> str:
    proven = plan.certificate
    if not proven.best_s or proven.objective_s <= proven.best_s * (1 + 1e-9):
        return ""
    more = proven.objective_s / proven.best_s - 1
    why = "within 2% of the shortest simulated step, less parallelism wins"
    if plan.strategy.data > 1 and not plan.strategy.zero_stage and more > 0.02:
        why = "state that fits whole on every rank is sharded only where that gains more than 10%"
    return f"The plan takes {percent(more)} more than that: {why}."


def _simulated(plan: Plan) -> str:
    proven = plan.certificate
    if not proven.confirmed:
        return ""
    nearest = f"the {proven.confirmed} nearest" if proven.confirmed > 1 else "the nearest"
    timed = f"The schedule simulator, which gives the step time above, timed {nearest}"
    if proven.simulated_gap <= 1e-9:
        return f"{timed}: no candidate's step is shorter than the plan's."
    optimal = ', so that "optimal" is said of the closed form' if proven.status == "optimal" else ""
    return (
        f"{timed}: it is proven that no candidate's step is shorter than {seconds(proven.lower_bound_s)}, "
        f"{percent(proven.simulated_gap)} less than the plan's, and no more than that{optimal}."
    )


def assumptions(plan: Plan) -> list[str]:
    """What was filled in for the user."""
    if not plan.assumptions:
        return []
    lines = [heading("Assumptions")]
    for text in plan.assumptions:
        lines += paragraph(f"- {text}", hanging="  ")
    return lines
