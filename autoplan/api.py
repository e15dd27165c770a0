"""The whole walk on a page: capture -> layers -> search -> passes -> runtime.

``plan`` and ``predict`` need no GPU and no process group; ``compile`` gives the calling rank its part of a program.
Under a process group rank 0 plans and the others receive its answer, so that all ranks follow one plan.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan.cluster import Cluster
from autoplan.errors import ClusterError, ModelError, PlanFileError, StrategyError
from autoplan.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from autoplan.capture import Capture
    from autoplan.layers import LayerGraph
    from autoplan.layers.types import LayerKind
    from autoplan.runtime import Program
    from autoplan.search import Problem
    from autoplan.sharding import Sharding

_LOG = logging.getLogger(__name__)

Gpus = int | str | Path | Cluster | None

SAMPLES_A_GPU = 8  # the global batch where the user names none: 8 samples a GPU, said in the plan's assumptions


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
) -> Plan:
    """The best plan for ``model`` on ``gpus`` under the cost models, with its reasons and its proof.

    ``model``: a module that returns a loss (or with ``loss_fn``), on any device, ``meta`` included; or a preset's
    name, a Hugging Face ``config.json`` or ``file.py:factory``. ``gpus``: a count of local GPUs, ``"8xA100-80GB"``,
    ``"2x8xH100"``, a cluster file or a :class:`Cluster`. ``example_inputs``: a tuple, a dict of keywords or one tensor,
    whose dimension 0 is the global batch unless ``global_batch`` says otherwise; a Hugging Face model needs none.
    ``loss_fn(output)`` or ``loss_fn(output, *targets)`` makes the loss of a model that returns none: its targets are
    the last elements of the tuple, or the dict's keys that its parameters name and ``forward`` does not take.
    ``strategy`` forces some keys (data, tensor, pipeline, zero_stage, micro_batch_size, schedule, ...); the rest is
    planned. Raises :class:`InfeasibleError` where nothing fits, other :class:`AutoplanError` for bad input.
    """
    return _answer(
        "search",
        _Model(model, example_inputs, loss_fn, global_batch, seq, precision),
        gpus,
        device,
        _Wish(strategy, optimizer),
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
) -> Plan:
    """Time and memory of the strategy given; what it leaves open takes the value that costs least.

    Arguments and errors as for :func:`plan`.
    """
    return _answer(
        "predict",
        _Model(model, example_inputs, loss_fn, global_batch, seq, precision),
        gpus,
        device,
        _Wish(strategy, optimizer),
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
    plan: Plan | None = None,
) -> Program:
    """Trace, plan, rewrite: the program that trains ``model`` on ``gpus`` to the same numbers.

    Arguments as for :func:`autoplan.plan`; ``device="cpu"`` makes a gloo program for tests and demonstrations.
    Under ``torchrun``, or in an initialised process group, every rank calls this with the same model and gets its
    part. With ``plan`` that plan is executed instead of a new one. ``precision`` must be the dtype that the model's
    parameters have: convert the model first.
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
    cluster = _cluster(gpus if gpus is not None else (world if world > 1 else None), device)
    if world not in (1, cluster.gpus):
        raise ClusterError(
            f"{cluster.gpus} GPUs were asked for and {world} processes are running",
            legal="one process a GPU",
            attempt=f"torchrun --nproc-per-node {cluster.gpus} ..., or compile(..., gpus={world})",
        )
    traced = _Model(model, example_inputs, loss_fn, global_batch, seq, None).trace_whole(cluster)
    if precision is not None and precision != traced.layers.dtype:
        raise StrategyError(
            f"precision {precision} was asked for and the model's parameters are {traced.layers.dtype}",
            legal=traced.layers.dtype,
            attempt="convert the model first, e.g. model.to(torch.bfloat16)",
        )
    if plan is None:
        wish = _Wish(strategy, optimizer)
        plan = _on_first_rank(world, lambda: _timed(search, _problem(traced, cluster, wish), traced))
    _check_made_for(plan, traced, cluster)
    if plan.gpus_used < plan.gpus:
        _LOG.warning("autoplan: %s", plan.case)
    return Program(traced.capture, plan, layers=traced.layers, cluster=cluster, device=device)


