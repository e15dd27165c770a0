"""The whole walk on a page: capture -> layers -> search -> passes -> runtime.

``plan`` and ``predict`` need no GPU and no process group; ``compile`` gives the calling rank its part of a program.
Under a process group rank 0 plans and the others receive its answer, so that all ranks follow one plan.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autoplan import progress
from autoplan.cluster import Cluster
from autoplan.consistency import not_its_cluster, other_cluster, other_count, other_model
from autoplan.errors import ClusterError, ModelError, PlanFileError, StrategyError
from autoplan.plan import Plan
from autoplan.request import AskedModel, Gpus, Traced, Wish, cluster_of, problem_of
from autoplan.uncollected import uncollected

if TYPE_CHECKING:
    from torch import nn

    from autoplan.runtime import Program
    from autoplan.search import Problem

_LOG = logging.getLogger(__name__)


def plan(
    model: nn.Module | str,
    *,
    gpus: Gpus = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    device: str | None = None,
    optimizer: str = "adamw",
    compiled: bool = False,
    time_limit_s: float | None = None,
) -> Plan:
    """The best plan for ``model`` on ``gpus`` under the cost models, with its reasons and its proof.

    ``model``: a module that returns a loss (or with ``loss_fn``), on any device, ``meta`` included; or a preset's
    name, a Hugging Face ``config.json`` or ``file.py:factory``. ``gpus``: a count of local GPUs, ``"8xA100-80GB"``,
    ``"2x8xH100"``, a cluster file or a :class:`Cluster`. ``example_inputs``: a tuple, a dict of keywords or one tensor,
    whose dimension 0 is the global batch unless ``global_batch`` says otherwise; a Hugging Face model needs none.
    ``loss_fn(output)`` or ``loss_fn(output, *targets)`` makes the loss of a model that returns none: its targets are
    the last elements of the tuple, or the dict's keys that its parameters name and ``forward`` does not take.
    ``strategy`` forces some keys (data, tensor, pipeline, zero_stage, micro_batch_size, schedule, ...) or bounds them
    (``{"pipeline": "<=4", "tensor": "1|2"}``), and holds limits: ``memory_headroom``, ``max_gpus``, ``stages`` (the
    layers of each, ``"0-15,16-31"``, or the first of each) and ``inside_node`` (axes that cross no node); the rest is
    planned. ``compiled``: stages run under torch.compile, and are priced so. ``time_limit_s``: search no longer than
    that; the plan is then the best found by then, and its certificate says how far from the best it may be. Raises
    :class:`InfeasibleError` where nothing fits, other :class:`AutoplanError` for bad input.
    """
    return _answer(
        "search",
        AskedModel(model, example_inputs, loss_fn, global_batch, seq, precision),
        gpus,
        device,
        Wish(strategy, optimizer, time_limit_s, compiled),
    )


def predict(
    model: nn.Module | str,
    *,
    gpus: Gpus = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    device: str | None = None,
    optimizer: str = "adamw",
    compiled: bool = False,
) -> Plan:
    """Time and memory of the strategy given; what it leaves open takes the value that costs least.

    Arguments and errors as for :func:`plan`.
    """
    return _answer(
        "predict",
        AskedModel(model, example_inputs, loss_fn, global_batch, seq, precision),
        gpus,
        device,
        Wish(strategy, optimizer, compiled=compiled),
    )


def compile(
    model: nn.Module,
    *,
    gpus: Gpus = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    strategy: Mapping[str, Any] | None = None,
    device: str | None = None,
    optimizer: str = "adamw",
    compiled: bool = False,
    plan: Plan | None = None,
) -> Program:
    """Trace, plan, rewrite: the program that trains ``model`` on ``gpus`` to the same numbers.

    Arguments as for :func:`autoplan.plan`; ``device="cpu"`` makes a gloo program for tests and demonstrations.
    Under ``torchrun``, or in an initialised process group, every rank calls this with the same model and gets its
    part. With ``plan`` that plan is executed instead of a new one. ``precision`` must be the dtype that the model's
    parameters have (convert the model first): 16-bit ones get float32 master weights, which the optimizer updates, as
    the plan prices them; ``"bf16-pure"`` and ``"fp16-pure"`` do without. With ``compiled``, or a plan that was made so,
    every stage runs under torch.compile: the same numbers up to rounding, after a first step that compiles.
    """
    from autoplan.runtime import Program, ensure_process_group
    from autoplan.search import search

    if isinstance(model, str):
        raise ModelError(
            f"compile needs a module and was given the text {model!r}",
            attempt="build the model and pass it; `autoplan.plan` takes a name",
        )
    device = _checked_device(device or os.environ.get("AUTOPLAN_DEVICE") or _local_device())
    world = ensure_process_group(device)
    if os.environ.get("AUTOPLAN_RESTARTS", "0") != "0":
        gpus = os.environ["AUTOPLAN_GPUS"]  # fewer than the script was written for: those that are left
    cluster = cluster_of(gpus if gpus is not None else (world if world > 1 else None), device)
    if world not in (1, cluster.gpus):
        raise ClusterError(
            f"{cluster.gpus} GPUs were asked for and {world} processes are running",
            legal="one process a GPU",
            attempt=f"torchrun --nproc-per-node {cluster.gpus} ..., or compile(..., gpus={world})",
        )
    traced = AskedModel(model, example_inputs, loss_fn, global_batch, seq, None).trace_whole(cluster)
    traced = dataclasses.replace(traced, precision=_checked_precision(precision, traced.layers.dtype))
    if plan is None:
        wish = Wish(strategy, optimizer, compiled=compiled)
        plan = _on_first_rank(world, lambda: _timed(search, problem_of(traced, cluster, wish), traced))
    elif compiled and not plan.compiled:
        raise StrategyError(
            "compiled stages were asked for, and the plan is of eager ones",
            where="compile(plan=, compiled=True)",
            attempt="plan again with compiled=True",
        )
    _check_made_for(plan, traced, cluster, gpus)
    _checked_precision(plan.precision, traced.layers.dtype)
    if plan.gpus_used < plan.gpus:
        _LOG.warning("autoplan: %s", plan.case)
    config = _hugging_face_config(model)
    return Program(traced.capture, plan, layers=traced.layers, cluster=cluster, device=device, config=config)


def _hugging_face_config(model: nn.Module) -> str | None:
    """``config.json`` of a transformers model, as ``save_pretrained`` writes it; None of others."""
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "to_json_string") and hasattr(model, "save_pretrained")):
        return None
    content = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


@uncollected()
def _answer(verb: str, model: AskedModel, gpus: Gpus, device: str | None, wish: Wish) -> Plan:
    import autoplan.search

    cluster = cluster_of(gpus, device)
    traced = model.trace(cluster)
    decide: dict[str, Callable[[Problem], Plan]] = {
        "search": functools.partial(autoplan.search.search, time_limit_s=wish.checked_time_limit_s()),
        "predict": autoplan.search.predict,
    }
    return _timed(decide[verb], problem_of(traced, cluster, wish), traced)


def _timed(decide: Callable[[Problem], Plan], problem: Problem, traced: Traced) -> Plan:
    started = time.perf_counter()
    progress.at(None, "searching")
    answer = decide(problem)
    seconds = {"capture": round(traced.seconds, 3), "search": round(time.perf_counter() - started, 3)}
    return dataclasses.replace(answer, seconds=seconds)


def _checked_device(device: str) -> str:
    if str(device).split(":")[0] not in ("cpu", "cuda", "none"):
        raise StrategyError(
            f"device {device!r} is none that programs run on",
            where="device=",
            legal='"cuda" for GPUs, "cpu" for gloo processes in tests and demonstrations',
        )
    return str(device)


def _checked_precision(precision: str | None, dtype: str) -> str:
    """How programs of parameters of ``dtype`` train: as asked, or with float32 masters of 16-bit ones."""
    from autoplan.runtime.masters import EXECUTED

    if precision is None or precision == dtype:
        return dtype
    legal = [name for name in EXECUTED if name.split("-")[0] == dtype]
    if precision not in legal:
        raise StrategyError(
            f"precision {precision} was asked for and the model's parameters are {dtype}",
            legal=" or ".join(legal) or dtype,
            attempt="convert the model first, e.g. model.to(torch.bfloat16)",
        )
    return precision


def _local_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "none"


def _check_made_for(plan: Plan, traced: Traced, cluster: Cluster, gpus: Gpus) -> None:
    """A plan made for another model or another cluster is refused with what differs.

    Of a cluster that nobody named, only the count is sure: links of the same GPUs may have been measured for the plan.
    cpu processes stand in for any GPUs.
    """
    if unlike := other_model(plan, traced.layers):
        raise PlanFileError(
            f"the plan was made for {plan.model.name}, and this model is {traced.layers.name} with another graph: "
            f"{unlike}",
            attempt="plan again for this model",
        )
    named = gpus is not None and not str(gpus).strip().isdigit()
    differs = other_cluster if named and not cluster.device.is_cpu else other_count
    if unlike := differs(plan, cluster):
        raise not_its_cluster(plan, cluster, unlike, attempt="plan again for these GPUs")
    if not cluster.device.is_cpu and plan.cluster.device != cluster.device.name:
        _LOG.warning(
            "autoplan: the plan's times and memory are of %s, and these are %s",
            plan.cluster.device,
            cluster.device.name,
        )


def _on_first_rank(world: int, decide: Callable[[], Plan]) -> Plan:
    """Rank 0 decides; its plan, or its error, reaches every rank."""
    if world == 1:
        return decide()
    import torch.distributed as dist

    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [decide()]
        except Exception as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
