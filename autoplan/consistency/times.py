"""Times: the step from the stages' own times, and every figure that follows from it.

With M micro-batches, p ranks and the stages' forward F, backward B and tail (synchronise and optimizer):

    step      the schedule simulator's, of F, B, sends and tails
    busy      sum over stages of M (F + B) + tail
    bubble    1 - busy / (p step)
    terms     of the rank with the longest period; what its work leaves of the step is sends, 2 sum(send) at most, and
              then bubble
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoplan import schedules
from autoplan.consistency.machines import peak_flops
from autoplan.consistency.problems import EXACT, Problem, close
from autoplan.cost_models import schedule
from autoplan.cost_models.precision import dtype_bytes

if TYPE_CHECKING:
    from autoplan.plan import Plan, Stage

# The names of a step's terms; a stage's own terms have the same.
OF_STAGES = ("forward", "backward", "recompute", "tensor_communication", "sharded_state")
TERMS = (*OF_STAGES, "gradient_synchronisation", "optimizer", "sends", "bubble")
EXPOSED = ("tensor_communication", "sharded_state", "sends", "gradient_synchronisation")
# A fifth of a second of simulation; a plan of 16,384 GPUs has some 30,000. Longer steps are bounded.
_MOST_ACTIONS = 40_000
# A bubble is the small difference of large figures.
_ABSOLUTE = 1e-9


def figures(plan: Plan) -> Iterator[Problem]:
    """Figures that follow from others by their definition, in files of all revisions."""
    predicted, strategy = plan.predicted, plan.strategy
    step_s = predicted.step_time_s
    if step_s <= 0:
        yield "predicted.step_time_s", f"{step_s}"
        return
    terms = sum(predicted.time_terms.values())
    if not close(terms, step_s):
        yield "predicted.step_time_s", f"{step_s}, but its terms sum to {terms}"
    for index, stage in enumerate(plan.stages):
        busy = strategy.micro_batches * (stage.forward_s + stage.backward_s) + stage.synchronise_s + stage.optimizer_s
        if busy > step_s * (1 + EXACT):
            yield "predicted.step_time_s", f"{step_s}, but stage {index} works for {busy}"
        for name in ("forward", "backward"):
            parts, whole = getattr(stage, f"{name}_terms"), getattr(stage, f"{name}_s")
            if parts and not close(sum(parts.values()), whole):
                yield f"stages.{index}.{name}_s", f"{whole}, but its terms sum to {sum(parts.values())}"
    tokens = plan.global_batch * plan.model.tokens_per_sample / step_s
    if not close(tokens, predicted.tokens_per_s):
        yield "predicted.tokens_per_s", f"{predicted.tokens_per_s}, but batch, tokens and step time make {tokens}"
    yield from _flops(plan)
    if (least := plan.certificate.lower_bound_s) > step_s * (1 + EXACT):
        yield "certificate.lower_bound_s", f"{least}, more than the plan's own step of {step_s}"
    for name, limit in (("bubble_fraction", 1.0), ("exposed_communication_s", step_s), ("mfu", 1.0)):
        if getattr(predicted, name) > limit * (1 + EXACT):
            yield f"predicted.{name}", f"{getattr(predicted, name)}, more than {limit}"


def _flops(plan: Plan) -> Iterator[Problem]:
    predicted, strategy = plan.predicted, plan.strategy
    flops = sum(stage.flops for stage in plan.stages) * strategy.micro_batches * strategy.data
    told = predicted.model_tflops_per_gpu * 1e12 * plan.gpus_used * predicted.step_time_s
    peaks = [peak_flops(plan, stage) for stage in plan.stages]
    if (flops or any(peaks)) and not close(flops, told):  # older files hold neither
        yield "predicted.model_tflops_per_gpu", f"makes {told} FLOPs a step, but the stages' make {flops}"
    if all(peaks):
        per_gpu = predicted.model_tflops_per_gpu * 1e12
        mfu = per_gpu * len(peaks) / sum(peaks)
        # Kinds that work alike are priced as the weakest of them, whichever runs a stage.
        weakest = [per_gpu / group.peak_flops for group in plan.cluster.groups if group.peak_flops]
        if not any(close(predicted.mfu, each) for each in (mfu, *weakest)):
            yield "predicted.mfu", f"{predicted.mfu}, but TFLOP/s a GPU and the GPUs' peak make {mfu}"


def step(plan: Plan) -> Iterator[Problem]:
    """The step is that of the stages, and its terms are theirs."""
    yield from _stages(plan)
    yield from _simulated(plan)
    predicted = plan.predicted
    if set(predicted.time_terms) != set(TERMS):
        yield "predicted.time_terms", f"has {', '.join(predicted.time_terms)}; it must have {', '.join(TERMS)}"
        return
    yield from _terms(plan)
    shown = sum(predicted.time_terms[name] for name in EXPOSED)
    if not close(predicted.exposed_communication_s, shown):
        yield (
            "predicted.exposed_communication_s",
            f"{predicted.exposed_communication_s}, but the terms {', '.join(EXPOSED)} sum to {shown}",
        )
    yield from _host(plan)
    if plan.compiled != any(text.startswith("stages run under torch.compile") for text in plan.assumptions):
        yield "compiled", f"{json.dumps(plan.compiled)}, but the plan's assumptions say otherwise"


def _stages(plan: Plan) -> Iterator[Problem]:
    strategy = plan.strategy
    split = strategy.schedule == "zero_bubble"
    for index, stage in enumerate(plan.stages):
        for name in ("forward", "backward"):
            parts, whole = getattr(stage, f"{name}_terms"), getattr(stage, f"{name}_s")
            if unknown := [part for part in parts if part not in OF_STAGES]:
                yield f"stages.{index}.{name}_terms.{unknown[0]}", f"is not one of {', '.join(OF_STAGES)}"
            if not close(sum(parts.values()), whole):
                yield f"stages.{index}.{name}_terms", f"sum to {sum(parts.values())}, but {name}_s is {whole}"
        if len(stage.layer_recompute) != stage.last_layer - stage.first_layer + 1:
            yield f"stages.{index}.layer_recompute", "does not name a policy for each layer"
        again = stage.backward_terms.get("recompute", 0.0) > 0
        if again != bool(set(stage.layer_recompute) - {"none"}) and (again or "full" in stage.layer_recompute):
            yield (
                f"stages.{index}.backward_terms.recompute",
                f"{stage.backward_terms.get('recompute', 0.0)}, but layers recompute: "
                f"{', '.join(sorted(set(stage.layer_recompute)))}",
            )
        if stage.weight_gradients_s > stage.backward_s or bool(stage.weight_gradients_s) > split:
            yield (
                f"stages.{index}.weight_gradients_s",
                f"{stage.weight_gradients_s}, of a backward of {stage.backward_s} under {strategy.schedule}",
            )
        if stage.hidden_s > plan.predicted.step_time_s:
            yield f"stages.{index}.hidden_s", f"{stage.hidden_s}, more than the step of {plan.predicted.step_time_s}"
        if stage.hidden_s and strategy.data * strategy.context == 1:
            yield f"stages.{index}.hidden_s", f"{stage.hidden_s}, but there is no data axis: it must be 0"
    if last := plan.stages[-1].send_s:
        yield f"stages.{len(plan.stages) - 1}.send_s", f"{last}, but no stage follows: it must be 0"


def _simulated(plan: Plan) -> Iterator[Problem]:
    strategy, stages, step_s = plan.strategy, plan.stages, plan.predicted.step_time_s
    tails = [sum(stage.synchronise_s + stage.optimizer_s for stage in own) for own in plan.rank_stages]
    if 2 * len(stages) * strategy.micro_batches <= _MOST_ACTIONS:
        taken_s = schedule.simulate(
            schedules.all_actions(
                strategy.schedule,
                stages=len(stages),
                micro_batches=strategy.micro_batches,
                virtual_stages=strategy.virtual_stages,
            ),
            forward_s=[stage.forward_s for stage in stages],
            backward_s=[stage.backward_s for stage in stages],
            send_s=[stage.send_s for stage in stages[:-1]],
            tail_s=tails,
            weight_s=[stage.weight_gradients_s for stage in stages],
        ).step_s
        if not close(taken_s, step_s):
            yield (
                "predicted.step_time_s",
                f"{step_s}, but the stages under {strategy.schedule}, one action after the other, take {taken_s}",
            )
    busy = sum(strategy.micro_batches * (stage.forward_s + stage.backward_s) for stage in stages) + sum(tails)
    bubble = max(0.0, 1 - busy / (strategy.pipeline * step_s))
    if abs(bubble - plan.predicted.bubble_fraction) > _ABSOLUTE:
        yield (
            "predicted.bubble_fraction",
            f"{plan.predicted.bubble_fraction}, but the stages work for {busy} s of {strategy.pipeline} x {step_s}, "
            f"which leaves {bubble}",
        )


def _terms(plan: Plan) -> Iterator[Problem]:
    ranks = plan.rank_stages
    periods = [sum(stage.forward_s + stage.backward_s for stage in own) for own in ranks]
    # Of ranks that work equally long any may be the one that is shown.
    busiest = [own for own, period in zip(ranks, periods, strict=True) if close(period, max(periods), 1e-12)]
    found = [list(_differing(plan, own)) for own in busiest]
    yield from min(found, key=len)


def _differing(plan: Plan, own: tuple[Stage, ...]) -> Iterator[Problem]:
    micro, step_s = plan.strategy.micro_batches, plan.predicted.step_time_s
    terms = {
        name: micro * sum(s.forward_terms.get(name, 0.0) + s.backward_terms.get(name, 0.0) for s in own)
        for name in OF_STAGES
    }
    terms["gradient_synchronisation"] = sum(stage.synchronise_s for stage in own)
    terms["optimizer"] = sum(stage.optimizer_s for stage in own)
    rest = max(0.0, step_s - sum(terms.values()))
    terms["sends"] = min(rest, 2 * sum(stage.send_s for stage in plan.stages))
    terms["bubble"] = rest - terms["sends"]
    for name, expected in terms.items():
        written = plan.predicted.time_terms[name]
        if abs(written - expected) > EXACT * step_s:
            yield f"predicted.time_terms.{name}", f"{written}, but on the GPU that works longest it is {expected}"


def _host(plan: Plan) -> Iterator[Problem]:
    """What the processes of one node hold while each has the whole model; 0 for a pipeline across kinds of GPUs."""
    groups = plan.cluster.groups
    nodes = {group.gpus_per_node for group in groups if group.gpus_used} or {plan.cluster.gpus_per_node}
    each = plan.model.parameters * dtype_bytes(plan.model.dtype)
    legal = [each * min(plan.gpus_used, node) for node in (*nodes, plan.cluster.gpus_per_node)]
    written = plan.predicted.host_load_bytes
    if not any(close(written, value) for value in (*legal, *((0.0,) if groups else ()))):
        yield (
            "predicted.host_load_bytes",
            f"{written}, but the processes of a node, each with the model's {each}, hold {legal[0]}",
        )