@dataclasses.dataclass(frozen=True, slots=True)
class _Wish:
    """What the user wants of the plan: forced keys and the optimizer."""

    strategy: Mapping[str, Any] | None
    optimizer: str

    def forced(self) -> dict[str, Any]:
        """The forced keys; raises :class:`StrategyError` for what is no mapping."""
        if self.strategy is None or isinstance(self.strategy, Mapping):
            return dict(self.strategy or {})
        raise StrategyError(
            f"strategy is a {type(self.strategy).__name__}, {self.strategy!r}",
            where="strategy=",
            legal='a dict of strategy keys, such as {"tensor": 2, "pipeline": 2}',
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """A model, traced and folded into layers, and what was assumed on the way."""

    capture: Capture
    layers: LayerGraph
    global_batch: int
    precision: str
    assumptions: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """The user's model as it was passed."""

    model: nn.Module | str
    example_inputs: Any
    loss_fn: Callable[..., Any] | None
    global_batch: int | None
    seq: int | None
    precision: str | None

    def trace(self, cluster: Cluster) -> _Traced:
        """To plan: blocks that are alike are traced once."""
        from autoplan.capture import capture_folded

        return self._trace(cluster, capture_folded)

    def trace_whole(self, cluster: Cluster) -> _Traced:
        """To compile: every block is traced."""
        from autoplan.capture import capture

        return self._trace(cluster, capture)

    def _trace(self, cluster: Cluster, capture: Callable[..., Capture]) -> _Traced:
        from autoplan.layers import build_layers
        from autoplan.models import trace_dtype

        started = time.perf_counter()
        if self.global_batch is not None and self.global_batch < 1:
            raise StrategyError(
                f"global batch {self.global_batch} is not one", legal="a whole number of samples from 1"
            )
        resolved = self._resolve()
        dtype = trace_dtype(self.precision) if self.precision else None
        captured = capture(resolved.model, resolved.example_inputs, loss_fn=resolved.loss_fn, dtype=dtype)
        layers = dataclasses.replace(build_layers(captured), name=resolved.name or captured.name)
        global_batch, said = self._global_batch(captured, cluster)
        return _Traced(
            capture=captured,
            layers=layers,
            global_batch=global_batch,
            precision=self.precision or layers.dtype,
            assumptions=(*resolved.assumptions, *said, *captured.notes),
            seconds=time.perf_counter() - started,
        )

    def _resolve(self) -> Any:
        from autoplan.models import from_module, resolve

        if isinstance(self.model, str):
            return resolve(self.model, sequence=self.seq, precision=self.precision, batch=self.global_batch or 2)
        return from_module(self.model, self.example_inputs, loss_fn=self.loss_fn, sequence=self.seq)

    def _global_batch(self, captured: Capture, cluster: Cluster) -> tuple[int, tuple[str, ...]]:
        if self.global_batch is not None:
            return self.global_batch, ()
        if self.example_inputs is not None:
            return captured.batch_size, ()
        chosen = SAMPLES_A_GPU * cluster.gpus
        return chosen, (f"global batch {chosen}: {SAMPLES_A_GPU} samples a GPU, because none was given",)


def _answer(verb: str, model: _Model, gpus: Gpus, device: str | None, wish: _Wish) -> Plan:
    import autoplan.search

    cluster = _cluster(gpus, device)
    traced = model.trace(cluster)
    decide = {"search": autoplan.search.search, "predict": autoplan.search.predict}[verb]
    return _timed(decide, _problem(traced, cluster, wish), traced)


def _timed(decide: Callable[[Problem], Plan], problem: Problem, traced: _Traced) -> Plan:
    started = time.perf_counter()
    answer = decide(problem)
    seconds = {"capture": round(traced.seconds, 3), "search": round(time.perf_counter() - started, 3)}
    return dataclasses.replace(answer, seconds=seconds)


def _problem(traced: _Traced, cluster: Cluster, wish: _Wish) -> Problem:
    from autoplan.search import Problem
    from autoplan.sharding import shard_model

    _check_precision(traced.precision, cluster)
    captured = traced.capture

    @functools.cache
    def tensor_kinds(degree: int) -> tuple[LayerKind, ...]:
        sharding = shard_model(captured, traced.layers, degree=degree, cluster=cluster)
        return tuple(entry.kind for entry in sharding.kinds)

    @functools.cache
    def over_sequence(degree: int) -> Sharding:
        return shard_model(captured, traced.layers, degree=degree, cluster=cluster, sequence=True)

    return Problem(
        layers=traced.layers,
        tensor_kinds=tensor_kinds,
        sequence_kinds=lambda degree: tuple(entry.kind for entry in over_sequence(degree).kinds),
        sequence_edges=lambda degree: over_sequence(degree).edges(traced.layers.edges),
        cluster=cluster,
        global_batch=traced.global_batch,
        precision=traced.precision,
        optimizer=wish.optimizer,
        forced=wish.forced(),
        batch_coupling="; ".join(f"{c.operator} at {c.where}: {c.reason}" for c in captured.couplings),
        fixed_micro_batch=None if captured.dynamic_batch else captured.batch_size,
        assumptions=(*cluster.assumptions, *traced.assumptions),
    )


def _check_precision(precision: str, cluster: Cluster) -> None:
    """Eight and four bit products need units that the device has: nothing emulates them at a useful rate."""
    needed = {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}.get(precision)
    if needed is None or any(needed in part.device.peak_flops for part in cluster.one_kind):
        return
    raise StrategyError(
        f"precision {precision} was asked for and the {cluster.device.name} has no {needed} units",
        legal=", ".join(name for name in ("bf16", "fp16", "fp32") if name in cluster.device.peak_flops),
        attempt="--precision bf16, or GPUs that have them (H100 and later)",
    )


def _checked_device(device: str) -> str:
    if str(device).split(":")[0] not in ("cpu", "cuda", "none"):
        raise StrategyError(
            f"device {device!r} is none that programs run on",
            where="device=",
            legal='"cuda" for GPUs, "cpu" for gloo processes in tests and demonstrations',
        )
    return str(device)


def _local_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "none"


def _cluster(gpus: Gpus, device: str | None) -> Cluster:
    """The cluster meant by ``gpus``; on ``device="cpu"`` a count is a count of gloo processes."""
    if isinstance(gpus, Cluster):
        return gpus
    if gpus is None:
        gpus = os.environ.get("AUTOPLAN_GPUS") or os.environ.get("WORLD_SIZE") or 1
    if device == "cpu" and str(gpus).lstrip("+-").isdigit():
        return Cluster.parse(f"{gpus}xcpu")
    return Cluster.parse(gpus)


def _check_made_for(plan: Plan, traced: _Traced, cluster: Cluster) -> None:
    """A plan made for another model or another count of GPUs is refused with what differs."""
    if plan.model.fingerprint != traced.layers.fingerprint:
        raise PlanFileError(
            f"the plan was made for {plan.model.name} ({plan.model.parameters:,} parameters), and this model is "
            f"{traced.layers.name} ({traced.layers.parameters:,} parameters) with another graph",
            attempt="plan again for this model",
        )
    if plan.gpus != cluster.gpus:
        raise PlanFileError(
            f"the plan was made for {plan.gpus} GPUs, and {cluster.gpus} are here", attempt="plan again for these GPUs"
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
