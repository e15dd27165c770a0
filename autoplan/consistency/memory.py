"""Memory: sums of terms, what fits, and the states of a stage's parameters.

With P parameters on a GPU, T of which train, n ranks that share state and the bytes of the precision's recipe (w, g, m,
o), ZeRO stage z (Rajbhandari et al. 2020, figure 1) leaves

    weights                            w P / (n if z >= 3)
    gradients                          g T / (n if z >= 2)
    master weights, optimizer state    (m, o) T / (n if z >= 1)

Of an expert there are n / expert copies only: of what is shared a rank keeps between 1 / n and expert / n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan.consistency.problems import EXACT, Problem, close
from autoplan.cost_models.recipes import recipe
from autoplan.errors import StrategyError

if TYPE_CHECKING:
    from autoplan.plan import Plan, Stage

# A device launches a kernel in microseconds.
_MOST_START_S = 1e-3
_TERMS = (
    *("weights", "gradients", "master_weights", "optimizer_state", "saved_activations", "received_activations"),
    *("recompute_window", "passing_activations", "gradient_window", "gather_window", "weight_gradient_inputs"),
    *("optimizer_temporary", "communication_buffers", "workspace", "context", "allocator_reserve"),
)


def memory(plan: Plan) -> Iterator[Problem]:
    """Terms sum to peaks, and peaks fit."""
    for index, stage in enumerate(plan.stages):
        terms = sum(stage.memory_terms.values())
        if not close(terms, stage.peak_memory_bytes):
            yield f"stages.{index}.peak_memory_bytes", f"{stage.peak_memory_bytes}, but its terms sum to {terms}"
        if stage.peak_memory_bytes > (most := plan.cluster.memory_of(stage)) * (1 + EXACT):
            yield f"stages.{index}.peak_memory_bytes", f"{stage.peak_memory_bytes}, more than the GPU's {most}"
    peak = max(stage.peak_memory_bytes for stage in plan.stages)
    if not close(peak, plan.predicted.peak_memory_bytes):
        yield "predicted.peak_memory_bytes", f"{plan.predicted.peak_memory_bytes}, but the fullest stage's is {peak}"


def states(plan: Plan) -> Iterator[Problem]:
    """What parameters, precision, optimizer and ZeRO stage leave on a GPU."""
    try:
        found = recipe(plan.precision, plan.optimizer)
    except StrategyError as error:
        field, value = ("optimizer", plan.optimizer) if "optimizer" in error.what else ("precision", plan.precision)
        yield field, f"{value!r} is not one of {error.legal}"
        return
    yield from _dtype(plan)
    bytes_of = {name: getattr(found, name) for name in ("weights", "gradients", "master_weights", "optimizer_state")}
    for index, stage in enumerate(plan.stages):
        for name in stage.memory_terms:
            if name not in _TERMS:
                yield f"stages.{index}.memory_terms.{name}", f"is no term of a GPU's memory: {', '.join(_TERMS)}"
        for name, problem in _States(plan, index, stage, bytes_of).problems():
            yield f"stages.{index}.{name}", problem
        yield from _temporary(plan, index, stage, bytes_of, found.step_temporary)
    yield from _parameters(plan)
    yield from _trainable(plan, bytes_of)


# What a model is traced in for a precision: eight and four bit products train from bf16 weights.
_TRACED = {"fp8": "bf16", "mxfp8": "bf16", "nvfp4": "bf16"}


def _dtype(plan: Plan) -> Iterator[Problem]:
    short = plan.precision.lower().split("-")[0]
    if plan.model.dtype != (traced := _TRACED.get(short, short)):
        yield "model.dtype", f"{plan.model.dtype!r}, but for precision {plan.precision} the model is in {traced}"


@dataclass(frozen=True, slots=True)
class _States:
    """The states of one stage's GPU; under virtual stages it holds those of all the stages of its rank."""

    plan: Plan
    index: int
    stage: Stage
    bytes_of: dict[str, float]

    @property
    def parameters(self) -> int:
        ranks = self.plan.strategy.pipeline
        return sum(stage.parameters for stage in self.plan.stages[self.index % ranks :: ranks])

    @property
    def sharers(self) -> int:
        return self.plan.strategy.data * self.plan.strategy.context

    def elements(self, name: str) -> float | None:
        """Elements that a GPU keeps of a state; None where the recipe keeps none of it."""
        bytes_, term = self.bytes_of[name], self.stage.memory_terms.get(name, 0.0)
        return term / bytes_ if bytes_ else None

    def problems(self) -> Iterator[Problem]:
        strategy, experts = self.plan.strategy, self.plan.strategy.expert > 1
        for name, bytes_ in self.bytes_of.items():
            if not bytes_ and self.stage.memory_terms.get(name):
                yield f"memory_terms.{name}", f"but {self.plan.precision} with {self.plan.optimizer} keeps none"
        weights, gradients = self.elements("weights"), self.elements("gradients")
        assert weights is not None and gradients is not None  # every precision has both
        total = float(self.parameters) if experts and strategy.zero_stage >= 3 else weights * self._shards(3)
        tied = strategy.virtual_stages > 1  # tied parameters count once on a GPU that holds several stages
        if not (close(total, self.parameters) or (tied and total < self.parameters)):
            yield (
                "parameters",
                f"{self.stage.parameters}, but the stage's weights are those of {total:.0f} in "
                f"{self.plan.precision} under ZeRO {strategy.zero_stage}",
            )
        trained = gradients * self._shards(2)
        model = self.plan.model
        whole = model.trainable_parameters == model.parameters
        if trained > total * (1 + EXACT) or (whole and not close(trained, total)):
            yield (
                "memory_terms.gradients",
                f"{self.stage.memory_terms.get('gradients', 0.0)}, but of {total:.0f} parameters in "
                f"{self.plan.precision} under ZeRO {strategy.zero_stage} it must be "
                f"{self.bytes_of['gradients'] * total / self._shards(2)}",
            )
        for name in ("master_weights", "optimizer_state"):
            kept = self.elements(name)
            if kept is None:
                continue
            least = trained / self._shards(1)
            most = least * strategy.expert if strategy.zero_stage else least
            if not least * (1 - EXACT) <= kept <= most * (1 + EXACT):
                yield (
                    f"memory_terms.{name}",
                    f"{self.stage.memory_terms.get(name, 0.0)}, but of {trained:.0f} trainable parameters with "
                    f"{self.plan.optimizer} under ZeRO {strategy.zero_stage} it must be {self.bytes_of[name] * least}",
                )

    def _shards(self, from_stage: int) -> int:
        """Ranks that share a state which ZeRO divides from a stage on."""
        return self.sharers if self.plan.strategy.zero_stage >= from_stage else 1


