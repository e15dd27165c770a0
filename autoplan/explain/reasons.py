"""The sentences: the decision, what lost and why, the proof, what was assumed."""

from __future__ import annotations

from autoplan.explain.changes import AS_FAST, SHARDING_GAIN
from autoplan.explain.text import count, heading, paragraph, percent, seconds, size
from autoplan.plan import Alternative, Plan

# How the best candidate's split was proven, by the certificate's ``solver``.
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


def proof(plan: Plan) -> list[str]:
    """What was proven, by whom, over how many candidates."""
    lines = [heading("Proof")]
    sentences = (_considered(plan), _verdict(plan), compromise(plan), _simulated(plan))
    return lines + paragraph(" ".join(sentence for sentence in sentences if sentence))


def _considered(plan: Plan) -> str:
    proven = plan.certificate
    return (
        f"{proven.considered:,} combinations of degrees, ZeRO stage, micro-batch size and schedule were considered: "
        f"{proven.pruned_by_memory:,} can't fit, {proven.pruned_by_bound:,} can't be fast enough by their lower bound, "
        f"{proven.solved:,} were solved."
    )


def _verdict(plan: Plan) -> str:
    proven = plan.certificate
    objective_s = proven.objective_bound_s or proven.lower_bound_s
    if proven.status != "optimal":
        return (
            f"Not proven: some candidate might take {seconds(objective_s)}, {percent(proven.gap)} less than the best "
            f"that was found."
        )
    form = "the longest stage for every micro-batch but one, all stages once, the end of the step"
    if proven.solver == "even stages":
        return (
            f"No candidate takes less than {seconds(objective_s)}: under 1F1B in closed form ({form}), under "
            f"interleaved and zero-bubble schedules in the simulator, each with its most even stages."
        )
    how = _PROOFS.get(proven.solver, f"(proven by {proven.solver})")
    return f"In closed form ({form}) no candidate takes less than {seconds(objective_s)} {how}."


def compromise(plan: Plan) -> str:
    """What the plan gives up of the shortest step, on purpose, and for what; "" where that is nothing."""
    proven = plan.certificate
    if not proven.best_s or proven.objective_s <= proven.best_s * (1 + 1e-9):
        return ""
    more = percent(proven.objective_s / proven.best_s - 1)
    if not _is_whole(plan) or proven.objective_s <= proven.best_s * (1 + AS_FAST):
        why = f"within {AS_FAST:.0%} the least parallel plan is preferred, and this is it"
    else:
        why = f"state that fits whole on every rank is sharded only where that gains more than {SHARDING_GAIN:.0%}"
    return f"The plan takes {more} more than the fastest candidate, by rule and not for want of proof: {why}."


def _is_whole(plan: Plan) -> bool:
    """Whether the plan keeps state whole that it might have sharded."""
    return plan.strategy.data > 1 and not plan.strategy.zero_stage


def _simulated(plan: Plan) -> str:
    proven = plan.certificate
    if not proven.confirmed:
        return ""
    nearest = f"the {proven.confirmed} nearest" if proven.confirmed > 1 else "the nearest"
    timed = f"The schedule simulator, which gives the step time above, timed {nearest}"
    if proven.simulated_gap <= 1e-9:
        return f"{timed}: no candidate's step is shorter than the plan's."
    optimal = "That is proven of the closed form alone. " if proven.status == "optimal" else ""
    return (
        f"{optimal}{timed}; of it a weaker bound is proven: no candidate's step is shorter than "
        f"{seconds(proven.lower_bound_s)}, {percent(proven.simulated_gap)} less than the plan's. Whether one lies "
        "between is open."
    )


def assumptions(plan: Plan) -> list[str]:
    """What was filled in for the user."""
    if not plan.assumptions:
        return []
    lines = [heading("Assumptions")]
    for text in plan.assumptions:
        lines += paragraph(f"- {text}", hanging="  ")
    return lines
