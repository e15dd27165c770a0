"""What a user asks: the model as it was passed and then traced, the cluster that was named, what is wished of the
plan, and the search's problem made of them."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoplan import progress
from autoplan.cluster import Cluster, under_its_own_spec
from autoplan.errors import StrategyError
from autoplan.models.catalog import check_named
from autoplan.uncollected import uncollected

if TYPE_CHECKING:
    from torch import nn

    from autoplan.capture import Capture
    from autoplan.layers import LayerGraph
    from autoplan.search import Problem

Gpus = int | str | Path | Cluster | None

SAMPLES_A_GPU = 8  # the global batch where the user names none: 8 samples a GPU, said in the plan's assumptions


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What the user wants of the plan: forced keys, the optimizer, the longest search, and stages that are compiled."""

    strategy: Mapping[str, Any] | None
    optimizer: str
    time_limit_s: float | None = None
    compiled: bool = False

    def forced(self) -> dict[str, Any]:
        """The forced keys; raises :class:`StrategyError` for what is no mapping."""
        if self.strategy is None or isinstance(self.strategy, Mapping):
            return dict(self.strategy or {})
        raise StrategyError(
            f"strategy is a {type(self.strategy).__name__}, {self.strategy!r}",
            where="strategy=",
            legal='a dict of strategy keys, such as {"tensor": 2, "pipeline": 2}',
        )

    def checked_time_limit_s(self) -> float | None:
        """Seconds of search, None without a limit; raises :class:`StrategyError` for what is none."""
        limit = self.time_limit_s
        if limit is None or (isinstance(limit, (int, float)) and limit >= 0):
            return limit
        raise StrategyError(f"time limit {limit!r}", where="time_limit_s", legal="seconds from 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model, traced and folded into layers, and what was assumed on the way."""

    capture: Capture
    layers: LayerGraph
    global_batch: int
    precision: str
    assumptions: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class AskedModel:
    """The user's model as it was passed."""

    model: nn.Module | str
    example_inputs: Any
    loss_fn: Callable[..., Any] | None
    global_batch: int | None
    seq: int | None
    precision: str | None

    def __post_init__(self) -> None:
        if isinstance(self.model, str):
            check_named(self.model)

    def problem(self, cluster: Cluster, wish: Wish) -> Problem:
        """The question to the search; raises :class:`AutoplanError` for input that makes none."""
        return problem_of(self.trace(cluster), cluster, wish)

    def trace(self, cluster: Cluster) -> Traced:
        """To plan: blocks that are alike are traced once."""
        with uncollected():
            from autoplan.capture import capture_folded

            return self._trace(cluster, capture_folded)

    def trace_whole(self, cluster: Cluster) -> Traced:
        """To compile: every block is traced."""
        with uncollected():
            from autoplan.capture import capture

            return self._trace(cluster, capture)

    def _trace(self, cluster: Cluster, capture: Callable[..., Capture]) -> Traced:
        from autoplan.layers import build_layers
        from autoplan.models import trace_dtype

        started = time.perf_counter()
        progress.at(None, "tracing")
        if self.global_batch is not None and self.global_batch < 1:
            raise StrategyError(
                f"global batch {self.global_batch} is not one", legal="a whole number of samples from 1"
            )
        resolved = self._resolve()
        dtype = trace_dtype(self.precision) if self.precision else None
        captured = capture(
            resolved.model,
            resolved.example_inputs,
            loss_fn=resolved.loss_fn,
            dtype=dtype,
            device="cpu" if cluster.device.is_cpu else "cuda",
        )
        layers = dataclasses.replace(build_layers(captured), name=resolved.name or captured.name)
        global_batch, said = self._global_batch(captured, cluster)
        return Traced(
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


def problem_of(traced: Traced, cluster: Cluster, wish: Wish) -> Problem:
    """The question to the search about a model that was traced."""
    from autoplan.layers import checkpointing_words, without_checkpointing
    from autoplan.search import Problem
    from autoplan.sharding import Shardings

    _check_precision(traced.precision, cluster)
    captured, forced = traced.capture, wish.forced()
    layers, said = traced.layers, checkpointing_words(traced.capture, traced.layers)
    if said and "recompute" in forced:
        layers = without_checkpointing(layers)
        said = (f"recompute {forced['recompute']}, as asked, in place of the model's own activation checkpointing",)

    shardings = Shardings(captured, layers, cluster)
    return Problem(
        layers=layers,
        tensor_kinds=shardings.kinds,
        without_rule=shardings.without_rule,
        sequence_kinds=functools.partial(shardings.kinds, sequence=True),
        sequence_edges=functools.partial(shardings.edges, sequence=True),
        cluster=cluster,
        global_batch=traced.global_batch,
        precision=traced.precision,
        optimizer=wish.optimizer,
        compiled=wish.compiled,
        forced=forced,
        batch_coupling="; ".join(f"{c.operator} at {c.where}: {c.reason}" for c in captured.couplings),
        fixed_micro_batch=None if captured.dynamic_batch else captured.batch_size,
        assumptions=(*cluster.assumptions, *traced.assumptions, *said),
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


def cluster_of(gpus: Gpus, device: str | None) -> Cluster:
    """The cluster meant by ``gpus``; on ``device="cpu"`` a count is a count of gloo processes."""
    if isinstance(gpus, Cluster):
        return under_its_own_spec(gpus)
    if gpus is None:
        gpus = os.environ.get("AUTOPLAN_GPUS") or os.environ.get("WORLD_SIZE") or 1
    if device == "cpu" and str(gpus).lstrip("+-").isdigit():
        return Cluster.parse(f"{gpus}xcpu")
    return Cluster.parse(gpus)