def _temporary(plan: Plan, index: int, stage: Stage, bytes_of: dict[str, float], temporary: float) -> Iterator[Problem]:
    """Where the optimizer's step is the peak, its temporaries are those of the elements that it works on."""
    found = stage.memory_terms.get("optimizer_temporary", 0.0)
    gradients = stage.memory_terms.get("gradients", 0.0) / bytes_of["gradients"]
    shared = plan.strategy.data * plan.strategy.context if plan.strategy.zero_stage == 1 else 1
    expected = gradients / shared * temporary
    if found and plan.strategy.expert == 1 and not close(found, expected):
        yield (
            f"stages.{index}.memory_terms.optimizer_temporary",
            f"{found}, but a step of {plan.optimizer} in {plan.precision} takes {expected}",
        )


def _parameters(plan: Plan) -> Iterator[Problem]:
    """Stages hold the model: nothing less, more where parameters are tied or whole on every tensor rank."""
    strategy, model = plan.strategy, plan.model
    held = sum(stage.parameters for stage in plan.stages) * strategy.tensor * strategy.expert
    alone = len(plan.stages) == 1 and strategy.tensor == strategy.expert == 1
    if held < model.parameters or (alone and held != model.parameters):
        yield "model.parameters", f"{model.parameters}, but the stages hold {held}"
    most = max(stage.parameters for stage in plan.stages)
    if most > model.parameters:
        yield "model.parameters", f"{model.parameters}, but a stage holds {most}"
    yield from _optimizer(plan)


def _trainable(plan: Plan, bytes_of: dict[str, float]) -> Iterator[Problem]:
    """Gradients are those of the parameters that train."""
    strategy, model = plan.strategy, plan.model
    shards = strategy.data * strategy.context if strategy.zero_stage >= 2 else 1
    ranks = plan.stages[: strategy.pipeline]  # under virtual stages the others say the same again
    trained = shards * sum(stage.memory_terms.get("gradients", 0.0) for stage in ranks) / bytes_of["gradients"]
    weights = strategy.data * strategy.context if strategy.zero_stage >= 3 else 1
    held = weights * sum(stage.memory_terms.get("weights", 0.0) for stage in ranks) / bytes_of["weights"]
    if strategy.expert > 1 or model.trainable_parameters == model.parameters:
        return
    if close(trained, held):
        yield (
            "model.trainable_parameters",
            f"{model.trainable_parameters}, but every parameter that stages hold has a gradient, so all "
            f"{model.parameters} train",
        )
    elif (
        strategy.tensor == 1 and close(held, model.parameters) and not close(trained, model.trainable_parameters)
    ) or (trained * strategy.tensor < model.trainable_parameters * (1 - EXACT)):
        yield "model.trainable_parameters", f"{model.trainable_parameters}, but gradients are those of {trained:.0f}"


def _optimizer(plan: Plan) -> Iterator[Problem]:
    """A step passes over a stage's parameters: its time is in proportion to them, but for what starting it takes."""
    if plan.model.trainable_parameters != plan.model.parameters or plan.strategy.expert > 1:
        return  # how many train, or are dense, is not said by stage
    for device in dict.fromkeys(stage.device for stage in plan.stages):
        rows = sorted((s.parameters, s.optimizer_s, i) for i, s in enumerate(plan.stages) if s.device == device)
        (few, short_s, first), (many, long_s, last) = rows[0], rows[-1]
        slope = (long_s - short_s) / (many - few) if many > few else 0.0
        start_s = short_s - slope * few
        # Where all have as many, the one that differs is as likely the first.
        if (many > few and not -EXACT * long_s <= start_s <= _MOST_START_S) or slope < 0:
            yield (
                f"stages.{last}.parameters",
                f"{many} in {long_s} s, but stage {first}: {few} in {short_s} s",
            )
        for elements, taken_s, index in rows:
            if abs(start_s + slope * elements - taken_s) > EXACT * long_s:
                yield (
                    f"stages.{index}.optimizer_s",
                    f"{taken_s}, but by the steps of other stages {elements} parameters take "
                    f"{start_s + slope * elements}",
                )
