"""What was passed for verification, as a captured model that the plan was made for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.capture import Capture, capture
from autoplan.cluster import Cluster
from autoplan.consistency import not_its_cluster, other_cluster, other_model
from autoplan.errors import ClusterError, ModelError, PlanFileError
from autoplan.layers import LayerGraph, build_layers
from autoplan.models import from_module, resolve, trace_dtype
from autoplan.models.catalog import is_factory
from autoplan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The whole model, as the plan sees it. ``model`` may be on ``meta``."""

    model: nn.Module
    example_inputs: Any
    loss_fn: Callable[..., Any] | None
    capture: Capture
    layers: LayerGraph
    cluster: Cluster


def loaded(plan: Any) -> Plan:
    """The plan, read from its file where ``plan`` is a path. Raises PlanFileError for what is neither."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(Path(plan))
    raise PlanFileError(
        f"the plan is a {type(plan).__name__}, not a Plan",
        where="plan",
        legal="what autoplan.plan() returns, program.plan, or the path of a plan file",
        attempt="autoplan.verify(model, autoplan.plan(model, ...), example_inputs)",
    )


def prepare(model: Any, plan: Plan, example_inputs: Any, loss_fn: Callable[..., Any] | None) -> Whole:
    """Trace the model and check that the plan was made for it, and for its cluster as that is today where it can be
    read. Raises PlanFileError where it was not."""
    cluster = _cluster(plan)
    resolved = _resolve(model, plan, example_inputs, loss_fn)
    dtype = trace_dtype(plan.precision) if _is_cast(resolved.model, plan) else None
    captured = capture(
        resolved.model,
        resolved.example_inputs,
        loss_fn=resolved.loss_fn,
        dtype=dtype,
        device="cpu" if plan.cluster.device == "cpu" else "cuda",
    )
    layers = build_layers(captured)
    if unlike := other_model(plan, layers):
        raise PlanFileError(
            f"the plan was made for {plan.model.name}, and this model is {resolved.name} with another graph: {unlike}",
            attempt="plan again for this model, with the same --seq and --precision",
        )
    return Whole(
        model=resolved.model,
        example_inputs=resolved.example_inputs,
        loss_fn=resolved.loss_fn,
        capture=captured,
        layers=layers,
        cluster=cluster,
    )


def _cluster(plan: Plan) -> Cluster:
    try:
        cluster = Cluster.parse(plan.cluster.spec)
    except ClusterError:  # a cluster file that is not at hand: prices then come from a usual one of that size
        return Cluster.parse(f"{max(1, plan.gpus)}xcpu")
    if unlike := other_cluster(plan, cluster):
        attempt = f"plan again: {plan.cluster.spec} is not what it was when the plan was made"
        raise not_its_cluster(plan, cluster, unlike, attempt=attempt)
    return cluster


def small_source(model: Any, whole: Whole) -> tuple[nn.Module, Any]:
    """A model and inputs with values to make the small one from: a factory is called again, off ``meta``."""
    on_meta = any(parameter.is_meta for parameter in whole.model.parameters())
    if not (on_meta and isinstance(model, str) and is_factory(model)):
        return whole.model, None if on_meta else whole.example_inputs
    from autoplan.models.factory import load_factory

    made = load_factory(model)()
    made, inputs = (*made, None)[:2] if isinstance(made, tuple) else (made, None)
    return made.train(), inputs if inputs is not None else whole.example_inputs


def _resolve(model: Any, plan: Plan, example_inputs: Any, loss_fn: Callable[..., Any] | None) -> Any:
    if isinstance(model, str):
        batch, precision = max(1, plan.global_batch), None if is_factory(model) else plan.precision
        found = resolve(model, precision=precision, batch=batch)
        names = found.example_inputs if isinstance(found.example_inputs, dict) else {}
        if not is_factory(model) and "input_ids" in names:
            found = _at_length(model, plan, precision, batch)
        return found
    if not isinstance(model, nn.Module) and callable(model):
        made = model()
        parts = made if isinstance(made, tuple) else (made,)
        if not 1 <= len(parts) <= 3:
            raise ModelError(f"the factory returned {len(parts)} things", legal="model, example inputs, loss_fn")
        model = parts[0]
        example_inputs = parts[1] if len(parts) > 1 and example_inputs is None else example_inputs
        loss_fn = parts[2] if len(parts) > 2 and loss_fn is None else loss_fn
    sequence = plan.model.tokens_per_sample if example_inputs is None else None
    return from_module(model, example_inputs, loss_fn=loss_fn, sequence=sequence)


def _at_length(model: str, plan: Plan, precision: str | None, batch: int) -> Any:
    """A named model with the plan's sequences; one that cannot take them is not the plan's."""
    try:
        return resolve(model, sequence=plan.model.tokens_per_sample, precision=precision, batch=batch)
    except ModelError as error:
        raise PlanFileError(
            f"the plan was made for {plan.model.name}, and this model is {model}: {error.what}",
            attempt="the model that the plan was made for, or plan again for this one",
        ) from None


def _is_cast(model: nn.Module, plan: Plan) -> bool:
    """Whether the plan was made for the model in another precision than its parameters have."""
    names = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    try:
        wanted = names.get(plan.precision) or trace_dtype(plan.precision)
    except ModelError:
        return False
    return plan.precision != "fp64" and own != {wanted}
